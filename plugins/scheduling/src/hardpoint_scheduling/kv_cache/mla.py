"""Layers that store one latent vector per token: kept like full attention, in pages of another size."""

from __future__ import annotations

from hardpoint.interfaces import FullAttentionSpec, KVSpecRegistration, MLASpec, NoOptions, PluginContext, plugin
from hardpoint_scheduling.kv_cache.full_attention import FullAttentionManager


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``mla``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(MLASpec, FullAttentionManager, grouping_base=FullAttentionSpec)
