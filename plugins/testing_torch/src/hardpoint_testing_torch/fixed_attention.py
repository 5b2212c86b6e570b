"""Plain attention that can be captured: over whole buffers, so that its operators depend on a step's shape alone.

Legend: R rows of the shape, padding included; q query tokens of a row; t places in a row's blocks; H query heads, K KV
heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionMetadataBuilder,
    AttentionNeed,
    CommonAttentionMetadata,
    GraphSupport,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint_testing_torch.plain_attention import DTYPES, PlainAttention, PlainAttentionBackend

__all__ = ["FixedShapeAttention", "FixedShapeBackend", "PassingBuilder"]


class PassingBuilder(AttentionMetadataBuilder):
    """Hands on the runner's own tensors, which stay where they are. ``built`` is all that it was given."""

    def __init__(self, graph_support: GraphSupport) -> None:
        self.graph_support = graph_support
        self.built: list[CommonAttentionMetadata] = []

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CommonAttentionMetadata:
        del fast
        self.built.append(common)
        return common


class FixedShapeAttention(PlainAttention):
    """Rows of equally many tokens where metadata is for a graph; plain attention otherwise."""

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None or kv_cache is None or not metadata.for_graph:
            return super().forward(query, key, value, kv_cache, metadata, output)
        lengths = metadata.seq_lens
        num_queries = len(query) // len(lengths)
        states = kv_cache[metadata.block_table.long()].transpose(2, 3).flatten(1, 2).float()
        group = self.params.num_heads // self.params.num_kv_heads
        keys, values = states.repeat_interleave(group, dim=2).split(self.params.head_size, dim=-1)
        places = torch.arange(keys.shape[1], device=query.device)
        positions = lengths[:, None] - torch.arange(num_queries, 0, -1, device=query.device)
        distance = (positions[:, :, None] - places)[:, :, None]
        hidden = distance < 0
        if self.params.sliding_window is not None:
            hidden = hidden | (distance >= self.params.sliding_window)
        queries = query.unflatten(0, (len(lengths), num_queries)).float()
        scores = torch.einsum("rqhd,rthd->rqht", queries, keys) * self.params.scale
        weights = scores.masked_fill(hidden, -torch.inf).softmax(dim=-1)
        # What lies behind a row's end may be anything, numbers or not; a weight of zero does not silence it.
        values = values.masked_fill((places >= lengths[:, None])[:, :, None, None], 0)
        output.copy_(torch.einsum("rqht,rthd->rqhd", weights, values).flatten(0, 1))
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Raises ``TypeError``: a graph has none to give."""
        return AttentionImpl.forward_with_lse(self, query, kv_cache, metadata, output)

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        """Tokens without a slot rewrite the first cell of the null block with what it holds."""
        slots, size = slot_mapping.clamp(min=0), kv_cache.shape[2]
        blocks, offsets = slots // size, slots % size
        fresh = torch.cat((key, value), dim=-1)[: len(slots)].to(kv_cache.dtype)
        states = torch.where((slot_mapping >= 0)[:, None, None], fresh, kv_cache[blocks, :, offsets])
        kv_cache[blocks, :, offsets] = states


class FixedShapeBackend(PlainAttentionBackend):
    """``builders`` are those made so far. Only decoders' own masks are known: full attention and windows."""

    name = "fixed_shape"
    returns_lse = False
    known_needs = AttentionBackend.known_needs
    impl = FixedShapeAttention

    def __init__(self, graph_support: GraphSupport = GraphSupport.UNIFORM_BATCH) -> None:
        """Raises ``ValueError`` for batches of unequal rows, which no graph of this backend can serve."""
        if graph_support > GraphSupport.UNIFORM_BATCH:
            raise ValueError(
                f"graphs of {graph_support.name} batches are asked for; rows must have equally many tokens"
            )
        self.graph_support = graph_support
        self.builders: list[PassingBuilder] = []

    def refuse(self, need: AttentionNeed) -> str | None:
        odd = need.uses_mla or need.uses_alibi or need.uses_sinks or need.logits_soft_cap is not None
        odd = odd or need.kv_cache_dtype not in DTYPES
        if odd or need.kind is not AttentionKind.DECODER:
            return "attention of a fixed shape serves plain decoders and windows"
        return super().refuse(need)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names, max_rows, max_tokens, device
        self.builders.append(PassingBuilder(self.graph_support))
        return self.builders[-1]
