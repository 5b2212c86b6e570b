"""What the Triton backend can compute, and its factory."""

from __future__ import annotations

import os
from collections.abc import Sequence
from importlib.util import find_spec

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
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, ProbeStatus, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_attention.cascade import cascade_policy
from hardpoint_attention.triton.capabilities import BLOCK_SIZES, KINDS, refuse
from hardpoint_attention.triton.configs import SPLITS
from hardpoint_attention.triton.impl import TritonImpl
from hardpoint_attention.triton.metadata import TritonMetadataBuilder
from hardpoint_attention.triton.planning import Planner, plan_fast, plan_fixed
from hardpoint_attention.triton.scratch import Scratch

__all__ = ["TritonBackend", "TritonOptions", "create", "probe"]

INTERPRETER_VARIABLE = "TRITON_INTERPRET"


class TritonOptions(BaseModel):
    """Options under ``plugins.attention_backend.triton``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    cascade: str = Field(
        default="estimate",
        description="when a prefix that all rows share is attended to once: `estimate`, `always`, `never`, or a "
        "registered policy",
    )


class TritonBackend(AttentionBackend):
    """One kernel for whatever is in a step. ``fixed``: the same order of additions for a row in every step.

    Raises ``ConfigError`` for an unknown cascade policy.
    """

    name = "triton"
    returns_lse = True
    known_needs = AttentionBackend.known_needs | {
        "chunk_size",
        "keeps_prompt",
        "uses_mm_prefix",
        "uses_row_causality",
        "per_head_scales",
        "needs_lse",
    }

    def __init__(
        self,
        options: TritonOptions = TritonOptions(),  # noqa: B008 - frozen
        *,
        fixed: bool = False,
        plan: Planner | None = None,
    ) -> None:
        self._is_fixed = fixed
        self._plan = plan_fixed if fixed else plan or plan_fast
        self._cascade = None if fixed else cascade_policy(options.cascade)
        self._scratch = Scratch()

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.batch_invariant and not self._is_fixed:
            return "it was made to split and join rows as is fastest for a step; start with --batch-invariant instead"
        return refuse(need, is_interpreted=is_interpreted())

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names
        self._scratch.allocate(device, max_tokens * SPLITS[-1])
        return TritonMetadataBuilder(max_rows, max_tokens, device)

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return TritonImpl(params, self._scratch, self._plan, self._cascade)


def is_interpreted() -> bool:
    """Whether kernels that are defined from now on run through Triton's interpreter."""
    return os.environ.get(INTERPRETER_VARIABLE, "").lower() in ("1", "true", "on", "yes", "y")


def probe() -> ProbeResult:
    """Neither Triton nor a device is touched."""
    if find_spec("triton") is None:
        return ProbeResult(
            ProbeStatus.ABSENT, "the package triton is not installed; pip install 'hardpoint-attention[triton]'"
        )
    how = "through its interpreter, on the CPU" if is_interpreted() else "on GPUs"
    return ProbeResult(ProbeStatus.AVAILABLE, f"triton is installed and computes {how}")


@plugin(
    "attention_backend",
    options=TritonOptions,
    probe=probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in KINDS],
        "mla": True,
        "batch_invariant": True,
        BLOCK_SIZES_CAPABILITY: {"multiple_of": BLOCK_SIZES.multiple_of},
    },
)
def create(ctx: PluginContext, options: TritonOptions) -> AttentionBackend:
    """Factory of the plugin ``triton``. Without a configuration it makes the promise that holds for all."""
    config = ctx.config if isinstance(ctx, WorkerContext) else None
    return TritonBackend(options, fixed=config is None or config.batch_invariant)
