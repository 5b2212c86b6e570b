"""The newest KV cache events of one engine, ready to send, within a bounded number of bytes."""

from __future__ import annotations

import asyncio
import secrets
from collections import deque
from dataclasses import dataclass
from typing import Any

import msgspec

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import AllBlocksCleared, BlocksStored, KVEvent, KVEventBatch

__all__ = ["Cursor", "EventFeed", "Slice"]

_PORTION = 64
"""Batches handed out at a time: what a slow reader may keep alive beyond the feed's own bound."""
_encode = msgspec.json.Encoder().encode


@dataclass(frozen=True, slots=True)
class Cursor:
    """A place in a feed: everything up to ``sequence`` is known. ``instance`` None stands for any."""

    sequence: int
    instance: str | None = None

    @classmethod
    def parse(cls, text: str) -> Cursor:
        """From ``17`` or ``3f2a-17``, the form of the stream's ids. Raises ``InvalidRequestError``."""
        instance, dash, number = text.rpartition("-")
        if not (number.isascii() and number.isdigit() and len(number) < 20) or (dash and not instance):
            raise InvalidRequestError(
                f"after is {text[:40]!r}; give the id of the last event received, such as '17' or '3f2a-17'",
                param="after",
            )
        return cls(int(number), instance or None)


@dataclass(frozen=True, slots=True)
class Slice:
    """Frames to send next, and the cursor behind them. ``lost``: first and last sequence no longer to be had."""

    frames: tuple[bytes, ...]
    sequence: int
    lost: tuple[int, int] | None = None


class EventFeed:
    """One engine's batches, each encoded once for all readers.

    Readers keep a cursor and no queue: one that falls behind what ``max_bytes`` hold is told so, and costs nothing
    meanwhile.

    ``instance`` changes with every start, so that a cursor of an earlier one is recognized.
    """

    def __init__(self, max_bytes: int) -> None:
        self.instance = secrets.token_hex(4)
        self._max_bytes = max_bytes
        self._frames: deque[bytes] = deque()
        self._num_bytes = 0
        self._last = 0
        self._waiting: set[asyncio.Event] = set()

    @property
    def last(self) -> int:
        """Sequence of the newest batch, 0 before the first."""
        return self._last

    def add(self, batch: KVEventBatch) -> None:
        if batch.sequence != self._last + 1:
            # What should have come in between is lost; what is older must not seem to lead up to this.
            self._frames.clear()
            self._num_bytes = 0
        self._last = batch.sequence
        frame = b"id: %s-%d\ndata: " % (self.instance.encode(), batch.sequence) + _encode(_as_json(batch)) + b"\n\n"
        self._frames.append(frame)
        self._num_bytes += len(frame)
        while self._num_bytes > self._max_bytes and len(self._frames) > 1:
            self._num_bytes -= len(self._frames.popleft())
        for waiting in self._waiting:
            waiting.set()

    def is_foreign(self, cursor: Cursor) -> bool:
        """Whether ``cursor`` is no place in this feed: it belongs to an engine that is gone."""
        return cursor.instance not in (None, self.instance) or cursor.sequence > self._last

    def after(self, sequence: int) -> Slice:
        """What follows ``sequence``, a portion at a time; no frames when that is everything."""
        first = self._last - len(self._frames) + 1
        lost = (sequence + 1, first - 1) if sequence + 1 < first else None
        start = max(sequence + 1 - first, 0)
        frames = tuple(self._frames[i] for i in range(start, min(start + _PORTION, len(self._frames))))
        return Slice(frames, first + start + len(frames) - 1 if frames else max(sequence, first - 1), lost)

    async def wait(self, sequence: int, timeout_s: float) -> None:
        """Until there is something after ``sequence``, at most ``timeout_s``."""
        if self._last > sequence:
            return
        news = asyncio.Event()
        self._waiting.add(news)
        try:
            async with asyncio.timeout(timeout_s):
                await news.wait()
        except TimeoutError:
            return
        finally:
            self._waiting.discard(news)


def _as_json(batch: KVEventBatch) -> dict[str, Any]:
    return {
        "sequence": batch.sequence,
        "timestamp": batch.timestamp,
        "events": [_event_as_json(event) for event in batch.events],
    }


def _event_as_json(event: KVEvent) -> dict[str, Any]:
    """Hashes in hex; the fields are those of the records."""
    if isinstance(event, AllBlocksCleared):
        return {"type": "cleared"}
    shared = {"block_hashes": [h.hex() for h in event.block_hashes], "group": event.group, "medium": event.medium}
    if not isinstance(event, BlocksStored):
        return {"type": "removed", **shared}
    return {
        "type": "stored",
        **shared,
        "parent_hash": None if event.parent_hash is None else event.parent_hash.hex(),
        "token_ids": event.token_ids.tolist(),
        "block_size": event.block_size,
        "adapter": event.adapter,
        "has_extra_keys": event.has_extra_keys,
    }
