"""Hosts, keys and limits, attacked from the raw request on."""

from __future__ import annotations

import ast
import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from fastapi.routing import APIRoute
from hypothesis import given, settings
from hypothesis import strategies as st

import hardpoint.server.guards as guards_module
from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError
from hardpoint.server.guards import PROBES, _json_depth_exceeds
from hardpoint.server.keys import is_loopback, load_keys, require_safe_binding
from hardpoint.testing import FakeEngineClient
from server_support import EchoEndpoint, http, make_app

KEYS = ("first-key-1", "second-key-2")


def all_routes() -> list[tuple[str, str]]:
    """Every route of the served endpoints, from the routers themselves."""
    found = [
        (method, route.path.replace("{name}", "bug").replace("{number}", "1"))
        for route in EchoEndpoint().routes().routes
        if isinstance(route, APIRoute)
        for method in route.methods or ()
    ]
    assert found
    return found


@pytest.mark.parametrize(("method", "path"), [*all_routes(), ("GET", "/nowhere"), ("POST", "/live"), ("GET", "/")])
async def test_every_route_needs_a_key(method: str, path: str) -> None:
    """Class 13; routes that do not exist say no more than others."""
    async with http(make_app(keys=KEYS)[0]) as client:
        response = await client.request(method, path)
        assert response.status_code == 401
        assert response.json()["error"]["type"] == "authentication_error"
        assert response.headers["www-authenticate"] == "Bearer"


@pytest.mark.parametrize("path", PROBES)
async def test_the_probes_need_none(path: str) -> None:
    async with http(make_app(keys=KEYS, client=FakeEngineClient())[0]) as client:
        assert (await client.get(path)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer first-key-1"},
        {"authorization": "bearer second-key-2"},
        {"Authorization": "BEARER   first-key-1 "},
        {"x-api-key": "second-key-2"},
        {"X-Api-Key": " first-key-1 "},
    ],
)
async def test_either_key_in_either_header(headers: dict[str, str]) -> None:
    async with http(make_app(keys=KEYS)[0]) as client:
        assert (await client.post("/echo", headers=headers)).status_code == 200


@pytest.mark.parametrize(
    "headers",
    [
        {"authorization": "Bearer"},
        {"authorization": "Bearer "},
        {"authorization": "Bearer first-key"},
        {"authorization": "Bearer first-key-11"},
        {"authorization": "Bearer FIRST-KEY-1"},
        {"authorization": "Basic first-key-1"},
        {"authorization": "first-key-1"},
        {"authorization": "Bearer \xff\xfe"},
        {"x-api-key": ""},
        {"x-api-key": "first-key-1, second-key-2"},
        {"cookie": "first-key-1"},
        {"authorization": "Bearer wrong-key", "x-api-key": "first-key-1"},
    ],
)
async def test_anything_else_is_refused(headers: dict[str, str]) -> None:
    encoded = {name.encode(): value.encode("latin-1") for name, value in headers.items()}
    async with http(make_app(keys=KEYS)[0]) as client:
        assert (await client.post("/echo?api_key=first-key-1", headers=encoded)).status_code == 401


async def test_spellings_of_the_probes_open_nothing() -> None:
    """Class 12: the guard judges the path that is routed, so a trick either is the probe or needs a key."""
    async with http(make_app(keys=KEYS, client=FakeEngineClient())[0]) as client:
        for path in ("//live", "/live/", "/live/../echo", "/LIVE", "/live;x", "/live%2f", "/live%00", "/.//live"):
            response = await client.get(path)
            assert response.status_code == 401, path
        for path in ("/echo%2f..%2flive", "/%2e%2e/live", "/echo?/live", "/echo#/live"):
            assert (await client.post(path)).status_code == 401, path


def scope_of(path: str, raw_path: bytes, root_path: str = "") -> dict[str, Any]:
    return {
        "type": "http",
        "method": "GET",
        "path": path,
        "raw_path": raw_path,
        "root_path": root_path,
        "query_string": b"",
        "headers": [(b"host", b"localhost"), (b"x-forwarded-prefix", b"/live"), (b"x-original-url", b"/live")],
        "scheme": "http",
        "server": ("127.0.0.1", 80),
    }


@pytest.mark.parametrize("path", ["/echo/raise/bug", "http://127.0.0.1/live", "*", "", "/echo/raise/live"])
async def test_the_raw_scope_decides(path: str) -> None:
    app, _ = make_app(keys=KEYS)
    sent: list[Any] = []

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return {"type": "http.request", "body": b"", "more_body": False}

    await app(scope_of(path, b"/live"), receive, send)
    assert sent[0]["status"] == 401


