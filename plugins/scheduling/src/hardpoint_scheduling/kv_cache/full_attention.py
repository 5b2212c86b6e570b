"""Manager of layers that keep the KV of every token."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from typing import Any, ClassVar

from hardpoint.interfaces import (
    BlockHash,
    BlockHashWithGroup,
    FullAttentionSpec,
    KVBlockPool,
    KVCacheManager,
    KVSpecRegistration,
    NoOptions,
    PluginContext,
    group_key,
    plugin,
)
from hardpoint_scheduling.kv_cache.tables import grow_tables
from hardpoint_scheduling.views import ReadOnlyView


class FullAttentionManager(KVCacheManager):
    """One table per request, one block per ``block_size`` tokens, nothing released before the end."""

    keeps_all: ClassVar[bool] = True

    def __init__(self, pool: KVBlockPool, group_id: int, spec: FullAttentionSpec) -> None:
        self._pool = pool
        self._group_id = group_id
        self._key_suffix = group_key(BlockHash(b""), group_id)
        # Dealt out among ranks, a position holds a block's tokens on each of them.
        self._block_size = spec.block_size * spec.context_shards
        self._tables: dict[str, list[int]] = {}
        # Leading blocks of each table that were offered to the prefix index.
        self._num_entered: dict[str, int] = {}

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        table = self._tables.get(request_id)
        held = num_hit_blocks if table is None else len(table)
        return max(-(-num_tokens // self._block_size) - held, 0)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return self._pool.find_chain(islice(block_hashes, max(max_tokens, 0) // self._block_size), self._group_id)

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds blocks of group {self._group_id}")
        self._pool.touch(block_ids)
        self._tables[request_id] = list(block_ids)
        self._num_entered[request_id] = len(block_ids)

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        table = self._tables.get(request_id)
        grow = -(-num_tokens // self._block_size) - (0 if table is None else len(table))
        if grow <= 0:
            return ()
        blocks = self._pool.allocate(grow)
        if table is None:
            self._tables[request_id] = list(blocks)
            self._num_entered[request_id] = 0
        else:
            table.extend(blocks)
        return blocks

    def allocate_many(self, request_ids: Sequence[str], ends: Sequence[int], num_free: int) -> list[Sequence[int]]:
        """One call to the pool, if it has enough for all."""
        size = self._block_size
        try:
            tables = [self._tables[request_id] for request_id in request_ids]
        except KeyError:
            return super().allocate_many(request_ids, ends, num_free)
        grown = grow_tables(self._pool, tables, [-(-end // size) for end in ends], num_free)
        return super().allocate_many(request_ids, ends, num_free) if grown is None else grown

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        first = self._num_entered.get(request_id)
        full = num_tokens // self._block_size
        if first is None or full <= first:
            return
        table, remember = self._tables[request_id], self._pool.remember
        full = min(full, len(table), len(block_hashes))
        # Not called a key of a group in so many words: this runs for every block of every request.
        suffix: Any = self._key_suffix
        for position in range(first, full):
            remember(table[position], block_hashes[position] + suffix)
        self._num_entered[request_id] = max(first, full)

    def cache_full_blocks_many(
        self, request_ids: Sequence[str], block_hashes: Sequence[Sequence[BlockHash]], ends: Sequence[int]
    ) -> None:
        """Rows at a block boundary come together and bring one block each, as a rule."""
        entered, tables, size = self._num_entered, self._tables, self._block_size
        suffix: Any = self._key_suffix
        blocks: list[int] = []
        keys: list[BlockHashWithGroup] = []
        for request_id, hashes, end in zip(request_ids, block_hashes, ends, strict=True):
            first = entered.get(request_id)
            full = end // size
            if first is None or full <= first:
                continue
            table = tables[request_id]
            if full == first + 1 and full <= len(table) and full <= len(hashes):
                blocks.append(table[first])
                keys.append(hashes[first] + suffix)
                entered[request_id] = full
            else:
                self.cache_full_blocks(request_id, hashes, end)
        self._pool.remember_many(blocks, keys)

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            del self._num_entered[request_id]
            self._pool.free(reversed(table))

    def block_ids(self, request_id: str) -> Sequence[int]:
        return ReadOnlyView(self._tables.get(request_id, ()))


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``full_attention``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(FullAttentionSpec, FullAttentionManager)
