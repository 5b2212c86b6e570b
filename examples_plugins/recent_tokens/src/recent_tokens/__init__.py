"""A KV cache spec for layers that look back ``window`` tokens, with a manager that gives up what no token will read.

The table keeps its length: a block that was given up is replaced by the null block. Memory per request is bounded by
the window and one step, however long the sequence grows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import ClassVar

from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    AttentionSpec,
    BlockHash,
    KVBlockPool,
    KVCacheManager,
    KVSpecRegistration,
    NoOptions,
    PluginContext,
    group_key,
    plugin,
)


class RecentTokensSpec(AttentionSpec, frozen=True, kw_only=True):
    """Keys and values of the last ``window`` tokens, the current one included."""

    kind: ClassVar[str] = "recent_tokens"

    window: int = 64

    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        """The window and what steps under way compute; the window may begin in the middle of a block."""
        tokens = min(max_model_len, self.window - 1 + max_in_flight_tokens)
        return min(-(-tokens // self.block_size) + 1, -(-max_model_len // self.block_size))


@dataclass(slots=True)
class Life:
    """The first ``num_entered`` blocks were offered to the index, the first ``num_dropped`` given up."""

    table: list[int] = field(default_factory=list)
    num_entered: int = 0
    num_dropped: int = 0


class RecentTokensManager(KVCacheManager):
    def __init__(self, pool: KVBlockPool, group_id: int, spec: RecentTokensSpec) -> None:
        self._pool = pool
        self._group_id = group_id
        self._block_size = spec.block_size
        self._window = spec.window
        self._live: dict[str, Life] = {}

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        live = self._live.get(request_id)
        held = num_hit_blocks if live is None else len(live.table)
        return max(-(-num_tokens // self._block_size) - held, 0)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        """Whole prefixes only: where an early block is gone, so is the claim to those behind it."""
        whole = max(max_tokens, 0) // self._block_size
        return self._pool.find_chain(islice(block_hashes, whole), self._group_id)

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        if request_id in self._live:
            raise ValueError(f"request {request_id} already holds blocks of group {self._group_id}")
        self._pool.touch(block_ids)
        held = len(block_ids)
        self._live[request_id] = Life(list(block_ids), num_entered=held)

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        live = self._live.get(request_id) or Life()
        grow = -(-num_tokens // self._block_size) - len(live.table)
        new = self._pool.allocate(grow) if grow > 0 else ()
        self._live[request_id] = live
        live.table.extend(new)
        return new

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """The next token reads ``window - 1`` tokens before it."""
        return max(num_computed_tokens - self._window + 1, 0) // self._block_size

    def release_unneeded(self, request_id: str, num_processed_tokens: int) -> None:
        """The scheduler calls it before the table grows, with tokens that no step under way reads or takes back."""
        live = self._live.get(request_id)
        if live is None:
            return
        end = min(self.num_skipped_blocks(num_processed_tokens), len(live.table))
        old = live.table[live.num_dropped : end]
        live.table[live.num_dropped : end] = [NULL_BLOCK_ID] * len(old)
        live.num_dropped = max(live.num_dropped, end)
        self._pool.free(reversed(old))

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        live = self._live.get(request_id)
        if live is None:
            return
        full = min(num_tokens // self._block_size, len(live.table), len(block_hashes))
        for position in range(max(live.num_entered, live.num_dropped), full):
            self._pool.remember(live.table[position], group_key(block_hashes[position], self._group_id))
        live.num_entered = max(live.num_entered, full)

    def free(self, request_id: str) -> None:
        live = self._live.pop(request_id, None)
        if live is not None:
            self._pool.free(reversed(live.table[live.num_dropped :]))

    def block_ids(self, request_id: str) -> Sequence[int]:
        live = self._live.get(request_id)
        return () if live is None else tuple(live.table)


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    return KVSpecRegistration(RecentTokensSpec, RecentTokensManager)
