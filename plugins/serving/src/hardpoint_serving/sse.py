"""Server-sent events: frames as they come, a comment when nothing came for a while, and an orderly end."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from hardpoint.errors import HardpointError
from hardpoint.interfaces.endpoint import RequestFailure, describe_failure

__all__ = ["DONE", "EventStream", "event"]

DONE = b"data: [DONE]\n\n"
_KEEPALIVE = b": keep-alive\n\n"
_logger = logging.getLogger("hardpoint.serving")
_encode = msgspec.json.Encoder().encode


def event(record: Any) -> bytes:
    """One frame. JSON has no raw line breaks, so one ``data`` line always suffices."""
    return b"data: " + _encode(record) + b"\n\n"


class EventStream(Response):
    """Sends ``frames`` until they end or the client leaves; ``close`` then releases what produces them.

    ``gone`` ends when the client disconnects. An error after the start becomes an event made by ``error_body``, then
    ``[DONE]``: SDKs raise on the first, simpler readers stop at the second.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        frames: AsyncIterator[bytes],
        *,
        gone: asyncio.Task[None],
        close: Callable[[], Awaitable[None]],
        error_body: Callable[[RequestFailure], Mapping[str, object]],
        keepalive_s: float,
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"cache-control": "no-cache", "x-accel-buffering": "no"})
        self._frames = frames
        self._gone = gone
        self._close = close
        self._error_body = error_body
        self._keepalive_s = keepalive_s
        self._last_sent = 0.0

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        del scope, receive
        tasks = [self._gone]
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            writer = asyncio.create_task(self._write(send), name="event-writer")
            tasks += [writer, asyncio.create_task(self._beat(send), name="event-keepalive")]
            await asyncio.wait({writer, self._gone}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)
            await self._close()

    async def _write(self, send: Any) -> None:
        clock = asyncio.get_running_loop().time
        try:
            async for frame in self._frames:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": frame, "more_body": True})
        except Exception as error:
            if not isinstance(error, HardpointError):
                _logger.error("a stream failed", exc_info=error)
            body = event(self._error_body(describe_failure(error)))
            await send({"type": "http.response.body", "body": body, "more_body": True})
        await send({"type": "http.response.body", "body": DONE, "more_body": False})

    async def _beat(self, send: Any) -> None:
        clock = asyncio.get_running_loop().time
        self._last_sent = clock()
        while True:
            idle = clock() - self._last_sent
            if idle >= self._keepalive_s:
                self._last_sent = clock()
                await send({"type": "http.response.body", "body": _KEEPALIVE, "more_body": True})
                idle = 0.0
            await asyncio.sleep(self._keepalive_s - idle)
