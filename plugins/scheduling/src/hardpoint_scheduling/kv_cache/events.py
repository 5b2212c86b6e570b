"""Collects what happens to cached blocks, for routers (:mod:`hardpoint.interfaces.kv_events`). Exists only when asked.

The pool knows keys and blocks, a router wants tokens: so whoever enters blocks of a request says first whose they are.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import numpy as np

from hardpoint.interfaces import (
    AllBlocksCleared,
    BlockHash,
    BlockHashWithGroup,
    BlocksRemoved,
    BlocksStored,
    EngineRequest,
    KVEvent,
)
from hardpoint_scheduling.kv_cache.extra_keys import has_content_keys

_NO_TOKENS = np.zeros(0, dtype=np.int32)


class Sequenced(Protocol):
    """What the log wants to know of a live request."""

    @property
    def record(self) -> EngineRequest: ...
    @property
    def tokens(self) -> Sequence[int]:
        """Prompt and outputs."""


class _Run:
    """Blocks of one request and group that follow each other, not told yet. ``start`` and ``end`` are in tokens."""

    __slots__ = ("end", "group", "hashes", "owner", "parent", "start")

    def __init__(self, owner: Sequenced | None, group: int, parent: BlockHash | None, start: int) -> None:
        self.owner = owner
        self.group = group
        self.parent = parent
        self.start = self.end = start
        self.hashes: list[BlockHash] = []


class KVEventLog:
    """Set as the pool's ``log``; :meth:`take` empties it, once per step.

    ``owner_of`` finds a live request by its id. ``hash_size`` and ``block_sizes`` (per group) are in tokens.
    """

    def __init__(self, owner_of: Callable[[str], Sequenced | None], hash_size: int, block_sizes: Sequence[int]) -> None:
        self._owner_of = owner_of
        self._hash_size = hash_size
        self._block_sizes = tuple(block_sizes)
        self._events: list[KVEvent] = []
        self._run: _Run | None = None
        self._removed: BlocksRemoved | None = None
        self._owner: Sequenced | None = None
        # Some groups enter their blocks a step late, when the request may have ended: who was announced in this step
        # and the one before is remembered.
        self._announced: dict[str, Sequenced] = {}
        self._announced_before: dict[str, Sequenced] = {}
        self._hashes: Sequence[BlockHash] = ()
        self._position = -1

    def entering(self, request_id: str, hashes: Sequence[BlockHash]) -> None:
        """Blocks stored from now on belong to this request; ``hashes`` are its own, one per hash block."""
        owner = self._owner_of(request_id)
        if owner is not None:
            self._announced[request_id] = owner
        self._owner = owner or self._announced.get(request_id) or self._announced_before.get(request_id)
        self._hashes = hashes
        self._position = -1

    def stored(self, key: BlockHashWithGroup) -> None:
        """The first block with ``key`` entered the index."""
        block_hash, group = BlockHash(key[:-4]), int.from_bytes(key[-4:], "big")
        position = self._find(block_hash, self._block_sizes[group] // self._hash_size)
        if position is None:
            self._close()
            self._removed = None
            self._events.append(self._unknown(block_hash, group))
            return
        scale = self._block_sizes[group] // self._hash_size
        first = position // scale * scale
        start, parent = first * self._hash_size, self._hashes[first - 1] if first else None
        run = self._run
        if run is None or run.owner is not self._owner or run.group != group or run.end != start:
            self._close()
            run = self._run = _Run(self._owner, group, parent, start)
        run.hashes.append(block_hash)
        run.end = (position + 1) * self._hash_size

    def removed(self, key: BlockHashWithGroup) -> None:
        """The last block with ``key`` left the index."""
        block_hash, group = BlockHash(key[:-4]), int.from_bytes(key[-4:], "big")
        if self._run is None and self._removed is not None and self._removed.group == group:
            self._removed.block_hashes.append(block_hash)
            return
        self._close()
        self._removed = BlocksRemoved(block_hashes=[block_hash], group=group)
        self._events.append(self._removed)

    def cleared(self) -> None:
        """The whole index was dropped: nothing before that matters any more."""
        self._run = self._removed = None
        self._events = [AllBlocksCleared()]

    def take(self) -> list[KVEvent]:
        """Everything since the last call, in order."""
        self._close()
        self._removed = None
        self._announced, self._announced_before = {}, self._announced
        events, self._events = self._events, []
        return events

    def _find(self, block_hash: BlockHash, scale: int) -> int | None:
        """Its place among the request's hashes: mostly right behind the last one, else somewhere near the end."""
        hashes = self._hashes
        following = self._position + scale
        if self._position >= 0 and following < len(hashes) and hashes[following] == block_hash:
            self._position = following
            return following
        for position in range(len(hashes) - 1, -1, -1):
            if hashes[position] == block_hash:
                self._position = position
                return position
        return None

    def _unknown(self, block_hash: BlockHash, group: int) -> BlocksStored:
        """Of a block that nobody announced."""
        size = self._block_sizes[group]
        return BlocksStored(
            block_hashes=[block_hash], parent_hash=None, token_ids=_NO_TOKENS, block_size=size, group=group
        )

    def _close(self) -> None:
        """Turn the open run into an event."""
        run, self._run = self._run, None
        if run is None:
            return
        self._removed = None
        owner = run.owner
        record = owner.record if owner is not None else None
        tokens = _NO_TOKENS if owner is None else np.array(owner.tokens[run.start : run.end], dtype=np.int32)
        self._events.append(
            BlocksStored(
                block_hashes=run.hashes,
                parent_hash=run.parent,
                token_ids=tokens,
                block_size=self._block_sizes[run.group],
                group=run.group,
                adapter=record.adapter.name if record is not None and record.adapter is not None else None,
                has_extra_keys=record is not None and has_content_keys(record),
            )
        )
