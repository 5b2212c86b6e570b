"""One request's generations as one stream, bound to the client's connection: when the client leaves, they end."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncGenerator, AsyncIterator, Coroutine, Sequence
from typing import Any, TypeVar

from fastapi import Request

from hardpoint.interfaces.engine import RequestOutput

__all__ = ["ClientGone", "OutputStream", "watch_client"]

T = TypeVar("T")
Numbered = tuple[int, RequestOutput]


class ClientGone(Exception):
    """The client closed the connection; nobody reads an answer."""


def watch_client(request: Request) -> asyncio.Task[None]:
    """A task that ends when the client disconnects. The body must have been read. Cancel it when done."""

    async def watch() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass

    return asyncio.create_task(watch(), name="watch-client")


async def _cancel(*tasks: asyncio.Task[Any]) -> None:
    """Cancel and wait, so that whatever the tasks held is released before this returns."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class OutputStream:
    """``(prompt index, output)`` of one or several generations, in order of arrival.

    Closing it aborts what still runs. It never starts a generation before :meth:`prime` or iteration.
    """

    def __init__(self, sources: Sequence[AsyncGenerator[RequestOutput, None]]) -> None:
        self._stream = _number(sources[0]) if len(sources) == 1 else _merge(sources)
        self._first: asyncio.Task[Numbered] | None = None

    async def prime(self, gone: asyncio.Task[None], patience_s: float) -> None:
        """Wait up to ``patience_s`` for the first output, so that a refused request is still a plain error.

        Raises what the generation raises, and ``ClientGone``.
        """
        self._first = asyncio.create_task(_next(self._stream))
        await asyncio.wait({self._first, gone}, timeout=patience_s, return_when=asyncio.FIRST_COMPLETED)
        if self._first.done():
            self._first.result()
        elif gone.done():
            raise ClientGone

    async def collect(self, gone: asyncio.Task[None]) -> list[Numbered]:
        """Every output. Raises what a generation raises, and ``ClientGone``."""

        async def everything() -> list[Numbered]:
            return [item async for item in self]

        return await until_gone(everything(), gone)

    async def __aiter__(self) -> AsyncIterator[Numbered]:
        if self._first is not None:
            yield await self._first
        async for item in self._stream:
            yield item

    async def close(self) -> None:
        if self._first is not None:
            await _cancel(self._first)
        await self._stream.aclose()


async def until_gone(work: Coroutine[Any, Any, T], gone: asyncio.Task[None]) -> T:
    """The result of ``work``, which is cancelled when ``gone`` ends first: then ``ClientGone`` is raised."""
    task = asyncio.create_task(work)
    try:
        await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
        if not task.done():
            raise ClientGone
        return task.result()
    finally:
        await _cancel(task)


async def _next(stream: AsyncIterator[T]) -> T:
    return await anext(stream)


async def _number(source: AsyncGenerator[RequestOutput, None]) -> AsyncGenerator[Numbered, None]:
    async with contextlib.aclosing(source):
        async for output in source:
            yield 0, output


async def _merge(sources: Sequence[AsyncGenerator[RequestOutput, None]]) -> AsyncGenerator[Numbered, None]:
    """The queue is short: a client that does not read holds its generations back instead of filling memory."""
    queue: asyncio.Queue[Numbered | Exception | None] = asyncio.Queue(maxsize=2 * len(sources))

    async def pump(index: int, source: AsyncGenerator[RequestOutput, None]) -> None:
        try:
            async with contextlib.aclosing(source):
                async for output in source:
                    await queue.put((index, output))
        except Exception as error:
            await queue.put(error)
        await queue.put(None)

    tasks = [asyncio.create_task(pump(index, source)) for index, source in enumerate(sources)]
    running = len(tasks)
    try:
        while running:
            item = await queue.get()
            if item is None:
                running -= 1
            elif isinstance(item, Exception):
                raise item
            else:
                yield item
    finally:
        await _cancel(*tasks)