LOOPBACK_HOSTS = ["localhost", "127.0.0.1", "[::1]", "localhost:8000", "LOCALHOST", "[::1]:80"]
FOREIGN_HOSTS = [
    "evil.example",
    "127.0.0.1.evil.example",
    "localhost.evil.example:8000",
    "evil.example@127.0.0.1",
    "127.0.0.1@evil.example",
    "evil.example#@localhost",
    "localhost/../evil",
    "localhost,evil.example",
    "localhost evil.example",
    "2130706433",
    "0x7f000001",
    "[::ffff:1.2.3.4]",
    "[::1",
    "localhost:port",
    "localhost:123456",
    "",
]


@pytest.mark.parametrize("host", LOOPBACK_HOSTS)
async def test_loopback_hosts(host: str) -> None:
    async with http(make_app()[0]) as client:
        assert (await client.post("/echo", headers={"host": host})).status_code == 200


@pytest.mark.parametrize("path", ["/echo", "/live", "/ready", "/nowhere"])
@pytest.mark.parametrize("host", FOREIGN_HOSTS)
async def test_foreign_hosts_are_refused_on_every_route(host: str, path: str) -> None:
    """Class 14: DNS rebinding."""
    async with http(make_app()[0]) as client:
        response = await client.get(path, headers={"host": host})
        assert (response.status_code, response.json()["error"]["code"]) == (403, "host_refused")


async def test_two_hosts_are_refused() -> None:
    async with http(make_app()[0]) as client:
        headers = [("host", "localhost"), ("host", "evil.example")]
        assert (await client.get("/live", headers=headers)).status_code == 403


@pytest.mark.parametrize(
    ("origin", "allowed"),
    [
        ("http://localhost:3000", True),
        ("http://127.0.0.1", True),
        ("https://evil.example", False),
        ("null", False),
        ("http://localhost.evil.example", False),
        ("http://localhost@evil.example", False),
        ("localhost", False),
        ("", False),
    ],
)
async def test_origins(origin: str, allowed: bool) -> None:
    async with http(make_app()[0]) as client:
        response = await client.post("/echo", headers={"origin": origin})
        assert response.status_code == (200 if allowed else 403)
        assert "access-control-allow-origin" not in response.headers


async def test_listed_hosts_and_their_origins() -> None:
    config = ServerConfig(host="0.0.0.0", allowed_hosts=("api.example",))
    async with http(make_app(config)[0]) as client:
        for host, status in (("api.example", 200), ("API.example:443", 200), ("other.example", 403)):
            assert (await client.post("/echo", headers={"host": host})).status_code == status
        headers = {"host": "api.example", "origin": "https://api.example"}
        assert (await client.post("/echo", headers=headers)).status_code == 200


async def test_beyond_loopback_any_host_but_only_its_own_origin() -> None:
    async with http(make_app(ServerConfig(host="0.0.0.0", allow_anonymous=True))[0]) as client:
        headers = {"host": "box.lan:8000"}
        assert (await client.post("/echo", headers=headers)).status_code == 200
        assert (await client.post("/echo", headers={**headers, "origin": "http://box.lan"})).status_code == 200
        assert (await client.post("/echo", headers={**headers, "origin": "http://evil.example"})).status_code == 403


async def test_header_limit() -> None:
    async with http(make_app()[0]) as client:
        response = await client.post("/echo", headers={"x-big": "x" * 2**20})
        assert (response.status_code, response.json()["error"]["code"]) == (431, "headers_too_large")
        assert (await client.post("/echo", headers={"x-big": "x" * 60_000})).status_code == 200


async def test_body_limit_with_and_without_a_length() -> None:
    config = ServerConfig(max_body_bytes=2048)

    async def pieces(count: int) -> Any:
        for _ in range(count):
            yield b"x" * 512

    async with http(make_app(config)[0]) as client:
        assert (await client.post("/echo", content=b"x" * 2048)).json() == {"size": 2048}
        assert (await client.post("/echo", content=pieces(4))).json() == {"size": 2048}
        for response in (
            await client.post("/echo", content=b"x" * 2049),
            await client.post("/echo", content=pieces(5)),
            await client.post("/echo", content=b"", headers={"content-length": "9" * 500}),
            await client.post("/echo", content=b"", headers={"content-length": "-1"}),
        ):
            assert (response.status_code, response.json()["error"]["code"]) == (413, "body_too_large")


@pytest.mark.parametrize("encoding", ["gzip", "deflate", "br", "identity, gzip", "GZIP"])
async def test_compressed_bodies_are_refused(encoding: str) -> None:
    """Class 21: nothing is ever decompressed here."""
    async with http(make_app()[0]) as client:
        response = await client.post("/echo", content=b"x", headers={"content-encoding": encoding})
        assert response.status_code == 415


