"""ASGI guards in front of every route: host and origin, key, header and body limits. They judge the raw path."""

from __future__ import annotations

import hashlib
import hmac
import json
import re
from collections.abc import Iterable
from typing import Any
from urllib.parse import urlsplit

from hardpoint.config import ServerConfig
from hardpoint.server.errors import Failure, default_body

__all__ = ["PROBES", "BodyGuard", "HostGuard", "KeyGuard", "RequestId"]

PROBES = ("/live", "/ready")
"""The only paths that need no key."""

_LOOPBACK = ("localhost", "127.0.0.1", "::1")
_MAX_CHUNKS = 65_536
_TOKENS = re.compile(rb'"(?:[^"\\]|\\.)*"|[\[\]{}]', re.DOTALL)
_REQUEST_ID = re.compile(rb"[\x21-\x7e]{1,128}")

Scope = Any
Receive = Any
Send = Any


async def _refuse(send: Send, failure: Failure) -> None:
    body = json.dumps(default_body(failure)).encode()
    headers = [(b"content-type", b"application/json"), (b"content-length", str(len(body)).encode())]
    headers += [(name.lower().encode(), value.encode()) for name, value in (failure.headers or {}).items()]
    if failure.status == 413:
        headers.append((b"connection", b"close"))
    await send({"type": "http.response.start", "status": failure.status, "headers": headers})
    await send({"type": "http.response.body", "body": body})


def _headers(scope: Scope, name: bytes) -> list[bytes]:
    return [value for key, value in scope["headers"] if key == name]


class _Guard:
    """Passes lifespan through and refuses web sockets, which no endpoint uses."""

    def __init__(self, app: Any) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self.app(scope, receive, send)
        elif scope["type"] == "http":
            failure = self.judge(scope)
            if failure is None:
                await self.admit(scope, receive, send)
            else:
                await _refuse(send, failure)
        else:
            await send({"type": "websocket.close", "code": 1008})

    def judge(self, scope: Scope) -> Failure | None:
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

        async def stamped(message: Any) -> None:
            if message["type"] == "http.response.start":
                message = {**message, "headers": [*message["headers"], (b"x-request-id", given[0])]}
            await send(message)

        await self.app(scope, receive, stamped)


class HostGuard(_Guard):
    """Refuses foreign ``Host`` and ``Origin`` values, so that no web page can reach a loopback server by rebinding.

    Bound beyond loopback with no ``allowed_hosts`` set, any host name is accepted (a key is then required anyway).
    """

    def __init__(self, app: Any, config: ServerConfig) -> None:
        super().__init__(app)
        self._any = config.host not in _LOOPBACK and not config.allowed_hosts
        self._hosts = {*_LOOPBACK, config.host, *config.allowed_hosts}

    def judge(self, scope: Scope) -> Failure | None:
        hosts = _headers(scope, b"host")
        if len(hosts) > 1 or (hosts and not self._allowed(f"//{_text(hosts[0])}")):
            return Failure(403, "this Host is not served here; see server.allowed_hosts", code="host_refused")
        for origin in _headers(scope, b"origin"):
            if not self._allowed(_text(origin)):
                return Failure(403, "requests from this Origin are not allowed", code="origin_refused")
        return None

    def _allowed(self, location: str) -> bool:
        try:
            host = urlsplit(location).hostname
        except ValueError:
            return False
        return host is not None and (self._any or host in self._hosts)


class KeyGuard(_Guard):
    """Every path needs a key but the probes. Keys are compared as digests in constant time."""

    def __init__(self, app: Any, keys: Iterable[str]) -> None:
        super().__init__(app)
        self._digests = [hashlib.sha256(key.encode()).digest() for key in keys]

    def judge(self, scope: Scope) -> Failure | None:
        if not self._digests or scope["path"] in PROBES:
            return None
        given = self._given(scope)
        if given is not None:
            digest = hashlib.sha256(given).digest()
            # Every key is compared, so that the time tells nothing about which one came close.
            matches = [hmac.compare_digest(digest, known) for known in self._digests]
            if any(matches):
                return None
        challenge = {"WWW-Authenticate": "Bearer"}
        return Failure(401, "a valid API key is required", code="invalid_api_key", headers=challenge)

    def _given(self, scope: Scope) -> bytes | None:
        for value in _headers(scope, b"authorization"):
            scheme, _, key = value.partition(b" ")
            if scheme.lower() == b"bearer":
                return key.strip()
        keys = _headers(scope, b"x-api-key")
        return keys[0].strip() if keys else None


class BodyGuard(_Guard):
    """Bounds headers, body size, chunk count and JSON depth before anything is parsed."""

    def __init__(self, app: Any, config: ServerConfig) -> None:
        super().__init__(app)
        self._config = config

    def judge(self, scope: Scope) -> Failure | None:
        size = sum(len(key) + len(value) for key, value in scope["headers"])
        if size > self._config.max_header_bytes:
            return Failure(431, f"the headers exceed {self._config.max_header_bytes} bytes", code="headers_too_large")
        if any(value.lower() != b"identity" for value in _headers(scope, b"content-encoding")):
            return Failure(415, "compressed request bodies are not accepted", code="unsupported_encoding")
        lengths = _headers(scope, b"content-length")
        if lengths and (not lengths[0].isdigit() or int(lengths[0][:20]) > self._config.max_body_bytes):
            return self._too_large()
        return None

    def _too_large(self) -> Failure:
        return Failure(413, f"the body exceeds {self._config.max_body_bytes} bytes", code="body_too_large")

    async def admit(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["method"] in ("GET", "HEAD", "OPTIONS"):
            await self.app(scope, receive, send)
            return
        body = await self._read(receive)
        if body is None:
            return
        failure = self._too_large() if isinstance(body, bool) else self._judge_json(scope, body)
        if failure is not None:
            await _refuse(send, failure)
            return
        pending = [{"type": "http.request", "body": body, "more_body": False}]

        async def replay() -> Any:
            return pending.pop() if pending else await receive()

        await self.app(scope, replay, send)

    async def _read(self, receive: Receive) -> bytes | bool | None:
        """The whole body; False when it exceeds a limit, None when the client left."""
        parts: list[bytes] = []
        size = 0
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return None
            part = message.get("body", b"")
            size += len(part)
            parts.append(part)
            if size > self._config.max_body_bytes or len(parts) > _MAX_CHUNKS:
                return False
            if not message.get("more_body", False):
                return b"".join(parts)

    def _judge_json(self, scope: Scope, body: bytes) -> Failure | None:
        limit = self._config.max_json_depth
        if not any(b"json" in value.lower() for value in _headers(scope, b"content-type")):
            return None
        if _json_depth_exceeds(body, limit):
            return Failure(400, f"the JSON is nested deeper than {limit} levels", code="json_too_deep")
        return None


def _json_depth_exceeds(body: bytes, limit: int) -> bool:
    if body.count(b"[") + body.count(b"{") <= limit:
        return False
    depth = 0
    for match in _TOKENS.finditer(body):
        token = match[0]
        if token in (b"[", b"{"):
            depth += 1
            if depth > limit:
                return True
        elif token in (b"]", b"}"):
            depth -= 1
    return False


def _text(value: bytes) -> str:
    return value.decode("latin-1")
