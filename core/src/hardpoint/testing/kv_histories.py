"""Random lives of requests over one manager of KV blocks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import OutOfBlocksError
from hardpoint.interfaces import NULL_BLOCK_ID, BlockHash, KVCacheManager

__all__ = ["History", "chain"]


def chain(name: str, count: int) -> list[BlockHash]:
    """Hashes of the first ``count`` blocks of a sequence; sequences whose names begin alike share as many blocks."""
    return [BlockHash(f"{position}:{name[: position + 1]}".encode()) for position in range(count)]


class History:
    """Requests that come, grow and end; ``content`` is what each block would hold on a device."""

    def __init__(self, manager: KVCacheManager, pool: Any, block_size: int, rng: np.random.Generator) -> None:
        self.manager, self.pool, self.block_size, self.rng = manager, pool, block_size, rng
        self.lengths: dict[str, int] = {}
        self.content: dict[int, BlockHash] = {}
        self.names = _names(rng)

    def step(self) -> None:
        chance = self.rng.random()
        if chance < 0.3 or not self.lengths:
            self.begin(next(self.names))
        elif chance < 0.8:
            self.grow(str(self.rng.choice(list(self.lengths))), int(self.rng.integers(1, 2 * self.block_size)))
        else:
            self.end(str(self.rng.choice(list(self.lengths))))
        self.pool.check({name: self.manager.block_ids(name) for name in self.lengths})

    def begin(self, name: str) -> None:
        hashes = chain(name, 6)
        hit = list(self.manager.find_hit(hashes, 6 * self.block_size)) if self.manager.caches_prefixes else []
        for position, block in enumerate(hit):
            assert block == NULL_BLOCK_ID or self.content.get(block) == hashes[position], (
                f"block {block} is offered as position {position} of {name!r}, but holds {self.content.get(block)!r}"
            )
        if hit:
            self.manager.adopt(name, hit)
        self.lengths[name] = len(hit) * self.block_size
        self.grow(name, int(self.rng.integers(1, 3 * self.block_size)))

    def grow(self, name: str, count: int) -> None:
        length = self.lengths[name] + count
        if self.lengths[name]:
            self.manager.release_unneeded(name, self.lengths[name])
        needed = self.manager.blocks_needed(name, length, 0)
        if needed > self.pool.num_free:
            with pytest.raises(OutOfBlocksError):
                self.manager.allocate(name, length)
            self.end(name)
            return
        for block in self.manager.allocate(name, length):
            self.content.pop(block, None)
        hashes, table = chain(name, length // self.block_size), self.manager.block_ids(name)
        for position in range(self.lengths[name] // self.block_size, len(hashes) if self.manager.grows else 0):
            self.content[table[position]] = hashes[position]
        self.lengths[name] = length
        self.manager.cache_full_blocks(name, hashes, length)

    def end(self, name: str) -> None:
        self.manager.free(name)
        del self.lengths[name]


def _names(rng: np.random.Generator) -> Iterator[str]:
    """Unique, of few letters, so that many begin alike."""
    number = 0
    while True:
        number += 1
        yield "".join(rng.choice(["x", "y"], size=4)) + f"-{number}"
