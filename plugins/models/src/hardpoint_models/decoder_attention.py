"""Attention of decoder layers: grouped-query with rotary positions, or over a latent.

Legend: T tokens of the step, C hidden size; H query and K KV heads of this rank, D head size.
"""

from __future__ import annotations

from typing import TypeAlias

import torch

from hardpoint_models.decoder_config import DecoderConfig, QueryTemperature
from hardpoint_torch_runtime.layers import LayerToolkit, OutputPart, RMSNorm, RotaryEmbedding, ShardedRMSNorm

__all__ = ["DecoderAttention", "Placing", "decoder_norm", "make_attention", "make_rotary", "query_factors"]

Placing: TypeAlias = tuple[torch.Tensor, torch.Tensor] | torch.Tensor | None
"""What positions do to a layer's heads: rotate queries and keys, multiply queries by float32 [T, 1, 1], or nothing."""


def decoder_norm(size: int, config: DecoderConfig, layers: LayerToolkit) -> RMSNorm:
    return layers.rms_norm(size, config.norm_eps, weight_offset=config.norm_offset)


def make_rotary(config: DecoderConfig, layers: LayerToolkit) -> RotaryEmbedding:
    return layers.rotary(config.head_size, config.rope, pairs_are_neighbors=config.pairs_are_neighbors)


def query_factors(temperature: QueryTemperature, positions: torch.Tensor) -> torch.Tensor:
    """float32 [T, 1, 1] for int64 [T]."""
    spans = ((positions.float() + 1.0) / temperature.span).floor()
    return (1.0 + temperature.growth * spans.log1p()).view(-1, 1, 1)


def _head_norm(part: OutputPart, config: DecoderConfig, layers: LayerToolkit) -> RMSNorm | None:
    if config.qk_norm is None or config.qk_norm == "rotated":
        return None
    if config.qk_norm == "projections":
        return layers.sharded_rms_norm(part, config.norm_eps)
    return decoder_norm(config.head_size, config, layers)


class DecoderAttention(torch.nn.Module):
    """[T, C] to [T, C]; without a placing attention sees no positions.

    ``index`` is the layer's number in the whole model.
    """

    def __init__(self, name: str, config: DecoderConfig, index: int, layers: LayerToolkit) -> None:
        super().__init__()
        size = config.head_size
        self.qkv_proj = layers.qkv_linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            bias=config.qkv_bias,
        )
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = layers.row_linear(
            f"{name}.o_proj", config.num_heads * size, config.hidden_size, bias=config.output_bias
        )
        parts = self.qkv_proj.parts
        self.q_norm, self.k_norm = (_head_norm(parts[part], config, layers) for part in ("q", "k"))
        self.rotated_norm = (
            layers.rms_norm(size, config.norm_eps, has_weight=False) if config.qk_norm == "rotated" else None
        )
        self.rotary = make_rotary(config, layers)
        self.sinks = layers.attention_sinks(f"{name}.sinks", config.num_heads) if config.has_sinks else None
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            scale=config.attention_scale,
            sliding_window=config.windows[index],
            chunk_size=config.chunk_sizes[index] if config.chunk_sizes else None,
            logits_soft_cap=config.attention_soft_cap,
            sinks=None if self.sinks is None else self.sinks.weight,
            uses_mm_prefix=config.sees_whole_media,
        )
        self._num_heads = heads
        self._num_rotated = heads + kv_heads
        self._head_size = size

    def forward(self, hidden: torch.Tensor, placing: Placing) -> torch.Tensor:
        states = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_size)
        query, key = states[:, : self._num_heads], states[:, self._num_heads : self._num_rotated]
        self._normalize(query, key)
        if isinstance(placing, torch.Tensor):
            query.mul_(placing)
        elif placing is not None:
            # Queries and keys lie next to each other in the fused projection and turn by the same angles: one call.
            rotated = self.rotary.rotate_(states[:, : self._num_rotated], *placing)
            if self.rotated_norm is not None:
                rotated.copy_(self.rotated_norm(rotated))
        return self.o_proj(self.attn(query, key, states[:, self._num_rotated :]))

    def _normalize(self, query: torch.Tensor, key: torch.Tensor) -> None:
        """In place, [T, H, D] and [T, K, D]."""
        if self.q_norm is None or self.k_norm is None:
            return
        if isinstance(self.q_norm, ShardedRMSNorm) and isinstance(self.k_norm, ShardedRMSNorm):
            whole = query.flatten(1), key.flatten(1)
            normed = ShardedRMSNorm.all_of((self.q_norm, self.k_norm), whole)
            query.copy_(normed[0].view_as(query))
            key.copy_(normed[1].view_as(key))
            return
        query.copy_(self.q_norm(query))
        key.copy_(self.k_norm(key))


def make_attention(name: str, config: DecoderConfig, index: int, layers: LayerToolkit) -> torch.nn.Module:
    latent = config.latent
    if latent is None:
        return DecoderAttention(name, config, index, layers)
    return layers.latent_attention(
        name,
        latent.sizes,
        rotary=make_rotary(config, layers),
        scale=config.attention_scale,
        norm_eps=config.norm_eps,
        bias=config.qkv_bias,
    )
