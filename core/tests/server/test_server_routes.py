"""Which routes endpoints may open: nothing that another one, the probes or an admin key guards (R12.54, L12.25)."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Callable
from typing import Any

import pytest
from fastapi import APIRouter, FastAPI
from fastapi.routing import APIRoute
from hypothesis import example, given
from hypothesis import strategies as st
from starlette.requests import Request
from starlette.responses import PlainTextResponse
from starlette.routing import BaseRoute, Match, Route

from hardpoint.config import ServerConfig
from hardpoint.errors import PluginConflictError, PluginLoadError
from hardpoint.interfaces.endpoint import Endpoint, RequestFailure
from hardpoint.server.app import Engines, create_app
from server_support import http, make_app


async def answer(request: Request) -> PlainTextResponse:
    return PlainTextResponse("a plugin's")


class Bare(Endpoint):
    """Opens exactly these routes."""

    def __init__(self, *routes: BaseRoute) -> None:
        self.router = APIRouter()
        self.router.routes.extend(routes)

    def routes(self) -> APIRouter:
        return self.router


class Asgi:
    """An application; Starlette gives its route every method unless some are named."""

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        await PlainTextResponse("swallowed")(scope, receive, send)


def get(path: str) -> Route:
    return Route(path, answer, methods=["GET"])


def refused(**endpoints: Endpoint) -> str:
    with pytest.raises(PluginConflictError) as caught:
        make_app(endpoints=endpoints)
    return str(caught.value)


@pytest.mark.parametrize("path", ["/{p:path}", "/v1/models", "/nobody/else"])
def test_a_route_of_all_methods_is_refused(path: str) -> None:
    assert "endpoint 'one'" in refused(one=Bare(Route(path, Asgi())))


def test_a_route_without_any_method_is_refused() -> None:
    assert "endpoint 'one'" in refused(one=Bare(Route("/a", answer, methods=[])))


@pytest.mark.parametrize("path", ["/live", "/ready", "/live\n", "/{name}"])
@pytest.mark.parametrize("make", [Route, APIRoute])
def test_a_probe_cannot_be_taken_by_head(path: str, make: Callable[..., Route]) -> None:
    """It needs no key, so a handler there would run for everybody."""
    assert "the server" in refused(one=Bare(make(path, answer, methods=["HEAD"])))


def test_head_is_claimed_once_and_with_get() -> None:
    head = Bare(APIRoute("/h", answer, methods=["HEAD"]))
    assert "endpoint 'two' claims /h" in refused(one=head, two=Bare(APIRoute("/h", answer, methods=["HEAD"])))
    assert "endpoint 'two' claims /h" in refused(one=Bare(APIRoute("/h", answer, methods=["GET"])), two=head)


async def test_another_method_on_a_probe_is_allowed_but_needs_the_key() -> None:
    app, _ = make_app(endpoints={"one": Bare(Route("/live", answer, methods=["POST"]))}, keys=("k" * 8,))
    async with http(app) as client:
        assert (await client.post("/live")).status_code == 401
        assert (await client.post("/live", headers={"x-api-key": "k" * 8})).text == "a plugin's"
        assert (await client.get("/live")).json() == {"status": "ok"}


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/n/{id:int}", "/n/{id:int}"),
        ("/n/{id:uuid}", "/n/{id:float}"),
        ("/a/{x}", "/{y}/b"),
        ("/admin/{id:int}", "/admin/plugins"),
        ("/a/{p:path}", "/{x}/b/c/d"),
        ("/a/x{y}", "/a/{x}z"),
        ("/a", "/a\n"),
    ],
)
def test_overlapping_parameters_collide(first: str, second: str) -> None:
    for one, two in ((first, second), (second, first)):
        assert "endpoint 'two' claims" in refused(one=Bare(get(one)), two=Bare(get(two)))


@pytest.mark.parametrize(
    ("first", "second"),
    [("/a/{x}", "/b/{x}"), ("/a/{x}", "/a"), ("/a/{x}", "/a/"), ("/a/{p:path}", "/a"), ("/a", "/A")],
)
def test_what_no_path_can_match_does_not_collide(first: str, second: str) -> None:
    make_app(endpoints={"one": Bare(get(first)), "two": Bare(get(second))})


LITERALS = ("a", "b", "5", "")
SEGMENTS = st.sampled_from([*LITERALS, "{}", "{:int}", "{:float}", "{:path}", "a{}", "{}b", "{}-{}"])


@st.composite
def templates(draw: st.DrawFn) -> str:
    names = itertools.count()
    path = "/" + "/".join(draw(st.lists(SEGMENTS, min_size=1, max_size=4)))
    return "".join(f"{{p{next(names)}" if letter == "{" else letter for letter in path)


PATHS = st.lists(st.sampled_from([*LITERALS, "ab", "a-b", "x"]), min_size=1, max_size=5).map(
    lambda x: "/" + "/".join(x)
)


@given(templates(), templates(), st.lists(PATHS, min_size=1, max_size=20))
@example("/{p0:path}", "/a/b", ["/a/b"])
def test_what_starlette_routes_to_both_is_refused(first: str, second: str, paths: list[str]) -> None:
    def match(route: Route, path: str) -> bool:
        scope = {"type": "http", "method": "GET", "path": path, "root_path": "", "headers": []}
        return route.matches(scope)[0] is Match.FULL

    if any(match(get(first), path) and match(get(second), path) for path in paths):
        refused(one=Bare(get(first)), two=Bare(get(second)))


@given(*2 * [st.lists(st.sampled_from(["a", "b", "c", "{}"]), min_size=1, max_size=4)])
def test_of_plain_segments_only_those_with_a_common_path_are_refused(first: list[str], second: list[str]) -> None:
    """Nothing sound is refused: of literals and whole parameters the judgment is exact."""
    collide = len(first) == len(second) and all(a == b or "{}" in (a, b) for a, b in zip(first, second, strict=True))
    routes = [get("/first" + "".join(f"/{x.format(f'{{p{n}}}')}" for n, x in enumerate(x))) for x in (first, second)]
    one, two = Bare(routes[0]), Bare(routes[1])
    if collide:
        refused(one=one, two=two)
    else:
        make_app(endpoints={"one": one, "two": two})


class Gives(Endpoint):
    def __init__(self, result: Any) -> None:
        self.result = result

    def routes(self) -> APIRouter:
        if isinstance(self.result, Exception):
            raise self.result
        router: APIRouter = self.result
        return router


@pytest.mark.parametrize("access", ["api", "admin"])
@pytest.mark.parametrize(
    ("result", "told"), [(None, "a NoneType"), (FastAPI(), "a FastAPI"), ([], "a list"), (RuntimeError("boo"), "boo")]
)
def test_only_a_router_is_accepted(access: Any, result: Any, told: str) -> None:
    """A whole application would bring its documentation routes, and hide others behind a mount."""
    endpoint = type("Endpoint", (Gives,), {"access": access})(result)
    with pytest.raises(PluginLoadError, match=f"endpoint 'one'.*{told}"):
        create_app(ServerConfig(), Engines(["fake"]), {"one": endpoint}, ["key"], ["admin-key"])


async def test_routes_added_after_the_check_are_not_served() -> None:
    endpoint = Bare(get("/a"))
    app, _ = make_app(endpoints={"one": endpoint})
    endpoint.router.routes.append(get("/late"))
    async with http(app) as client:
        assert (await client.get("/a")).status_code == 200
        assert (await client.get("/late")).status_code == 404


class Quit(BaseException):
    """Neither an ``Exception`` nor known to asyncio."""


@pytest.mark.parametrize("access", ["api", "admin"])
@pytest.mark.parametrize("raised", [SystemExit(7), Quit("gone"), TimeoutError()])
@pytest.mark.parametrize("on_thread", [False, True])
async def test_whatever_a_handler_raises_is_a_bare_500(access: Any, raised: BaseException, on_thread: bool) -> None:
    def leave() -> None:
        raise raised

    async def leave_the_loop() -> None:
        raise raised

    class Leaving(Endpoint):
        def routes(self) -> APIRouter:
            router = APIRouter()
            router.add_api_route("/leave", leave if on_thread else leave_the_loop, methods=["GET"])
            return router

        def error_body(self, failure: RequestFailure) -> dict[str, object]:
            return {"own form": failure.code}

    endpoint = type("Endpoint", (Leaving,), {"access": access})()
    app = create_app(ServerConfig(), Engines(["fake"]), {"one": endpoint}, ["key"], ["admin-key"])
    async with http(app) as client:
        answer = await client.get("/leave", headers={"x-api-key": "admin-key"})
        assert (answer.status_code, answer.json()) == (500, {"own form": "internal_error"})
        assert (await client.get("/live")).status_code == 200


async def test_cancelling_a_request_stays_cancelling() -> None:
    begun = asyncio.Event()

    async def wait(request: Request) -> PlainTextResponse:
        begun.set()
        await asyncio.sleep(60)
        return PlainTextResponse("")

    app, _ = make_app(endpoints={"one": Bare(Route("/wait", wait, methods=["GET"]))})
    async with http(app) as client:
        task = asyncio.create_task(client.get("/wait"))
        await begun.wait()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
