"""The FlashInfer backend and its factory."""

from __future__ import annotations

import importlib.util
from collections.abc import Sequence
from importlib import metadata

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    BlockSizeRule,
)
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.flashinfer.capabilities import BLOCK_SIZES, KINDS, refuse
from hardpoint_attention.flashinfer.impl import FlashInferImpl, plan_key
from hardpoint_attention.flashinfer.metadata import FlashInferBuilder, KnownKey
from hardpoint_attention.flashinfer.plans import PlanTable, load_package

__all__ = ["FlashInferBackend", "FlashInferOptions", "create"]

PACKAGE = "flashinfer-python"


class FlashInferOptions(BaseModel):
    """Set under ``plugins.attention_backend.flashinfer``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    workspace_bytes: int = Field(
        default=128 * 1024 * 1024, ge=1, description="scratch memory for partial results, per KV cache group"
    )
    max_pages: int = Field(
        default=1 << 20, ge=1, description="most KV cache pages that the rows of one step may have together"
    )


class FlashInferBackend(AttentionBackend):
    """``dtype``: of activations, for which wrappers are planned before layers have run. ``is_installed``: whether the
    package is; it is not loaded to find out."""

    name = "flashinfer"
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

    def __init__(
        self,
        options: FlashInferOptions,
        *,
        dtype: torch.dtype = torch.bfloat16,
        batch_invariant: bool = False,
        is_installed: bool = True,
    ) -> None:
        self.options = options
        self._is_installed = is_installed
        self._dtype = dtype
        self._batch_invariant = batch_invariant
        self._layers: dict[str, KnownKey] = {}

    def refuse(self, need: AttentionNeed) -> str | None:
        reason = refuse(need)
        if reason is None and not self._is_installed:
            return f"FlashInfer is not installed; install {PACKAGE}"
        return reason

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del max_rows, max_tokens
        plans = PlanTable(
            load_package,
            device,
            getattr(torch, spec.dtype),
            workspace_bytes=self.options.workspace_bytes,
            max_pages=self.options.max_pages,
            batch_invariant=self._batch_invariant,
        )
        return FlashInferBuilder(
            plans,
            layer_names,
            self._layers,
            device,
            max_pages=self.options.max_pages,
            separates_decodes=not self._batch_invariant,
        )

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        self._layers[params.layer_name] = plan_key(params), self._dtype
        return FlashInferImpl(params)


def probe() -> ProbeResult:
    """Available with the version found, or absent with what to install."""
    try:
        found = importlib.util.find_spec("flashinfer")
    except ValueError:
        found = None
    if found is None:
        return ProbeResult(ProbeStatus.ABSENT, f"FlashInfer is not installed; install {PACKAGE}")
    try:
        version = metadata.version(PACKAGE)
    except metadata.PackageNotFoundError:
        version = "of unknown version"
    return ProbeResult(ProbeStatus.AVAILABLE, f"{PACKAGE} {version}", {PACKAGE: version})


@plugin(
    "attention_backend",
    options=FlashInferOptions,
    probe=probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in KINDS],
        "mla": False,
        BLOCK_SIZES_CAPABILITY: {"exact": list(BLOCK_SIZES.exact)},
    },
)
def create(ctx: WorkerContext, options: FlashInferOptions) -> AttentionBackend:
    """Factory of the plugin ``flashinfer``. Imports the package when the first step is planned."""
    config, is_installed = ctx.config, probe().status is ProbeStatus.AVAILABLE
    if config is None:
        return FlashInferBackend(options, is_installed=is_installed)
    dtype = getattr(torch, config.dtype)
    return FlashInferBackend(options, dtype=dtype, batch_invariant=config.batch_invariant, is_installed=is_installed)
