"""Capabilities of the reference backend and its factory."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
)
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.plugin import NoOptions, PluginContext, ProbeResult, ProbeStatus, plugin
from hardpoint_attention.reference.impl import ReferenceImpl
from hardpoint_attention.reference.metadata import ReferenceMetadataBuilder

__all__ = ["ReferenceBackend", "create"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SIZES = BlockSizeRule(multiple_of=1)
KINDS = (AttentionKind.DECODER, AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY)


class ReferenceBackend(AttentionBackend):
    """Gathers keys and values by block table and computes densely; float32 accumulation."""

    name = "torch_reference"
    returns_lse = True

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.dtype not in COMPUTE_DTYPES:
            return f"dtype {need.dtype} is not one of {', '.join(COMPUTE_DTYPES)}"
        if need.kv_cache_dtype not in ("auto", *COMPUTE_DTYPES):
            return f"KV cache dtype {need.kv_cache_dtype} is not one of auto, {', '.join(COMPUTE_DTYPES)}"
        if need.kind not in KINDS:
            return f"attention kind {need.kind.value} is not one of {', '.join(kind.value for kind in KINDS)}"
        if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
        if need.uses_alibi and need.kind is not AttentionKind.DECODER:
            return f"ALiBi biases are causal here and do not fit attention kind {need.kind.value}"
        if need.uses_mla and need.num_kv_heads != 1:
            return f"latent attention (MLA) has one latent that all heads share, not {need.num_kv_heads}"
        if need.uses_mla and need.kind is not AttentionKind.DECODER:
            return f"latent attention (MLA) reads a cache, which attention kind {need.kind.value} has not"
        if need.batch_invariant:
            return "rows are grouped by length, so rounding depends on a row's neighbors (batch-invariant mode)"
        return None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del layer_names, max_rows, max_tokens
        return ReferenceMetadataBuilder(spec, device)

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return ReferenceImpl(params)


def _probe() -> ProbeResult:
    return ProbeResult(ProbeStatus.AVAILABLE, f"torch {torch.__version__}")


@plugin(
    "attention_backend",
    probe=_probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in KINDS],
        "mla": True,
        BLOCK_SIZES_CAPABILITY: {"multiple_of": BLOCK_SIZES.multiple_of},
    },
)
def create(ctx: PluginContext, options: NoOptions) -> AttentionBackend:
    """Factory of the plugin ``torch_reference``."""
    del ctx, options
    return ReferenceBackend()
