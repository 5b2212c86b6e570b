"""Probes, routes, error form and collisions of the application."""

from __future__ import annotations

import re
from typing import Any

import pytest
from fastapi import APIRouter, WebSocket

from hardpoint.config import ServerConfig
from hardpoint.errors import EngineNotReadyError, InvalidRequestError, PluginConflictError
from hardpoint.interfaces.endpoint import Endpoint
from hardpoint.server.app import Engines, started
from hardpoint.testing import FakeEngineClient
from server_support import RAISED, EchoEndpoint, http, make_app

LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|secret|\.py")


async def test_probes_follow_the_engine() -> None:
    client = FakeEngineClient()
    app, engines = make_app()
    async with http(app) as http_client:
        assert (await http_client.get("/live")).status_code == 200
        assert (await http_client.get("/ready")).status_code == 503
        engines.add("fake", client)
        assert (await http_client.get("/ready")).json() == {"status": "ok"}
        engines.draining = True
        assert (await http_client.get("/ready")).status_code == 503
        assert (await http_client.get("/live")).status_code == 200
        engines.draining = False
        client.die()
        assert (await http_client.get("/ready")).status_code == 503
        assert (await http_client.get("/live")).status_code == 503


def test_the_router_resolves_names() -> None:
    client = FakeEngineClient()
    engines = Engines(["fake"])
    with pytest.raises(EngineNotReadyError):
        engines.resolve("fake")
    engines.add("fake", client)
    assert engines.resolve("fake") is client
    assert engines.resolve(None) is client
    with pytest.raises(InvalidRequestError, match="not served") as caught:
        engines.resolve("x" * 10_000)
    assert (caught.value.status, caught.value.code, caught.value.param) == (404, "model_not_found", "model")
    assert len(str(caught.value)) < 300
    engines.draining = True
    with pytest.raises(EngineNotReadyError):
        engines.resolve("fake")


@pytest.mark.parametrize(
    ("name", "status", "code"),
    [
        ("invalid", 400, "invalid_value"),
        ("gone", 410, None),
        ("overloaded", 429, "overloaded"),
        ("notready", 503, "not_ready"),
        ("dead", 503, "engine_dead"),
        ("bug", 500, "internal_error"),
    ],
)
async def test_errors_have_one_form_and_leak_nothing(name: str, status: int, code: str | None) -> None:
    """Class 25: fixed messages; no address, path or traceback, whatever was raised."""
    async with http(make_app()[0]) as client:
        response = await client.get(f"/echo/raise/{name}")
    assert response.status_code == status
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert body["error"]["code"] == code
    assert LEAK.search(response.text) is None
    if name == "overloaded":
        assert response.headers["retry-after"] == "3"


def test_every_raised_kind_is_tried() -> None:
    assert set(RAISED) == {"invalid", "gone", "overloaded", "notready", "dead", "bug"}


async def test_an_endpoint_may_have_its_own_error_form() -> None:
    app, _ = make_app(endpoints={"a": EchoEndpoint("/a", custom=True), "b": EchoEndpoint("/b")})
    async with http(app) as client:
        assert (await client.get("/a/raise/invalid")).json() == {"oops": "n is 9; at most 3"}
        assert "error" in (await client.get("/b/raise/invalid")).json()
        assert "error" in (await client.get("/nowhere")).json()


async def test_framework_errors_take_the_same_form() -> None:
    async with http(make_app()[0]) as client:
        missing = await client.get("/nope/0xdeadbeef00")
        assert (missing.status_code, missing.json()["error"]["code"]) == (404, "not_found")
        assert "deadbeef" not in missing.text
        wrong = await client.put("/echo")
        assert (wrong.status_code, wrong.json()["error"]["code"]) == (405, "method_not_allowed")
        assert wrong.headers["allow"] == "POST"
        typed = await client.get("/echo/typed/one")
        assert (typed.status_code, typed.json()["error"]["param"]) == (400, "number")


async def test_no_redirect_is_ever_made() -> None:
    """Class 12: a redirect would take its target from the Host header."""
    async with http(make_app()[0]) as client:
        for path in ("/live/", "/echo/", "//live", "/echo//"):
            assert (await client.get(path)).status_code == 404


