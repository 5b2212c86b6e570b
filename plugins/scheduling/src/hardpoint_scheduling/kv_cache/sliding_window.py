"""Manager of layers that look back a fixed number of tokens."""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    KVBlockPool,
    KVSpecRegistration,
    NoOptions,
    PluginContext,
    SlidingWindowSpec,
    plugin,
)
from hardpoint_scheduling.kv_cache.skipping import SkippingManager


class SlidingWindowManager(SkippingManager):
    """Blocks before the window give way to the null block. A hit needs no more than the blocks of one window::

    tokens    0 ................... n - w + 1 ............ n - 1 | n
              skipped             | read by token n, which comes next (w = window, it counts itself)
    """

    def __init__(self, pool: KVBlockPool, group_id: int, spec: SlidingWindowSpec) -> None:
        super().__init__(pool, group_id, spec)
        self._window = spec.sliding_window

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self._window + 1, 0) // self._block_size

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        """From the end: the first run of cached blocks as long as the window, or one that reaches the start."""
        whole = self._num_whole(block_hashes, max_tokens)
        # Hits end at block boundaries, so the token behind one reads from the same place in each window.
        wanted = -(-(self._window - 1) // self._block_size)
        if wanted == 0:
            return [NULL_BLOCK_ID] * whole
        run: list[int] = []
        for position, block in self._found_backwards(block_hashes, whole):
            if block is None:
                run.clear()
                continue
            run.append(block)
            if len(run) == wanted:
                return [NULL_BLOCK_ID] * position + run[::-1]
        return run[::-1]


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``sliding_window``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(SlidingWindowSpec, SlidingWindowManager)
