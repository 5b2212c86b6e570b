"""Routes of admin endpoints: which keys open them, whatever the path looks like, and starts that are refused."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse
from hypothesis import given, settings
from hypothesis import strategies as st
from starlette.responses import PlainTextResponse

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError, PluginConflictError, PluginLoadError
from hardpoint.interfaces.endpoint import Endpoint, RequestFailure
from hardpoint.server.app import Engines, create_app
from hardpoint.server.keys import load_admin_keys, load_keys, require_safe_binding
from server_support import EchoEndpoint, http

API, ADMIN = "api-key-one", "admin-key-one"


class Secrets(Endpoint):
    """One route of each make, with its own form of errors."""

    access = "admin"

    def __init__(self) -> None:
        self.calls: list[str] = []

    def routes(self) -> APIRouter:
        router = APIRouter()

        @router.get("/admin/secret/{name}")
        async def secret(name: str) -> JSONResponse:
            self.calls.append(name)
            return JSONResponse({"secret": name})

        @router.post("/admin/number")
        async def number(value: dict[str, int]) -> None:
            self.calls.append("number")
            raise ValueError("Traceback in /secret/path.py")

        async def bare(request: Request) -> PlainTextResponse:
            self.calls.append("bare")
            return PlainTextResponse("bare")

        router.add_route("/admin/bare", bare, methods=["GET"])
        return router

    def error_body(self, failure: RequestFailure) -> dict[str, object]:
        return {"admin": failure.message}


def guarded(keys: tuple[str, ...] = (API,), admin_keys: tuple[str, ...] = (ADMIN,)) -> tuple[Any, Secrets]:
    secrets = Secrets()
    endpoints = {"echo": EchoEndpoint(), "secrets": secrets}
    return create_app(ServerConfig(), Engines(["fake"]), endpoints, keys, admin_keys), secrets


def bearer(key: str) -> dict[str, str]:
    return {"authorization": f"Bearer {key}"}


async def test_an_admin_key_opens_every_route() -> None:
    app, secrets = guarded()
    async with http(app) as client:
        assert (await client.get("/admin/secret/x", headers=bearer(ADMIN))).json() == {"secret": "x"}
        assert (await client.get("/admin/bare", headers={"x-api-key": ADMIN})).text == "bare"
        assert (await client.post("/echo", headers=bearer(ADMIN))).status_code == 200, "an API key is not needed too"
        assert (await client.get("/live")).status_code == 200
    assert secrets.calls == ["x", "bare"]


@pytest.mark.parametrize(
    ("method", "path"), [("GET", "/admin/secret/x"), ("GET", "/admin/bare"), ("POST", "/admin/number")]
)
async def test_an_api_key_is_not_enough(method: str, path: str) -> None:
    """403 in the error form, before a body is parsed or a handler runs; also for a method the route does not take."""
    app, secrets = guarded()
    async with http(app) as client:
        for used in (method, "PUT"):
            answer = await client.request(used, path, headers=bearer(API), content=b"{not json")
            assert answer.status_code == 403, used
            error = answer.json()["error"]
            assert (error["type"], error["code"]) == ("permission_error", "admin_key_required")
        assert (await client.post("/echo", headers=bearer(API))).status_code == 200
    assert secrets.calls == []


@pytest.mark.parametrize("keys", [(API,), ()], ids=["with API keys", "without any API key"])
async def test_without_a_known_key_nothing_is_open(keys: tuple[str, ...]) -> None:
    """A server that lets anybody use the model still guards its admin routes."""
    app, secrets = guarded(keys)
    async with http(app) as client:
        for headers in ({}, bearer(""), bearer("another-key"), bearer(ADMIN + "x"), {"x-api-key": ADMIN[:-1]}):
            answer = await client.get("/admin/secret/x", headers=headers)
            assert answer.status_code == 401, headers
            assert answer.headers["www-authenticate"] == "Bearer"
            assert answer.json()["error"]["code"] == "invalid_api_key"
    assert secrets.calls == []


SPELLINGS = (
    "/admin/secret/x/",
    "//admin/secret/x",
    "/admin//secret/x",
    "/./admin/secret/x",
    "/live/../admin/secret/x",
    "/echo/../admin/secret/x",
    "/ADMIN/secret/x",
    "/admin/secret/x;y",
    "/admin/secret/x?key=1",
    "/admin%2fsecret/x",
    "/%61dmin/secret/x",
    "/admin/secret/%2e%2e",
    "/admin/secret/x%00",
)


@pytest.mark.parametrize("path", SPELLINGS)
@pytest.mark.parametrize("keys", [(API,), ()], ids=["keyed", "open"])
async def test_no_spelling_of_a_path_reaches_the_handler(path: str, keys: tuple[str, ...]) -> None:
    """Class 12: what is routed to the handler is guarded, because the route itself asks."""
    app, secrets = guarded(keys)
    async with http(app) as client:
        answer = await client.get(path, headers=bearer(API))
        assert answer.status_code in ((403, 404) if keys else (401, 404))
    scope: dict[str, Any] = {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": b"/live",
        "root_path": "",
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"hardpoint.access", b"admin"), (b"x-original-url", b"/live")],
        "scheme": "http",
        "server": ("127.0.0.1", 80),
        "hardpoint.access": "admin",
    }
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope, receive, send)
    assert sent[0]["status"] in (401, 404)
    assert secrets.calls == []


PIECES = st.sampled_from(
    ["admin", "secret", "bare", "x", "live", "echo", "", ".", "..", "%2e", "%2f", ";a", "\x00", "Admin", "//"]
)
HEADERS = st.sampled_from([[], [(b"authorization", f"Bearer {API}".encode())], [(b"x-api-key", b"guess")]])


@settings(deadline=None, max_examples=150)
@given(
    st.lists(PIECES, max_size=6), st.sampled_from(["", "/", "/admin", "/x"]), HEADERS, st.sampled_from(["GET", "POST"])
)
def test_no_path_at_all_reaches_a_handler(pieces: list[str], root: str, headers: list[Any], method: str) -> None:
    app, secrets = guarded(())
    path = "/" + "/".join(pieces)
    common = {"type": "http", "method": method, "raw_path": path.encode(), "query_string": b"", "scheme": "http"}
    host = [(b"host", b"localhost"), (b"x-forwarded-prefix", b"/admin")]
    scope = {**common, "path": path, "root_path": root, "headers": host + headers, "server": ("127.0.0.1", 80)}
    statuses: list[int] = []

    async def send(message: Any) -> None:
        statuses.append(message.get("status", 0))

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    asyncio.run(app(scope, receive, send))
    assert secrets.calls == []
    assert statuses[0] in (200, 401, 403, 404, 405, 503)


async def test_a_root_path_does_not_help() -> None:
    app, secrets = guarded(())
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    scope = {"type": "http", "method": "GET", "path": "/p/admin/secret/x", "raw_path": b"/p", "root_path": "/p"}
    scope |= {"query_string": b"", "headers": [(b"host", b"localhost")], "scheme": "http", "server": ("127.0.0.1", 80)}
    await app(scope, receive, send)
    assert sent[0]["status"] == 401
    assert json.loads(sent[1]["body"])["error"]["message"] == "a valid admin key is required"
    assert secrets.calls == []


async def test_errors_of_an_admin_route_take_its_own_form_and_leak_nothing() -> None:
    app, _ = guarded()
    async with http(app) as client:
        broken = await client.post("/admin/number", headers=bearer(ADMIN), json={"a": 1})
        assert (broken.status_code, broken.json()) == (500, {"admin": "internal error"})
        wrong = await client.post("/admin/number", headers=bearer(ADMIN), content=b"{")
        assert wrong.status_code == 400
        assert (await client.put("/admin/bare", headers=bearer(ADMIN))).status_code == 405


def test_without_an_admin_key_the_start_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"'secrets'.*--admin-key-file, HARDPOINT_ADMIN_KEY.*server\.endpoints"):
        guarded(admin_keys=())


def test_a_misspelt_access_is_no_open_door() -> None:
    class Misspelt(EchoEndpoint):
        access = "Admin"  # type: ignore[assignment]

    with pytest.raises(PluginLoadError, match="'Admin'; it must be 'api' or 'admin'"):
        create_app(ServerConfig(), Engines(["fake"]), {"echo": Misspelt()}, (), (ADMIN,))


def test_admin_routes_collide_like_others() -> None:
    """R12.54: an endpoint open to API keys cannot stand before an admin route."""
    for other in (Secrets(), Wide()):
        with pytest.raises(PluginConflictError, match="endpoint 'b' claims"):
            create_app(ServerConfig(), Engines(["fake"]), {"a": other, "b": Secrets()}, (), (ADMIN,))


class Wide(Endpoint):
    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/admin/{anything:path}", lambda anything: anything, methods=["GET"])
        return router


def test_admin_keys_come_from_settings_and_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\nfile-key-1\n")
    config = ServerConfig(admin_key=("given-key-1",), admin_key_file=str(path))
    assert load_admin_keys(config) == ("given-key-1", "file-key-1")
    assert load_keys(config) == ()
    with pytest.raises(ConfigError, match="--admin-key-file"):
        load_admin_keys(ServerConfig(admin_key_file=str(tmp_path)))
    with pytest.raises(ConfigError, match="an admin key must be at least"):
        load_admin_keys(ServerConfig(admin_key=("short",)))


def test_one_key_cannot_be_both() -> None:
    """Or the API's users could do what the operator does."""
    with pytest.raises(ConfigError, match="both an API key and an admin key") as caught:
        load_admin_keys(ServerConfig(api_key=(API, "shared-key"), admin_key=("shared-key",)))
    assert "shared-key" not in str(caught.value)


def test_an_admin_key_does_not_make_an_open_address_safe() -> None:
    """The model would still be anybody's: admin keys do not close the API's routes."""
    config = ServerConfig(host="0.0.0.0", admin_key=(ADMIN,))
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        require_safe_binding(config, load_keys(config))