@pytest.mark.parametrize("kind", ["application/json", "application/json; charset=utf-8", "APPLICATION/JSON"])
async def test_deep_json(kind: str) -> None:
    """Class 40."""
    async with http(make_app()[0]) as client:
        for depth, status in ((100, 200), (101, 400), (120, 400), (100_000, 400)):
            body = b"[" * depth + b"]" * depth
            response = await client.post("/echo", content=body, headers={"content-type": kind})
            assert response.status_code == status
        text = json.dumps({"text": "[" * 500 + '\\"{' * 100}).encode()
        assert (await client.post("/echo", content=text, headers={"content-type": kind})).status_code == 200


def depth_of(value: Any) -> int:
    if isinstance(value, dict):
        return 1 + max((depth_of(item) for item in value.values()), default=0)
    if isinstance(value, list):
        return 1 + max((depth_of(item) for item in value), default=0)
    return 0


TRICKY = st.text(st.sampled_from('[]{}"\\,:ab\n'), max_size=12)
JSON = st.recursive(TRICKY, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TRICKY, inner, max_size=3))


@settings(max_examples=300, deadline=None)
@given(JSON, st.integers(0, 6))
def test_measured_depth_is_the_parsed_depth(value: Any, limit: int) -> None:
    assert _json_depth_exceeds(json.dumps(value).encode(), limit) == (depth_of(value) > limit)


@pytest.mark.parametrize(
    "body",
    [
        b'[[[["' + b'\\"' * 2_000_000,
        b'"' * 4_000_000 + b"[" * 200,
        b"[]," * 2_000_000,
        b"\\" * 4_000_000 + b"[{" * 100,
        b'"' + b"\\" * 3_999_999 + b'"' + b"[" * 50,
    ],
)
def test_measuring_takes_linear_time(body: bytes) -> None:
    begun = time.monotonic()
    _json_depth_exceeds(body, 10)
    assert time.monotonic() - begun < 1.0


def test_depth_carries_over_the_scanned_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(guards_module, "_SCAN_BYTES", 3)
    body = b'{"a[[": [[{"b": "]]]]\\""}]]}'
    assert not _json_depth_exceeds(body, 4)
    assert _json_depth_exceeds(body, 3)


async def test_a_client_that_leaves_while_sending_is_not_answered() -> None:
    app, _ = make_app()
    sent: list[Any] = []
    messages = [{"type": "http.request", "body": b"x", "more_body": True}, {"type": "http.disconnect"}]

    async def send(message: Any) -> None:
        sent.append(message)

    async def receive() -> Any:
        return messages.pop(0)

    await app({**scope_of("/echo", b"/echo"), "method": "POST"}, receive, send)
    assert sent == []


def test_keys_are_compared_in_constant_time() -> None:
    """Class 15: no equality test touches a key."""
    tree = ast.parse(Path(guards_module.__file__).read_text())
    guard = next(node for node in tree.body if isinstance(node, ast.ClassDef) and node.name == "KeyGuard")
    compared = [ast.unparse(node) for node in ast.walk(guard) if isinstance(node, ast.Compare)]
    assert not any("key" in text and "given" not in text for text in compared)
    assert "hmac.compare_digest" in ast.unparse(guard)


def test_keys_from_arguments_and_file(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text("# ours\n  file-key-1 \n\n # indented\nfile-key-2\nfile-key-1\n")
    assert load_keys(ServerConfig(api_key=("given-key",), api_key_file=str(path))) == (
        "given-key",
        "file-key-1",
        "file-key-2",
    )


@pytest.mark.parametrize("key", ["short", "with space", "tab\tkey-tab", "uml\u00e4ut-key", "nul\0nul-key", ""])
def test_unusable_keys(key: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load_keys(ServerConfig(api_key=(key,)))
    assert not key or key not in str(caught.value)


def test_key_files_that_cannot_serve(tmp_path: Path) -> None:
    empty = tmp_path / "empty"
    empty.write_text("# nothing\n")
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (tmp_path / "absent", empty, tmp_path, pipe):
        with pytest.raises(ConfigError, match="api-key-file"):
            load_keys(ServerConfig(api_key_file=str(path)))


@pytest.mark.parametrize(
    ("host", "loopback"),
    [("127.0.0.1", True), ("127.0.0.2", True), ("::1", True), ("localhost", True), ("0.0.0.0", False), ("::", False)],
)
def test_loopback(host: str, loopback: bool) -> None:
    assert is_loopback(host) == loopback


def test_binding_beyond_loopback_needs_a_key_or_consent() -> None:
    open_host = ServerConfig(host="0.0.0.0")
    with pytest.raises(ConfigError, match="--allow-anonymous"):
        require_safe_binding(open_host, ())
    require_safe_binding(open_host, KEYS)
    require_safe_binding(ServerConfig(host="0.0.0.0", allow_anonymous=True), ())
    require_safe_binding(ServerConfig(), ())
