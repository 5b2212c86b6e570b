"""Manager of layers that attend within one step: they keep nothing."""

from __future__ import annotations

from hardpoint.interfaces import (
    EncoderOnlyAttentionSpec,
    KVBlockPool,
    KVCacheSpec,
    KVSpecRegistration,
    NoOptions,
    PluginContext,
    plugin,
)
from hardpoint_scheduling.kv_cache.fixed import FixedTableManager


class EncoderOnlyManager(FixedTableManager):
    """Tables stay empty. Tokens see those behind them too, so no prefix of theirs could be reused."""

    needs_whole_prompts = True

    def __init__(self, pool: KVBlockPool, group_id: int, spec: KVCacheSpec) -> None:
        del group_id, spec
        super().__init__(pool)

    def num_blocks(self, request_id: str, num_tokens: int) -> int:
        return 0


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``encoder_only``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(EncoderOnlyAttentionSpec, EncoderOnlyManager)
