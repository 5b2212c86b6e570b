"""The mirror of KV cache events follows what a router can follow, and names what it cannot."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hardpoint.interfaces import AllBlocksCleared, BlockHash, BlocksRemoved, BlocksStored, KVEvent
from hardpoint.testing.kv_event_rules import KVEventMirror

A, B, C = (BlockHash(name) for name in (b"a", b"b", b"c"))


def stored(*hashes: BlockHash, parent: BlockHash | None = None, tokens: Sequence[int] = (), group: int = 0) -> KVEvent:
    ids = np.asarray(tokens, dtype=np.int32)
    return BlocksStored(block_hashes=list(hashes), parent_hash=parent, token_ids=ids, block_size=2, group=group)


def removed(*hashes: BlockHash, group: int = 0) -> KVEvent:
    return BlocksRemoved(block_hashes=list(hashes), group=group)


def test_it_knows_what_is_cached_and_what_each_hash_stands_for() -> None:
    mirror = KVEventMirror()
    mirror.apply([stored(A, B, tokens=[1, 2, 3, 4]), stored(C, parent=B, tokens=[5]), stored(A, group=1)])
    assert mirror.cached == {(0, "device", A), (0, "device", B), (0, "device", C), (1, "device", A)}
    assert mirror.prefixes[0, "device", C] == (1, 2, 3, 4, 5)
    assert mirror.prefixes[1, "device", A] is None
    mirror.apply([removed(B, A), removed(A, group=1)])
    assert mirror.cached == {(0, "device", C)}
    mirror.apply([AllBlocksCleared(), stored(A, tokens=[1, 2])])
    assert mirror.cached == {(0, "device", A)}


@pytest.mark.parametrize(
    ("events", "rule"),
    [
        ([removed(A)], "removed that nobody had stored"),
        ([stored(A), removed(A, group=1)], "removed that nobody had stored"),
        ([stored(A), AllBlocksCleared(), removed(A)], "removed that nobody had stored"),
        ([stored(A), stored(A)], "stored twice"),
        ([stored(A, A)], "stored twice"),
        ([stored()], "stores nothing"),
        ([stored(A, B, tokens=[1, 2])], "do not fill the blocks"),
        ([stored(A, tokens=[1, 2, 3])], "do not fill the blocks"),
        ([stored(A, tokens=[1, 2]), removed(A), stored(A, tokens=[1, 3])], "two prefixes"),
        ([stored(A, B, tokens=[1, 2, 3, 4]), removed(B), stored(B, tokens=[3, 4])], "two prefixes"),
    ],
)
def test_what_nobody_could_follow_is_named(events: list[KVEvent], rule: str) -> None:
    with pytest.raises(AssertionError, match=rule):
        KVEventMirror().apply(events)
