"""Capabilities of the reference backend and its factory."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError
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
from hardpoint.interfaces.kv_dtypes import KVQuantization, KVStorage, kv_storage
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, ProbeStatus, plugin
from hardpoint_attention.cascade import CascadePolicy, cascade_policy, estimate_cascade
from hardpoint_attention.reference.impl import ReferenceImpl
from hardpoint_attention.reference.layer_cache import FLOAT8_DTYPES, SCALE_BYTES
from hardpoint_attention.reference.metadata import ReferenceMetadataBuilder

__all__ = ["ReferenceBackend", "ReferenceOptions", "create"]

COMPUTE_DTYPES = ("float32", "bfloat16", "float16")
STORED_DTYPES = (*COMPUTE_DTYPES, *(str(dtype).removeprefix("torch.") for dtype in FLOAT8_DTYPES))
INT8_PER_TOKEN_HEAD = KVStorage("int8", KVQuantization.PER_TOKEN_HEAD, SCALE_BYTES)
BLOCK_SIZES = BlockSizeRule(multiple_of=1)


class ReferenceOptions(BaseModel):
    """Options of the plugin ``torch_reference``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cascade: str = Field(
        default="estimate",
        description="When a prefix that all rows share is attended to once: `estimate` (by the estimated gain), "
        "`always`, `never`, or a policy that a hook registered",
    )


class ReferenceBackend(AttentionBackend):
    """Gathers keys and values by block table and computes densely; float32 accumulation."""

    name = "torch_reference"
    returns_lse = True
    known_needs = frozenset(
        {
            "kind",
            "sliding_window",
            "logits_soft_cap",
            "uses_alibi",
            "uses_sinks",
            "uses_mla",
            "batch_invariant",
            "chunk_size",
            "keeps_prompt",
            "uses_mm_prefix",
            "uses_row_causality",
            "uses_sparse",
            "per_head_scales",
            "needs_lse",
            "dcp_size",
            "uses_relative_bias",
        }
    )

    def __init__(self, cascade: CascadePolicy = estimate_cascade) -> None:
        self._cascade = cascade

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.dtype not in COMPUTE_DTYPES:
            return f"dtype {need.dtype} is not one of {', '.join(COMPUTE_DTYPES)}"
        if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
            return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
        if need.batch_invariant:
            return "rows are grouped by length, so rounding depends on a row's neighbors (batch-invariant mode)"
        return _stored(need) or _kind(need) or _masks(need) or _ranks(need)

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del layer_names, max_rows, max_tokens
        return ReferenceMetadataBuilder(spec, device, self._cascade)

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return ReferenceImpl(params)


def _stored(need: AttentionNeed) -> str | None:
    """Why keys and values stored this way cannot be read."""
    if need.kv_cache_dtype == "auto":
        return None
    wrong = f"KV cache dtype {need.kv_cache_dtype} is not one of"
    try:
        storage = kv_storage(need.kv_cache_dtype)
    except ConfigError:
        return f"{wrong} auto, {', '.join(STORED_DTYPES)}, fp8, fp8_e5m2, int8_per_token_head"
    if storage == INT8_PER_TOKEN_HEAD:
        return None
    if storage.quantization is KVQuantization.NONE and storage.dtype in STORED_DTYPES:
        return None
    if storage.quantization is KVQuantization.PER_TENSOR and storage.dtype in STORED_DTYPES[len(COMPUTE_DTYPES) :]:
        return None
    return (
        f"{wrong} those known here: it is {storage.dtype} with quantization {storage.quantization.value}, not "
        f"{', '.join(STORED_DTYPES)} or int8 per token and head"
    )


def _kind(need: AttentionNeed) -> str | None:
    """What only some kinds of layers can have."""
    kind = need.kind
    if need.uses_alibi and kind is not AttentionKind.DECODER:
        return f"ALiBi biases are causal here and do not fit attention kind {kind.value}"
    if need.uses_relative_bias and kind is not AttentionKind.DECODER:
        return f"relative biases go by causal distances here and do not fit attention kind {kind.value}"
    if need.uses_mla and need.num_kv_heads != 1:
        return f"latent attention (MLA) has one latent that all heads share, not {need.num_kv_heads}"
    if need.uses_sparse and kind is not AttentionKind.DECODER:
        return f"keys are selected (sparse attention) among those of a decoder, not of attention kind {kind.value}"
    if need.uses_mla and kind is not AttentionKind.DECODER:
        return f"latent attention (MLA) reads a cache, which attention kind {kind.value} has not"
    return None


def _masks(need: AttentionNeed) -> str | None:
    if need.keeps_prompt and need.chunk_size is not None:
        return "a prompt that stays visible (keeps_prompt) contradicts attention in chunks (chunk_size)"
    return None


def _ranks(need: AttentionNeed) -> str | None:
    """What contexts dealt out among ranks rule out: a rank does not know where in its row a key is."""
    if need.dcp_size == 1:
        return None
    asked = {
        "a sliding window": need.sliding_window is not None,
        "attention in chunks": need.chunk_size is not None,
        "ALiBi": need.uses_alibi,
        "relative biases": need.uses_relative_bias,
        f"attention kind {need.kind.value}": need.kind is not AttentionKind.DECODER,
        "bidirectional ranges": need.uses_mm_prefix,
        "keys that an index selects": need.uses_sparse,
        # A step's own tokens are seen as they are, before they are stored, and would be rounded for later steps only.
        f"a KV cache of {need.kv_cache_dtype}": need.kv_cache_dtype not in ("auto", need.dtype),
    }
    wrong = [what for what, is_asked in asked.items() if is_asked]
    if not wrong:
        return None
    return f"contexts dealt out among {need.dcp_size} ranks do not go with {' and '.join(wrong)}"


def _probe() -> ProbeResult:
    return ProbeResult(ProbeStatus.AVAILABLE, f"torch {torch.__version__}")


@plugin(
    "attention_backend",
    options=ReferenceOptions,
    probe=_probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in AttentionKind],
        "mla": True,
        BLOCK_SIZES_CAPABILITY: {"multiple_of": BLOCK_SIZES.multiple_of},
    },
)
def create(ctx: PluginContext, options: ReferenceOptions) -> AttentionBackend:
    """Factory of the plugin ``torch_reference``. Raises ``ConfigError`` for a cascade policy nobody registered."""
    del ctx
    return ReferenceBackend(cascade_policy(options.cascade))
