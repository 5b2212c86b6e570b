"""Manager of layers whose tokens look back to the start of their chunk."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    ChunkedLocalAttentionSpec,
    KVBlockPool,
    KVSpecRegistration,
    NoOptions,
    PluginContext,
    plugin,
)
from hardpoint_scheduling.kv_cache.skipping import SkippingManager


class ChunkedLocalManager(SkippingManager):
    """Blocks of earlier chunks give way to the null block; a hit at the end of a chunk needs none at all.

    Raises ``ConfigError`` for chunks that are no whole number of blocks: a block would serve two of them.
    """

    def __init__(self, pool: KVBlockPool, group_id: int, spec: ChunkedLocalAttentionSpec) -> None:
        super().__init__(pool, group_id, spec)
        if spec.chunk_size < 1 or spec.chunk_size % spec.block_size:
            raise ConfigError(
                f"attention chunks of {spec.chunk_size} tokens are no whole number of blocks of {spec.block_size}; "
                "choose --block-size as a divisor"
            )
        self._chunk_blocks = spec.chunk_size // spec.block_size

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return num_computed_tokens // (self._chunk_blocks * self._block_size) * self._chunk_blocks

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        """What the last chunk has; its start, which needs nothing, if that is nothing."""
        whole = self._num_whole(block_hashes, max_tokens)
        start = whole // self._chunk_blocks * self._chunk_blocks
        chunk = islice(block_hashes, start, whole)
        return [NULL_BLOCK_ID] * start + list(self._pool.find_chain(chunk, self._group_id))


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``chunked_local``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(ChunkedLocalAttentionSpec, ChunkedLocalManager)
