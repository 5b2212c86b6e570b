"""ASGI guards in front of every route: host and origin, key, header and body limits. They judge the raw path."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import re
from collections.abc import Iterable
from typing import Any

import numpy as np
from starlette.responses import JSONResponse
from starlette.routing import BaseRoute
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from hardpoint.config import ServerConfig
from hardpoint.errors import PluginError
from hardpoint.interfaces.endpoint import RequestFailure
from hardpoint.server.keys import is_loopback

PROBES = ("/live", "/ready")
"""The only paths that need no key."""

_ACCESS = "hardpoint.access"
"""Key in a request's scope: ``"admin"`` or ``"api"`` by the key it came with, None without a known one."""
_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_SCAN_BYTES = 1 << 20
_HOST = re.compile(r"(?:\[([0-9a-f:.]+)\]|([a-z0-9._-]+))(?::[0-9]{1,5})?", re.IGNORECASE)
_ORIGIN = re.compile(r"[a-z][a-z0-9+.-]*://(.+)", re.IGNORECASE)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")


def _refusal(failure: RequestFailure) -> ASGIApp:
    closing = {"connection": "close"} if failure.status in (413, 431) else {}
    return JSONResponse(failure.body, failure.status, {**failure.headers, **closing})


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


class _Guard:
    """Passes lifespan through and refuses web sockets, which no endpoint uses."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            failure = self.judge(scope)
            answer = self.admit if failure is None else _refusal(failure)
            await answer(scope, receive, send)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def judge(self, scope: Scope) -> RequestFailure | None:
        del scope
        return None

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app(scope, receive, send)


class RequestId(_Guard):
    """Echoes a well-formed ``X-Request-Id``; it is never a key for anything."""

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        given = _headers(scope, b"x-request-id")
        if not given or _REQUEST_ID.fullmatch(given[0]) is None:
            await self.app(scope, receive, send)
            return

        async def stamped(message: Message) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", given[0])]}
            await send(message)

        await self.app(scope, receive, stamped)


class HostGuard(_Guard):
    """Refuses foreign ``Host`` and ``Origin`` values, so that no web page can reach a loopback server by rebinding.

    Bound beyond loopback with no ``allowed_hosts`` set, any host name is accepted (a key is then required anyway). An
    origin must be an accepted host or the very host the request names.
    """

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._any = not is_loopback(config.host) and not config.allowed_hosts
        self._hosts = {host.lower() for host in (*_LOOPBACK, config.host, *config.allowed_hosts)}

    def judge(self, scope: Scope) -> RequestFailure | None:
        hosts = [_host_name(value.decode("latin-1")) for value in _headers(scope, b"host")]
        if len(hosts) > 1 or not all(host is not None and (self._any or host in self._hosts) for host in hosts):
            return RequestFailure(403, "this Host is not served here; see server.allowed_hosts", None, "host_refused")
        for value in _headers(scope, b"origin"):
            location = _ORIGIN.fullmatch(value.decode("latin-1"))
            origin = _host_name(location[1]) if location else None
            if origin is None or origin not in {*self._hosts, *hosts}:
                return RequestFailure(403, "requests from this Origin are not allowed", None, "origin_refused")
        return None


def _host_name(location: str) -> str | None:
    """The name in ``name[:port]``; None for anything else, such as user information or a path."""
    match = _HOST.fullmatch(location)
    return (match[1] or match[2]).lower() if match else None


class ExitGuard(_Guard):
    """Around the routes alone: what is no ``Exception``, such as ``SystemExit``, fails a request and not the server."""

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await self.app(scope, receive, send)
        except (Exception, asyncio.CancelledError, GeneratorExit, KeyboardInterrupt):
            raise
        except BaseException as error:
            raise PluginError(f"the route raised {type(error).__name__}: {error}") from error


class KeyGuard(_Guard):
    """Every path needs a key but the probes. Keys are compared as digests in constant time.

    Which kind of key a request has is noted in its scope, for :class:`AdminRoute`. An admin key is an API key too.
    """

    def __init__(self, app: ASGIApp, keys: Iterable[str], admin_keys: Iterable[str] = ()) -> None:
        super().__init__(app)
        self._digests = [(hashlib.sha256(key.encode()).digest(), "api") for key in keys]
        self._is_open = not self._digests
        self._digests += [(hashlib.sha256(key.encode()).digest(), "admin") for key in admin_keys]

    def judge(self, scope: Scope) -> RequestFailure | None:
        scope[_ACCESS] = access = self._access(scope)
        is_probe = scope["path"] in PROBES and scope["method"] in ("GET", "HEAD")
        return None if access is not None or self._is_open or is_probe else _no_key("a valid API key is required")

    def _access(self, scope: Scope) -> str | None:
        given = self._given(scope)
        if given is None:
            return None
        digest = hashlib.sha256(given).digest()
        # Every key is compared, so that the time tells nothing about which one came close.
        matches = [access for known, access in self._digests if hmac.compare_digest(digest, known)]
        return matches[0] if matches else None

    def _given(self, scope: Scope) -> bytes | None:
        for value in _headers(scope, b"authorization"):
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        keys = _headers(scope, b"x-api-key")
        return keys[0].strip() if keys else None


class AdminRoute(BaseRoute):
    """A route of an admin endpoint. It asks for the key itself, so no spelling of a path that leads to it avoids it."""

    def __init__(self, route: BaseRoute) -> None:
        self._route = route

    def matches(self, scope: Scope) -> Any:
        return self._route.matches(scope)

    async def handle(self, scope: Scope, receive: Receive, send: Send) -> None:
        access = scope.get(_ACCESS)
        answer: ASGIApp = self._route.handle
        if access is None:
            answer = _refusal(_no_key("a valid admin key is required"))
        elif access != "admin":
            message = "this route needs an admin key; an API key is not enough"
            answer = _refusal(RequestFailure(403, message, None, "admin_key_required"))
        await answer(scope, receive, send)


def _no_key(message: str) -> RequestFailure:
    return RequestFailure(401, message, None, "invalid_api_key", {"WWW-Authenticate": "Bearer"})


class BodyGuard(_Guard):
    """Bounds headers, body size and JSON depth before anything is parsed. Chunks are counted by the protocol."""

    def __init__(self, app: ASGIApp, config: ServerConfig) -> None:
        super().__init__(app)
        self._config = config

    def judge(self, scope: Scope) -> RequestFailure | None:
        size = sum(len(key) + len(value) for key, value in scope["headers"])
        if size > self._config.max_header_bytes:
            limit = self._config.max_header_bytes
            return RequestFailure(431, f"the headers exceed {limit} bytes", None, "headers_too_large")
        if any(value.lower() != b"identity" for value in _headers(scope, b"content-encoding")):
            return RequestFailure(415, "compressed request bodies are not accepted", None, "unsupported_encoding")
        lengths = _headers(scope, b"content-length")
        if lengths and (not lengths[0].isdigit() or int(lengths[0][:20]) > self._config.max_body_bytes):
            return self._too_large()
        return None

    def _too_large(self) -> RequestFailure:
        return RequestFailure(413, f"the body exceeds {self._config.max_body_bytes} bytes", None, "body_too_large")

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            return
        failure = self._too_large() if isinstance(body, bool) else await self._judge_json(scope, body)
        if failure is not None:
            await _refusal(failure)(scope, receive, send)
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Message:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | bool | None:
        """The whole body; False when it exceeds the limit, None when the client left."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if size > self._config.max_body_bytes:
                return False
            if not message.get("more_body", False):
                return b"".join(parts)

    async def _judge_json(self, scope: Scope, body: bytes) -> RequestFailure | None:
        limit = self._config.max_json_depth
        if not any(b"json" in value.lower() for value in _headers(scope, b"content-type")):
            return None
        if len(body) > _SCAN_BYTES:
            exceeds = await asyncio.to_thread(_json_depth_exceeds, body, limit)
        else:
            exceeds = _json_depth_exceeds(body, limit)
        if exceeds:
            return RequestFailure(400, f"the JSON is nested deeper than {limit} levels", None, "json_too_deep")
        return None


def _json_depth_exceeds(body: bytes, limit: int) -> bool:
    """Whether brackets outside strings nest deeper than ``limit``. Linear, and fast enough for the largest body."""
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    # Without escaped characters every quote opens or closes a string. Escaped backslashes go first: one of them
    # before a quote does not escape it.
    text = np.frombuffer(body.replace(b"\\\\", b"").replace(b'\\"', b""), np.uint8)
    quotes = depth = 0
    for start in range(0, len(text), _SCAN_BYTES):
        part = text[start : start + _SCAN_BYTES]
        quoted = np.cumsum(part == ord('"'), dtype=np.int32) + quotes
        folded = part | 0x20  # [ and ] become { and }
        step = (folded == ord("{")).astype(np.int8) - (folded == ord("}"))
        levels = np.cumsum(np.where(quoted & 1, 0, step), dtype=np.int32) + depth
        if levels.max() > limit:
            return True
        quotes, depth = int(quoted[-1]), int(levels[-1])
    return False
