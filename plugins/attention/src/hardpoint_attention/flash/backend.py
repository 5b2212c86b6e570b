"""The FlashAttention backend: capability answers, and which kernels a layer gets."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_attention.cascade import cascade_policy
from hardpoint_attention.flash import capabilities
from hardpoint_attention.flash.builder import BuilderSettings, FlashMetadataBuilder
from hardpoint_attention.flash.calls import FlashKernel
from hardpoint_attention.flash.capabilities import HEAD_256_PAGE, InstalledKernels
from hardpoint_attention.flash.generations import load_generation
from hardpoint_attention.flash.impl import FlashImpl, LayerKernels
from hardpoint_attention.flash.layers import KnownLayer
from hardpoint_attention.flash.options import FlashOptions

__all__ = ["FlashBackend", "FlashSurroundings"]


@dataclass(frozen=True, slots=True)
class FlashSurroundings:
    """Where a backend runs."""

    device: DeviceDescription
    installed: InstalledKernels
    batch_invariant: bool = False
    num_processors: int = 1
    logger: logging.Logger = field(default_factory=lambda: logging.getLogger("hardpoint.attention.flash"))


class FlashBackend(AttentionBackend):
    """Kernel generations change behind this factory only (R5.2): layers and builders see one interface."""

    name = "flash_attn"
    returns_lse = True
    known_needs = AttentionBackend.known_needs | {
        "chunk_size",
        "keeps_prompt",
        "uses_mm_prefix",
        "uses_row_causality",
        "uses_sparse",
        "per_head_scales",
        "needs_lse",
        "dcp_size",
    }

    def __init__(self, surroundings: FlashSurroundings, options: FlashOptions) -> None:
        self.surroundings = surroundings
        self.options = options
        self._cascade = cascade_policy(options.cascade)
        self._layers: dict[str, KnownLayer] = {}
        self._kernels: dict[int, FlashKernel] = {}

    def refuse(self, need: AttentionNeed) -> str | None:
        return capabilities.refuse(need, self.surroundings.installed)

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return capabilities.block_sizes(need, self.surroundings.installed)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        need = self._need(spec.num_kv_heads, spec.num_kv_heads, spec.head_size)
        generation = capabilities.resolve(need, self.surroundings.installed).generation
        settings = BuilderSettings(
            generation=0 if generation is None else generation,
            page_tokens=HEAD_256_PAGE if capabilities.is_head_256_path(need, generation) else None,
            max_rows=max_rows,
            max_tokens=max_tokens,
            batch_invariant=self.surroundings.batch_invariant,
            split_bound=self.options.max_splits,
            graph_tokens=self.options.max_graph_tokens,
            num_processors=self.surroundings.num_processors,
            dcp_interleave=self.options.dcp_interleave,
            cascade=self._cascade,
            load_scheduler=_load_scheduler,
        )
        return FlashMetadataBuilder(spec, layer_names, self._layers, settings, device)

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        """Raises ``ValueError`` for a layer that no installed generation serves, which ``refuse`` tells beforehand, and
        ``ConfigError`` where the installed package turns out to be too old for it."""
        need = self._layer_need(params)
        resolution = capabilities.resolve(need, self.surroundings.installed)
        if resolution.generation is None:
            raise ValueError(f"layer {params.layer_name!r}: {resolution.reason}")
        installed = self.surroundings.installed
        masked = capabilities.resolve(replace(need, uses_mm_prefix=True), installed).generation
        encoder = self._encoder_generation(params, need, resolution.generation)
        self._require_features(params, resolution.generation)
        self._layers[params.layer_name] = KnownLayer(params, resolution.generation)
        kernels = LayerKernels(self._load, resolution.generation, masked, encoder)
        return FlashImpl(params, kernels)

    def _encoder_generation(self, params: AttentionLayerParams, need: AttentionNeed, generation: int) -> int:
        if not capabilities.needs_generation_2(need, generation):
            return generation
        if 2 not in self.surroundings.installed.versions:
            raise ValueError(
                f"layer {params.layer_name!r}: the kernel for heads of 256 entries has no windows over an encoder's "
                "keys; install flash-attn (generation 2) beside it"
            )
        self.surroundings.logger.warning(
            "layer %s: windowed encoder attention with heads of 256 entries runs on FlashAttention 2", params.layer_name
        )
        return 2

    def _require_features(self, params: AttentionLayerParams, generation: int) -> None:
        """R5.5: a package is looked at before the first forward where a layer needs what not every version has."""
        masks = generation == 4 and (params.keeps_prompt or params.chunk_size is not None)
        scales = params.key_scale is not None or params.value_scale is not None
        missing = self._load(generation).lacks(masks=masks, scales=scales) if masks or scales else None
        if missing is not None:
            raise ConfigError(
                f"layer {params.layer_name!r}: {missing}, or choose another backend with --attention-backend"
            )

    def _load(self, generation: int) -> FlashKernel:
        kernel = self._kernels.get(generation)
        if kernel is None:
            kernel = self._kernels[generation] = load_generation(generation)
        return kernel

    def _layer_need(self, params: AttentionLayerParams) -> AttentionNeed:
        return replace(
            self._need(params.num_heads, params.num_kv_heads, params.head_size),
            kind=params.kind,
            sliding_window=params.sliding_window,
            logits_soft_cap=params.logits_soft_cap,
            uses_alibi=params.alibi_slopes is not None,
            uses_sinks=params.sinks is not None,
            chunk_size=params.chunk_size,
            keeps_prompt=params.keeps_prompt,
        )

    def _need(self, num_heads: int, num_kv_heads: int, head_size: int) -> AttentionNeed:
        return AttentionNeed(
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_size=head_size,
            dtype="bfloat16",
            kv_cache_dtype="auto",
            device=self.surroundings.device,
            batch_invariant=self.surroundings.batch_invariant,
        )


def _load_scheduler() -> Callable[..., Any]:
    function: Callable[..., Any] = importlib.import_module("flash_attn_interface").get_scheduler_metadata
    return function
