"""The shortest correct paged attention: row by row in float32. Kits run models over it where no backend is under test.

Legend: H query heads, K KV heads, D head size, V size of a head's values; q query tokens of a row, k visible tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
    CommonAttentionMetadata,
)
from hardpoint.interfaces.kv_cache import AttentionSpec

__all__ = ["PlainAttention", "PlainAttentionBackend"]

DTYPES = ("float32", "bfloat16", "float16")


class PlainBuilder(AttentionMetadataBuilder):
    """The common metadata is all that plain attention needs."""

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        del fast
        return common


class PlainAttention(AttentionImpl):
    """Decoders and encoders, with windows, soft caps, ALiBi and sinks; latents too, which hold values in keys."""

    def __init__(self, params: AttentionLayerParams) -> None:
        self.params = params

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        starts = metadata.query_start_loc_cpu
        for row in range(metadata.num_rows):
            step = slice(int(starts[row]), int(starts[row + 1]))
            if kv_cache is None:
                keys, values = key[step], value[step]
            else:
                states, size = self.stored(kv_cache, metadata, row), self.params.head_size
                is_latent = states.shape[-1] == size
                keys, values = states[..., :size], states[..., : value.shape[-1]] if is_latent else states[..., size:]
            output[step] = self.attend(query[step].float(), keys.float(), values.float(), metadata.causal)
        return output

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        """Keys and values [k, K, D + V], or latents [k, 1, D], of everything the row may see."""
        length = int(metadata.seq_lens_cpu[row])
        blocks = metadata.block_table[row, : -(-length // metadata.block_size)].long()
        return cache[blocks].transpose(1, 2).flatten(0, 1)[:length]

    def attend(self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool) -> torch.Tensor:
        """[q, H, V] of one row whose queries are the last of its tokens."""
        params = self.params
        group = params.num_heads // params.num_kv_heads
        scores = torch.einsum("qhd,khd->hqk", query, keys.repeat_interleave(group, 1)) * params.scale
        if params.logits_soft_cap is not None:
            scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
        positions = torch.arange(len(keys) - len(query), len(keys), device=query.device)
        distance = positions[:, None] - torch.arange(len(keys), device=query.device)[None]
        if params.alibi_slopes is not None:
            slopes = torch.tensor(tuple(params.alibi_slopes), device=query.device)
            scores = scores - slopes[:, None, None] * distance
        hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
        if params.sliding_window is not None:
            hidden = hidden | (distance.abs() >= params.sliding_window)
        scores = scores.masked_fill(hidden, -torch.inf)
        if params.sinks is not None:
            sink = params.sinks.float()[:, None, None].expand(-1, len(query), 1)
            weights = torch.softmax(torch.cat((scores, sink), dim=-1), dim=-1)[..., :-1]
        else:
            weights = torch.softmax(scores, dim=-1)
        return torch.einsum("hqk,khd->qhd", weights, values.repeat_interleave(group, 1))

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        real = (slot_mapping >= 0).nonzero().flatten()
        slots = slot_mapping[real]
        is_latent = kv_cache.shape[-1] == key.shape[-1]
        states = key[real] if is_latent else torch.cat((key[real], value[real]), dim=-1)
        states = states.to(kv_cache.dtype)
        kv_cache.transpose(1, 2)[slots // kv_cache.shape[2], slots % kv_cache.shape[2]] = states


class PlainAttentionBackend(AttentionBackend):
    """``impl`` is replaced by mutants."""

    name = "plain"
    impl: type[PlainAttention] = PlainAttention

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.device.device_type != "cpu":
            return f"plain attention runs on the CPU, not on {need.device.device_type}"
        unknown = sorted({need.dtype, need.kv_cache_dtype} - set(DTYPES))
        if unknown:
            return f"plain attention computes {', '.join(DTYPES)}, not {' and '.join(unknown)}"
        if need.uses_mla and need.num_kv_heads != 1:
            return f"latents are one KV head that all heads share, not {need.num_kv_heads}"
        if need.uses_mla and need.kind is not AttentionKind.DECODER:
            return f"latents are read from a cache, which attention kind {need.kind} has not"
        if need.batch_invariant:
            return "plain attention does not promise equal bits in every batch"
        if need.kind is AttentionKind.ENCODER_DECODER:
            return "plain attention knows no cross-attention"
        if need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads cannot be shared out among {need.num_kv_heads} KV heads"
        return None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BlockSizeRule(multiple_of=1)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names, max_rows, max_tokens, device
        return PlainBuilder()

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return self.impl(params)
