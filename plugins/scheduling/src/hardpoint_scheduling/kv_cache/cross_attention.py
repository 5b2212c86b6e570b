"""Manager of layers that attend to an encoder's output."""

from __future__ import annotations

from hardpoint.interfaces import CrossAttentionSpec, KVBlockPool, KVSpecRegistration, NoOptions, PluginContext, plugin
from hardpoint_scheduling.kv_cache.fixed import FixedTableManager


class CrossAttentionManager(FixedTableManager):
    """One block per ``block_size`` encoder tokens, all taken when the request is admitted.

    ``num_tokens`` counts tokens of the encoder. Blocks hold the KV of one request's input, which no hash of decoder
    tokens stands for, so a model with such layers finds no prefixes.
    """

    def __init__(self, pool: KVBlockPool, group_id: int, spec: CrossAttentionSpec) -> None:
        del group_id
        super().__init__(pool)
        self._block_size = spec.block_size
        self._max_tokens = spec.max_encoder_tokens

    def num_blocks(self, request_id: str, num_tokens: int) -> int:
        """Raises ``ValueError`` for more tokens than the encoder ever gives: their blocks were not planned for."""
        if num_tokens > self._max_tokens:
            raise ValueError(f"request {request_id} has {num_tokens} encoder tokens; allowed: {self._max_tokens}")
        return -(-num_tokens // self._block_size)


@plugin("kv_cache_spec")
def create(ctx: PluginContext, options: NoOptions) -> KVSpecRegistration:
    """Entry point ``cross_attention``."""
    del ctx, options
    return REGISTRATION


REGISTRATION = KVSpecRegistration(CrossAttentionSpec, CrossAttentionManager)
