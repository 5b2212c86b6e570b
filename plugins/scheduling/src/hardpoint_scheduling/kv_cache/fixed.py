"""Tables that are complete from the first allocation on, whatever the sequence adds."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Sequence

from hardpoint.interfaces import BlockHash, KVBlockPool, KVCacheManager
from hardpoint_scheduling.views import ReadOnlyView


class FixedTableManager(KVCacheManager):
    """Blocks belong to one request from its admission to its end; no prefix is ever found."""

    grows = False
    caches_prefixes = False

    def __init__(self, pool: KVBlockPool) -> None:
        self._pool = pool
        self._tables: dict[str, list[int]] = {}

    @abstractmethod
    def num_blocks(self, request_id: str, num_tokens: int) -> int:
        """Length of the table of a request with ``num_tokens``, which is at least 1."""

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        del num_hit_blocks
        if request_id in self._tables or num_tokens <= 0:
            return 0
        return self.num_blocks(request_id, num_tokens)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return ()

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        """Raises ``ValueError``: there is nothing to adopt."""
        raise ValueError(
            f"request {request_id} cannot adopt blocks {list(block_ids)}: blocks of this kind are not shared"
        )

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        needed = self.blocks_needed(request_id, num_tokens, 0)
        if not needed:
            return ()
        self._tables[request_id] = list(self._pool.allocate(needed))
        return self.block_ids(request_id)

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Nothing is entered."""

    def free(self, request_id: str) -> None:
        self._pool.free(reversed(self._tables.pop(request_id, [])))

    def block_ids(self, request_id: str) -> Sequence[int]:
        return ReadOnlyView(self._tables.get(request_id, ()))
