"""The layer's side of an attention problem."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint.interfaces.attention import AttentionKind, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription

__all__ = ["AttentionShape"]


@dataclass(frozen=True, slots=True)
class AttentionShape:
    """The layer's side of a problem. ``rows`` of the problem are (context, query) token counts.

    ``latent_values``: a latent layer (MLA); keys are all that is cached, and values their first ``latent_values``
    entries. It has one KV head. ``kv_cache_dtype``: as ``kv_storage`` reads it; None: ``dtype``. ``uses_sparse``: a
    query sees selected keys only.
    """

    num_heads: int = 6
    num_kv_heads: int = 2
    head_size: int = 16
    block_size: int = 4
    sliding_window: int | None = None
    logits_soft_cap: float | None = None
    uses_alibi: bool = False
    uses_sinks: bool = False
    causal: bool = True
    kind: AttentionKind = AttentionKind.DECODER
    dtype: torch.dtype = torch.float32
    latent_values: int | None = None
    chunk_size: int | None = None
    keeps_prompt: bool = False
    uses_mm_prefix: bool = False
    uses_row_causality: bool = False
    kv_cache_dtype: str | None = None
    per_head_scales: bool = False
    uses_relative_bias: bool = False
    uses_sparse: bool = False

    @property
    def value_size(self) -> int:
        return self.head_size if self.latent_values is None else self.latent_values

    @property
    def dtype_name(self) -> str:
        return str(self.dtype).removeprefix("torch.")

    @property
    def stored_as(self) -> str:
        """What keys and values are stored as, by a name of ``kv_storage``."""
        return self.kv_cache_dtype or self.dtype_name

    @property
    def has_cache(self) -> bool:
        """Encoders read the step's own keys and values."""
        return self.kind in (AttentionKind.DECODER, AttentionKind.ENCODER_DECODER)

    def need(self, device: DeviceDescription | None = None) -> AttentionNeed:
        """The same as a question to a backend."""
        return AttentionNeed(
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            head_size=self.head_size,
            dtype=self.dtype_name,
            kv_cache_dtype=self.stored_as,
            device=device or DeviceDescription(device_type="cpu", name="test"),
            block_size=self.block_size,
            kind=self.kind,
            sliding_window=self.sliding_window,
            logits_soft_cap=self.logits_soft_cap,
            uses_alibi=self.uses_alibi,
            uses_sinks=self.uses_sinks,
            uses_mla=self.latent_values is not None,
            chunk_size=self.chunk_size,
            keeps_prompt=self.keeps_prompt,
            uses_mm_prefix=self.uses_mm_prefix,
            uses_row_causality=self.uses_row_causality,
            per_head_scales=self.per_head_scales,
            uses_relative_bias=self.uses_relative_bias,
            uses_sparse=self.uses_sparse,
        )
