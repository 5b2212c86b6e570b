"""What KV cache events must add up to, whoever tells them: a mirror that refuses what a router could not follow."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from hardpoint.interfaces.kv_events import AllBlocksCleared, BlocksRemoved, BlocksStored, KVEvent
from hardpoint.testing.scheduler_loop import SchedulerLoop, make_request

__all__ = ["KVEventMirror", "check_events"]

Key = tuple[int, str, bytes]


class KVEventMirror:
    """Applies events in order. ``cached`` are the prefixes that can be found, as (group, medium, hash).

    ``prefixes`` has the tokens that each hash ever stood for, the whole sequence to its block's end; None where an
    event did not say. A violated rule is an ``AssertionError`` that names it.
    """

    def __init__(self) -> None:
        self.cached: set[Key] = set()
        self.prefixes: dict[Key, tuple[int, ...] | None] = {}

    def apply(self, events: Iterable[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.cached.clear()
            elif isinstance(event, BlocksRemoved):
                keys = {(event.group, event.medium, block_hash) for block_hash in event.block_hashes}
                assert keys <= self.cached, "a prefix is removed that nobody had stored"
                self.cached -= keys
            else:
                self._store(event)

    def _store(self, event: BlocksStored) -> None:
        size, tokens = event.block_size, event.token_ids.tolist()
        assert event.block_hashes, "an event stores nothing"
        if tokens:
            fewest = (len(event.block_hashes) - 1) * size
            assert fewest < len(tokens) <= fewest + size, "the tokens do not fill the blocks, the last in part at most"
        parent: tuple[int, ...] | None = ()
        if event.parent_hash is not None:
            parent = self.prefixes.get((event.group, event.medium, event.parent_hash))
        for i, block_hash in enumerate(event.block_hashes):
            key = (event.group, event.medium, block_hash)
            assert key not in self.cached, "a prefix is stored twice"
            self.cached.add(key)
            parent = (*parent, *tokens[i * size : (i + 1) * size]) if tokens and parent is not None else None
            known = self.prefixes.setdefault(key, parent)
            assert None in (known, parent) or known == parent, "one hash stands for two prefixes"


def check_events(loop: SchedulerLoop, rng: np.random.Generator) -> None:
    """Of a scheduler with ``kv_events`` and few blocks: requests that share prefixes, evictions, and a reset."""
    mirror = KVEventMirror()
    for i in range(14):
        start = int(rng.integers(3, 6))
        loop.add(make_request(f"r{i}", range(start, start + int(rng.integers(1, 30))), int(rng.integers(1, 12))))
        loop.advance()
        if rng.random() < 0.5:
            mirror.apply(loop.scheduler.take_events())
    loop.run()
    mirror.apply(loop.scheduler.take_events())
    assert mirror.cached, "requests were computed, and no prefix is cached"
    assert None not in mirror.prefixes.values(), "an event leaves the tokens out"
    assert not loop.scheduler.take_events(), "an event is told twice"
    assert loop.scheduler.reset_prefix_cache()
    mirror.apply(loop.scheduler.take_events())
    assert not mirror.cached, "the prefixes are forgotten, and nobody is told"