async def test_there_is_no_schema_or_documentation_route() -> None:
    async with http(make_app()[0]) as client:
        for path in ("/docs", "/redoc", "/openapi.json"):
            assert (await client.get(path)).status_code == 404


async def test_no_endpoint_means_only_the_probes() -> None:
    """I12.2."""
    app, _ = make_app(endpoints={})
    async with http(app) as client:
        assert (await client.get("/live")).status_code == 200
        assert (await client.post("/echo")).status_code == 404


class OneRoute(Endpoint):
    def __init__(self, path: str, *methods: str) -> None:
        self.path = path
        self.methods = list(methods) or ["GET"]

    def routes(self) -> APIRouter:
        router = APIRouter()

        async def handler() -> None:
            return None

        router.add_api_route(self.path, handler, methods=self.methods)
        return router


@pytest.mark.parametrize(
    ("first", "second"),
    [
        ("/a", "/a"),
        ("/a/{x}", "/a/{y}"),
        ("/a/{x}", "/a/b"),
        ("/a/b", "/a/{x}"),
        ("/a/{x:path}", "/a/b/c"),
        ("/a/{x:path}/c", "/a/{y}/{z}"),
    ],
)
def test_colliding_routes_refuse_the_start(first: str, second: str) -> None:
    """R12.54, L12.25: both endpoints are named."""
    with pytest.raises(PluginConflictError, match="endpoint 'two' claims .*endpoint 'one'"):
        make_app(endpoints={"one": OneRoute(first), "two": OneRoute(second)})


@pytest.mark.parametrize("path", ["/live", "/ready", "/{x}", "/{x:path}"])
def test_the_probes_cannot_be_taken(path: str) -> None:
    """R12.54."""
    with pytest.raises(PluginConflictError, match="the server"):
        make_app(endpoints={"one": OneRoute(path)})


def test_different_methods_or_paths_do_not_collide() -> None:
    make_app(endpoints={"one": OneRoute("/a", "GET"), "two": OneRoute("/a", "POST"), "three": OneRoute("/a/b")})


def test_one_endpoint_may_overlap_itself() -> None:
    class Both(OneRoute):
        def routes(self) -> APIRouter:
            router = super().routes()
            router.routes.extend(OneRoute("/a/{x}").routes().routes)
            return router

    make_app(endpoints={"one": Both("/a/b")})


def test_other_than_http_routes_are_refused() -> None:
    class Socket(Endpoint):
        def routes(self) -> APIRouter:
            router = APIRouter()

            @router.websocket("/ws")
            async def handler(socket: WebSocket) -> None:
                await socket.accept()

            return router

    with pytest.raises(PluginConflictError, match="other than an HTTP route"):
        make_app(endpoints={"one": Socket()})


async def test_endpoints_start_in_order_and_stop_in_reverse_even_after_a_failed_start() -> None:
    class Failing(EchoEndpoint):
        async def start(self) -> None:
            raise RuntimeError("no")

    good = EchoEndpoint()
    async with started({"good": good}):
        assert good.life == ["start"]
    assert good.life == ["start", "stop"]
    with pytest.raises(RuntimeError, match="no"):
        async with started({"good": good, "bad": Failing("/b")}):
            pass
    assert good.life == ["start", "stop", "start", "stop"]


@pytest.mark.parametrize("given", ["abc-123", "x" * 128])
async def test_request_ids_are_echoed_on_every_answer(given: str) -> None:
    async with http(make_app(keys=("k" * 8,))[0]) as client:
        for path in ("/live", "/nowhere"):
            response = await client.get(path, headers={"x-request-id": given})
            assert response.headers["x-request-id"] == given


@pytest.mark.parametrize("given", ["", "x" * 129, "a b", "ä"])
async def test_odd_request_ids_are_not_echoed(given: str) -> None:
    async with http(make_app()[0]) as client:
        response = await client.get("/live", headers={b"x-request-id": given.encode()})
        assert "x-request-id" not in response.headers


async def test_web_sockets_are_closed() -> None:
    app, _ = make_app()
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "websocket.connect"}

    await app({"type": "websocket", "path": "/echo", "headers": []}, receive, send)
    assert sent == [{"type": "websocket.close", "code": 1008}]


def test_the_default_allow_list_is_one_visible_value() -> None:
    assert ServerConfig().endpoints == ("openai", "ops")
