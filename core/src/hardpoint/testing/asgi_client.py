"""The smallest client of an ASGI application: one request at a time, no socket, and a client that can go away."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import Any

__all__ = ["Answer", "Call", "abandon", "send"]

Application = Callable[..., Awaitable[None]]


@dataclass(frozen=True, slots=True)
class Call:
    """One request. ``body`` is sent as JSON unless it is bytes already; None sends nothing."""

    method: str
    path: str
    body: Any = None

    @property
    def content(self) -> bytes:
        if self.body is None:
            return b""
        return self.body if isinstance(self.body, bytes) else json.dumps(self.body).encode()


@dataclass(frozen=True, slots=True)
class Answer:
    """``headers`` have lower-case names."""

    status: int
    headers: Mapping[str, str]
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)


def _scope(call: Call, key: str | None) -> dict[str, Any]:
    content = call.content
    headers = [(b"host", b"127.0.0.1"), (b"content-length", str(len(content)).encode())]
    if content:
        headers.append((b"content-type", b"application/json"))
    if key is not None:
        headers.append((b"authorization", f"Bearer {key}".encode()))
    path, _, query = call.path.partition("?")
    return {
        "type": "http",
        "asgi": {"version": "3.0"},
        "http_version": "1.1",
        "method": call.method,
        "scheme": "http",
        "path": path,
        "raw_path": path.encode(),
        "query_string": query.encode(),
        "root_path": "",
        "headers": headers,
        "client": ("127.0.0.1", 1),
        "server": ("127.0.0.1", 8000),
    }


async def send(app: Application, call: Call, key: str | None = None) -> Answer:
    """The whole answer. An exception that leaves the application is raised here, as a bug of the application."""
    messages: list[Any] = []
    delivered = False
    gone = asyncio.Event()

    async def receive() -> dict[str, Any]:
        nonlocal delivered
        if delivered:
            await gone.wait()
            return {"type": "http.disconnect"}
        delivered = True
        return {"type": "http.request", "body": call.content, "more_body": False}

    async def collect(message: Any) -> None:
        messages.append(message)
        if message["type"] == "http.response.body" and not message.get("more_body"):
            gone.set()

    await app(_scope(call, key), receive, collect)
    start = next(message for message in messages if message["type"] == "http.response.start")
    headers = {name.decode().lower(): value.decode("latin-1") for name, value in start["headers"]}
    body = b"".join(message.get("body", b"") for message in messages if message["type"] == "http.response.body")
    return Answer(start["status"], headers, body)


async def abandon(
    app: Application, call: Call, is_running: Callable[[], bool], key: str | None = None, timeout_s: float = 2.0
) -> bool:
    """Disconnect as soon as ``is_running()``. False if the answer came before that.

    Raises ``TimeoutError`` when work is still running ``timeout_s`` after the client left.
    """
    gone = asyncio.Event()
    delivered = False

    async def receive() -> dict[str, Any]:
        nonlocal delivered
        if delivered:
            await gone.wait()
            return {"type": "http.disconnect"}
        delivered = True
        return {"type": "http.request", "body": call.content, "more_body": False}

    async def swallow(message: Any) -> None:
        if gone.is_set():
            raise OSError("the client is gone")

    task = asyncio.ensure_future(app(_scope(call, key), receive, swallow))
    await _until(lambda: is_running() or task.done(), timeout_s)
    if not is_running():
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        return False
    gone.set()
    await _until(lambda: not is_running(), timeout_s)
    still_running = is_running()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    if still_running:
        raise TimeoutError(f"generation still runs {timeout_s} s after its client left")
    return True


async def _until(condition: Callable[[], bool], timeout_s: float) -> None:
    """Look every few milliseconds until it holds or the time is over."""
    for _ in range(int(timeout_s / 0.005)):
        if condition():
            return
        await asyncio.sleep(0.005)
