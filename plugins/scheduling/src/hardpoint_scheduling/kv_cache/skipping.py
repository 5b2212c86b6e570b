"""Tables whose leading blocks are given up while a request lives: what windows, chunks and states have in common."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    BlockHashWithGroup,
    KVBlockPool,
    KVCacheManager,
    KVCacheSpec,
    group_key,
)
from hardpoint_scheduling.kv_cache.tables import grow_tables
from hardpoint_scheduling.views import ReadOnlyView


@dataclass(slots=True)
class Table:
    """Blocks of one request: the first ``num_dropped`` are the null block, the first ``num_entered`` were offered to
    the prefix index, the last ``num_drafts`` are kept for what drafts leave behind."""

    blocks: list[int] = field(default_factory=list)
    num_entered: int = 0
    num_dropped: int = 0
    num_drafts: int = 0


class SkippingManager(KVCacheManager):
    """A block per ``block_size`` tokens, of which ``num_skipped_blocks`` leading ones need not be held (R3.12)."""

    def __init__(self, pool: KVBlockPool, group_id: int, spec: KVCacheSpec) -> None:
        self._pool = pool
        self._group_id = group_id
        self._key_suffix = group_key(BlockHash(b""), group_id)
        self._block_size = spec.block_size
        self._tables: dict[str, Table] = {}

    @abstractmethod
    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        """Leading blocks that no token behind the first ``num_computed_tokens`` reads."""

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        return max(self._num_positions(num_tokens) - self._num_held(request_id, num_hit_blocks), 0)

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        if request_id in self._tables:
            raise ValueError(f"request {request_id} already holds blocks of group {self._group_id}")
        self._pool.touch(block_ids)
        self._tables[request_id] = Table(list(block_ids), num_entered=len(block_ids))

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        grow = self.blocks_needed(request_id, num_tokens, 0)
        if not grow:
            return ()
        blocks = self._pool.allocate(grow)
        self._tables.setdefault(request_id, Table()).blocks.extend(blocks)
        return blocks

    def allocate_many(self, request_ids: Sequence[str], ends: Sequence[int], num_free: int) -> list[Sequence[int]]:
        """One call to the pool, if it has enough for all."""
        try:
            tables = [self._tables[request_id].blocks for request_id in request_ids]
        except KeyError:
            return super().allocate_many(request_ids, ends, num_free)
        grown = grow_tables(self._pool, tables, map(self._num_positions, ends), num_free)
        return super().allocate_many(request_ids, ends, num_free) if grown is None else grown

    def release_unneeded(self, request_id: str, num_processed_tokens: int) -> None:
        self.release_unneeded_many((request_id,), (num_processed_tokens,))

    def release_unneeded_many(self, request_ids: Sequence[str], num_processed_tokens: Sequence[int]) -> None:
        """What all rows give up goes to the pool in one call."""
        dropped: list[int] = []
        for request_id, processed in zip(request_ids, num_processed_tokens, strict=True):
            table = self._tables.get(request_id)
            if table is not None:
                self._drop(request_id, table, processed, dropped)
        if dropped:
            self._pool.free(dropped)

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        table = self._tables.get(request_id)
        if table is None:
            return
        full = num_tokens // self._block_size
        if full <= table.num_entered:
            return
        full = min(full, len(table.blocks), len(block_hashes))
        for position in range(max(table.num_entered, table.num_dropped), full):
            self._enter(table.blocks[position], block_hashes[position])
        table.num_entered = max(table.num_entered, full)

    def free(self, request_id: str) -> None:
        table = self._tables.pop(request_id, None)
        if table is not None:
            self._pool.free(reversed(table.blocks[table.num_dropped :]))

    def block_ids(self, request_id: str) -> Sequence[int]:
        table = self._tables.get(request_id)
        return ReadOnlyView(() if table is None else table.blocks)

    def _drop(self, request_id: str, table: Table, num_processed_tokens: int, dropped: list[int]) -> None:
        """Replace the skipped blocks of a table by the null block and add them to ``dropped``, the last one first."""
        blocks, first = table.blocks, table.num_dropped
        end = min(self.num_skipped_blocks(num_processed_tokens), len(blocks))
        if end <= first:
            return
        dropped.extend(reversed(blocks[first:end]))
        blocks[first:end] = [NULL_BLOCK_ID] * (end - first)
        table.num_dropped = end

    def _num_positions(self, num_tokens: int) -> int:
        """Length of a table that covers ``num_tokens``."""
        return -(-num_tokens // self._block_size)

    def _num_held(self, request_id: str, num_hit_blocks: int) -> int:
        table = self._tables.get(request_id)
        return num_hit_blocks if table is None else len(table.blocks)

    def _enter(self, block: int, block_hash: BlockHash) -> None:
        self._pool.remember(block, BlockHashWithGroup(block_hash + self._key_suffix))

    def _find(self, block_hash: BlockHash) -> int | None:
        return self._pool.find(BlockHashWithGroup(block_hash + self._key_suffix))

    def _num_whole(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> int:
        """Blocks that a hit of at most ``max_tokens`` can have."""
        return min(max(max_tokens, 0) // self._block_size, len(block_hashes))

    def _found_backwards(self, block_hashes: Sequence[BlockHash], whole: int) -> Iterator[tuple[int, int | None]]:
        """Position and cached block, from block ``whole - 1`` down to the first."""
        for position in range(whole - 1, -1, -1):
            yield position, self._find(block_hashes[position])
