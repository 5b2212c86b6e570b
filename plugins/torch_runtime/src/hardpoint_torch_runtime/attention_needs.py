"""What a model's attention layers ask of a backend: the settings they share, and every distinct need among them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.attention import AttentionKind, AttentionNeed
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec, MLASpec
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint_torch_runtime.layers.attention import AttentionLayer

__all__ = ["attention_need", "bare_need", "describe_need", "layer_needs"]

VISION_PREFIX = "vision"
"""What ``use_bidirectional_attention`` says of models whose image tokens see one another in both directions."""

USUAL_HEAD_SIZE = 64

LayersByNeed = Mapping[AttentionNeed, tuple[str, ...]]


def attention_need(config: WorkerConfig, device: DeviceDescription) -> AttentionNeed:
    """What this rank's attention layers will ask for, as far as the model's configuration and the settings tell.

    A configuration that names no attention heads is that of recurrent layers alone, or has names of its own: what it
    needs is then up to its layers, and a usual head stands for them until they are there.

    Raises ``ModelFormatError`` for head counts that cannot be.
    """
    fields = config.model.config
    heads, kv_heads, head_size = 1, 1, USUAL_HEAD_SIZE
    if fields.get("num_attention_heads") is not None:
        heads = _count(fields, "num_attention_heads")
        kv_heads = _count(fields, "num_key_value_heads", heads)
        head_size = _count(fields, "head_dim", max(1, _count(fields, "hidden_size") // heads))
    latent_rank = fields.get("kv_lora_rank")
    if latent_rank is not None:
        kv_heads, head_size = 1, _count(fields, "kv_lora_rank") + _count(fields, "qk_rope_head_dim")
    ranks = config.parallel.tensor_parallel_size
    uses_window = fields.get("use_sliding_window", True)
    return AttentionNeed(
        num_heads=max(1, heads // ranks),
        num_kv_heads=max(1, kv_heads // ranks),
        head_size=head_size,
        dtype=config.dtype,
        kv_cache_dtype=config.dtype if config.kv_cache_dtype == "auto" else config.kv_cache_dtype,
        device=device,
        block_size=config.block_size,
        sliding_window=fields.get("sliding_window") if uses_window else None,
        chunk_size=fields.get("attention_chunk_size"),
        logits_soft_cap=fields.get("attn_logit_softcapping"),
        uses_mla=latent_rank is not None,
        uses_mm_prefix=fields.get("use_bidirectional_attention") == VISION_PREFIX,
        batch_invariant=config.batch_invariant,
    )


def bare_need(need: AttentionNeed) -> AttentionNeed:
    """``need`` without what a configuration may mention and no layer have: windows, chunks and caps."""
    return replace(need, sliding_window=None, chunk_size=None, logits_soft_cap=None)


def layer_needs(base: AttentionNeed, layers: Iterable[torch.nn.Module]) -> dict[AttentionNeed, tuple[str, ...]]:
    """The distinct needs of ``layers`` in their order, each with the names of those that have it (R5.5).

    ``base`` says what all share: dtypes, device, block size, modes. Layers that attend to nothing have none.
    """
    found: dict[AttentionNeed, list[str]] = {}
    for layer in layers:
        if isinstance(layer, AttentionLayer):
            found.setdefault(_need_of(base, layer), []).append(layer.name)
    return {need: tuple(names) for need, names in found.items()}


def _need_of(base: AttentionNeed, layer: AttentionLayer) -> AttentionNeed:
    params = layer.params
    shards = layer.spec.context_shards if isinstance(layer.spec, FullAttentionSpec) else 1
    return replace(
        base,
        num_heads=params.num_heads,
        num_kv_heads=params.num_kv_heads,
        head_size=params.head_size,
        kind=params.kind,
        sliding_window=params.sliding_window,
        chunk_size=params.chunk_size,
        keeps_prompt=params.keeps_prompt,
        logits_soft_cap=params.logits_soft_cap,
        uses_alibi=params.alibi_slopes is not None,
        uses_sinks=params.sinks is not None,
        uses_relative_bias=params.relative_bias is not None,
        uses_mla=isinstance(layer.spec, MLASpec),
        uses_mm_prefix=layer.uses_mm_prefix or (base.uses_mm_prefix and params.kind is AttentionKind.DECODER),
        uses_sparse=layer.selects_keys,
        per_head_scales=any(
            scale is not None and scale.numel() > 1 for scale in (params.key_scale, params.value_scale)
        ),
        # Ranks merge their answers by it.
        needs_lse=shards > 1,
        dcp_size=shards,
    )


def describe_need(need: AttentionNeed) -> str:
    """For people: heads, head size, dtypes, and whatever is out of the ordinary."""
    parts = [f"{need.num_heads}/{need.num_kv_heads} heads of {need.head_size}", need.dtype]
    if need.kv_cache_dtype not in (need.dtype, "auto"):
        parts.append(f"cache {need.kv_cache_dtype}")
    if need.kind is not AttentionKind.DECODER:
        parts.append(need.kind.value.replace("_", "-"))
    if need.sliding_window is not None:
        parts.append(f"window {need.sliding_window}" + (" beside the prompt" if need.keeps_prompt else ""))
    if need.chunk_size is not None:
        parts.append(f"chunks of {need.chunk_size}")
    if need.logits_soft_cap is not None:
        parts.append(f"soft cap {need.logits_soft_cap:g}")
    if need.dcp_size > 1:
        parts.append(f"context over {need.dcp_size} ranks")
    marks = {
        "latent": need.uses_mla,
        "ALiBi": need.uses_alibi,
        "sinks": need.uses_sinks,
        "relative bias": need.uses_relative_bias,
        "multimodal prefix": need.uses_mm_prefix,
        "causality by row": need.uses_row_causality,
        "sparse": need.uses_sparse,
        "scales by head": need.per_head_scales,
        "log-sum-exp": need.needs_lse,
        "batch-invariant": need.batch_invariant,
    }
    return ", ".join((*parts, *(name for name, is_set in marks.items() if is_set)))


def _count(fields: dict[str, Any], name: str, default: int | None = None) -> int:
    value = fields.get(name)
    if value is None and default is not None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ModelFormatError(
            f"the model's configuration has {name} = {value!r:.120}; a positive whole number is needed"
        )
    return value
