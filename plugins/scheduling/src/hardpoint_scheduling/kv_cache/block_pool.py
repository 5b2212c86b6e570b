"""All KV blocks of one engine: who is referenced, what is free, which block holds which prefix."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import numpy as np
import numpy.typing as npt

from hardpoint.errors import ConfigError
from hardpoint.interfaces import NULL_BLOCK_ID, BlockHash, BlockHashWithGroup
from hardpoint_scheduling.kv_cache.events import KVEventLog
from hardpoint_scheduling.kv_cache.free_queue import FreeQueue
from hardpoint_scheduling.kv_cache.prefix_index import PrefixIndex

IntArray = npt.NDArray[np.int64]


class BlockPool:
    """Reference-counted blocks shared by all KV groups; a block belongs to one group at a time.

    A block is in the free queue exactly while nobody refers to it. A free block that still carries a hash can be
    adopted again by :meth:`touch`; handing it out for new content by :meth:`allocate` evicts the hash. Freed blocks
    without a hash are reused first (warm in cache), those with one last (least recently used goes first).

    ``num_evictions`` counts cached blocks that were handed out for new content. ``log`` is told of every change of the
    index if it is set, which it is before the first block is used.
    """

    def __init__(self, num_blocks: int) -> None:
        """``num_blocks`` includes the null block. Raises ``ConfigError`` when not even that fits."""
        if num_blocks < 1:
            raise ConfigError(
                f"a KV block pool of {num_blocks} blocks has no room for the null block; raise --num-kv-blocks"
            )
        self.num_blocks = num_blocks
        self._queue = FreeQueue(num_blocks)
        self._references = [0] * num_blocks
        self._keys: list[BlockHashWithGroup | None] = [None] * num_blocks
        self._index = PrefixIndex()
        self.num_evictions = 0
        self.log: KVEventLog | None = None
        # R3.11: the first block is the null block; it leaves the queue here and never comes back.
        self._queue.remove(NULL_BLOCK_ID)

    @property
    def num_free(self) -> int:
        return self._queue.count

    @property
    def num_usable(self) -> int:
        """Blocks that can hold KV: all but the null block."""
        return self.num_blocks - 1

    @property
    def num_cached(self) -> int:
        """Distinct keys in the prefix index."""
        return len(self._index)

    def references(self, block: int) -> int:
        return self._references[block]

    def key_of(self, block: int) -> BlockHashWithGroup | None:
        return self._keys[block]

    def free_order(self) -> list[int]:
        """Free blocks, the next to be handed out first."""
        return list(self._queue)

    def allocate(self, count: int) -> list[int]:
        """``count`` blocks for new content, each referenced once (R3.16). Raises ``OutOfBlocksError`` when short."""
        blocks = self._queue.pop_many(count)
        references, keys = self._references, self._keys
        for block in blocks:
            references[block] = 1
        cached = [block for block in blocks if keys[block] is not None]
        for block in cached:
            self.forget(block)
        self.num_evictions += len(cached)
        return blocks

    def touch(self, blocks: Iterable[int]) -> None:
        """Refer to cached blocks once more; they can no longer be evicted (R3.19)."""
        references = self._references
        idle: list[int] = []
        for block in blocks:
            if block == NULL_BLOCK_ID:
                continue
            count = references[block]
            if count == 0:
                idle.append(block)
            references[block] = count + 1
        if idle:
            self._queue.remove_many(idle)

    def free(self, blocks: Iterable[int]) -> None:
        """Drop one reference to each block, in the given order (R3.17).

        Raises ``ValueError`` for a block nobody refers to; those before it are freed.
        """
        references, keys = self._references, self._keys
        # The two ends of the queue do not meet, so each gets its blocks in one go.
        plain: list[int] = []
        hashed: list[int] = []
        try:
            for block in blocks:
                if block == NULL_BLOCK_ID:
                    continue
                count = references[block] - 1
                if count < 0:
                    raise ValueError(f"block {block} is freed although nobody refers to it")
                references[block] = count
                if count == 0:
                    (plain if keys[block] is None else hashed).append(block)
        finally:
            self._queue.prepend_many(plain)
            self._queue.append_many(hashed)

    def count_idle(self, blocks: Iterable[int]) -> int:
        """How many of ``blocks`` wait in the free queue: adopting them consumes free blocks (R3.76)."""
        references = self._references
        return sum(1 for block in blocks if references[block] == 0 and block != NULL_BLOCK_ID)

    def remember(self, block: int, key: BlockHashWithGroup) -> None:
        """Enter a full block into the prefix index, replacing the key it carried before (R3.20)."""
        before = self._keys[block]
        if before == key or block == NULL_BLOCK_ID:
            return
        if before is not None:
            self.forget(block)
        if self.log is not None and self._index.find(key) is None:
            self.log.stored(key)
        self._keys[block] = key
        self._index.insert(key, block)

    def remember_many(self, blocks: Iterable[int], keys: Iterable[BlockHashWithGroup]) -> None:
        """:meth:`remember` for pairs of equal position; the shorter of the two ends it."""
        if self.log is not None:
            for block, key in zip(blocks, keys, strict=False):
                self.remember(block, key)
            return
        carried, insert = self._keys, self._index.insert
        for block, key in zip(blocks, keys, strict=False):
            before = carried[block]
            if before == key or block == NULL_BLOCK_ID:
                continue
            if before is not None:
                self.forget(block)
            carried[block] = key
            insert(key, block)

    def forget(self, block: int) -> None:
        """Take a block out of the prefix index, so that no later request adopts it."""
        key = self._keys[block]
        if key is not None:
            self._keys[block] = None
            self._index.remove(key, block)
            if self.log is not None and self._index.find(key) is None:
                self.log.removed(key)

    def find(self, key: BlockHashWithGroup) -> int | None:
        return self._index.find(key)

    def find_chain(self, hashes: Iterable[BlockHash], group: int) -> list[int]:
        """Blocks that hold the longest prefix of ``hashes`` cached for ``group``; nothing is touched."""
        return self._index.find_chain(hashes, group)

    def reset(self) -> bool:
        """Forget every cached prefix; False, and nothing changed, while any block is in use (R3.22)."""
        if self._queue.count != self.num_usable:
            return False
        self._index.clear()
        self._keys = [None] * self.num_blocks
        if self.log is not None:
            self.log.cleared()
        return True

    def check_integrity(self, tables: Mapping[str, Sequence[Sequence[int]]] | None = None) -> None:
        """Raise ``RuntimeError`` naming the first violated invariant (I3.1-I3.3).

        ``tables``: per holder, the blocks of each group; given, every reference must be accounted for.
        """
        references = np.array(self._references)
        if references.min() < 0:
            raise RuntimeError("a block has a negative reference count")
        if self._keys[NULL_BLOCK_ID] is not None or references[NULL_BLOCK_ID]:
            raise RuntimeError("the null block is referenced or hashed")
        free = references == 0
        free[NULL_BLOCK_ID] = False
        self._queue.check(free)
        indexed = 0
        for key, block in self._index:
            indexed += 1
            if self._keys[block] != key:
                raise RuntimeError(f"the prefix index leads to block {block}, which carries another hash")
        if self.num_blocks - self._keys.count(None) != indexed:
            raise RuntimeError("a block carries a hash that the prefix index does not know")
        if tables is not None:
            self._check_tables(tables, references)

    def _check_tables(self, tables: Mapping[str, Sequence[Sequence[int]]], references: IntArray) -> None:
        held = np.zeros_like(references)
        for groups in tables.values():
            for blocks in groups:
                np.add.at(held, np.fromiter(blocks, dtype=np.int64), 1)
        held[NULL_BLOCK_ID] = 0
        wrong = np.flatnonzero(held != references)
        if len(wrong):
            block = int(wrong[0])
            raise RuntimeError(f"block {block} has {references[block]} references, but {held[block]} tables hold it")
