"""The attention backend ``cpu_paged``: compiled kernels over the paged cache, and plain torch until these are compiled.

Legend: T tokens of the step, H query heads, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

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
from hardpoint.interfaces.block_size import BLOCK_SIZES_CAPABILITY
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.plugin import NoOptions, PluginContext, ProbeResult, ProbeStatus, plugin
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_cpu.attention_fallback import attend_plainly, write_plainly
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider, KernelReport, KernelState
from hardpoint_cpu.native import attention as native
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.platform import CpuPlatform

__all__ = ["CpuPagedBackend", "CpuPagedImpl", "CpuPagedMetadata", "create"]

STORED = tuple(str(dtype).removeprefix("torch.") for dtype in native.STORED_DTYPES)
BLOCK_SIZES = BlockSizeRule(multiple_of=1)
KINDS = (AttentionKind.DECODER, AttentionKind.ENCODER, AttentionKind.ENCODER_ONLY)


class Kernels(Protocol):
    """What of :class:`~hardpoint_cpu.kernels.KernelProvider` a backend uses."""

    def library(self) -> NativeLibrary | None: ...

    def wait(self) -> NativeLibrary | None: ...

    def report(self) -> KernelReport: ...


@dataclass(frozen=True, slots=True)
class CpuPagedMetadata:
    """One step as the layers of a KV group see it.

    Attributes:
        rows: over the cache's blocks; ``rows.address`` is what a native call over whole layers takes.
        fresh: the same rows without a cache, for layers that read the step's own keys.
        block_size: tokens per position of the block table.
    """

    rows: native.RowFacts
    fresh: native.RowFacts
    block_size: int

    def describes(self, common: CommonAttentionMetadata) -> bool:
        """Whether ``common`` is about the very same tensors, and as many rows of them."""
        rows = self.rows
        return (
            rows.query_start is common.query_start_loc
            and rows.seq_lens is common.seq_lens
            and rows.block_table is common.block_table
            and rows.struct.rows == common.num_rows
            and bool(rows.struct.causal) == common.causal
            and self.block_size == common.block_size
        )


class CpuPagedBuilder(AttentionMetadataBuilder):
    """Takes rows in any order, and lengths from tensors that the step's own copies are: nothing is computed here.

    A step whose tensors are those of the step before gets the same metadata, which only says where they lie.
    """

    def __init__(self) -> None:
        self._last: CpuPagedMetadata | None = None

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> CpuPagedMetadata:
        del fast
        starts, lengths, table, count = common.query_start_loc, common.seq_lens, common.block_table, common.num_rows
        causal = common.causal
        if not isinstance(causal, bool):
            raise TypeError("all rows must be causal or none: uses_row_causality is a need that this backend refuses")
        if self._last is not None and self._last.describes(common):
            return self._last
        self._last = CpuPagedMetadata(
            rows=native.RowFacts.make(starts, lengths, table, rows=count, causal=causal),
            fresh=native.RowFacts.make(starts, lengths, None, rows=count, causal=causal),
            block_size=common.block_size,
        )
        return self._last


class CpuPagedImpl(AttentionImpl):
    """One layer on compiled kernels, or in plain torch at steps that come before these are there.

    Attributes:
        facts: the layer as kernels read it.
    """

    def __init__(self, params: AttentionLayerParams, kernels: Kernels, parts: int = 0) -> None:
        self.params = params
        self.facts = native.LayerFacts.make(
            params.num_heads,
            params.num_kv_heads,
            params.head_size,
            params.scale,
            window=params.sliding_window,
            soft_cap=params.logits_soft_cap,
            alibi_slopes=params.alibi_slopes,
            sinks=params.sinks,
            parts=parts,
        )
        self._kernels = kernels

    def accept_rounded_products(self) -> None:
        """Let the first bits of a float do where matrix units compute: for models whose layers round more than that.

        Nothing changes where a token's bits may not depend on its neighbors.
        """
        self.facts.struct.parts = min(self.facts.struct.parts, 1)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: CpuPagedMetadata | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        library = self._kernels.library()
        if library is None:
            rows = metadata.rows if kv_cache is not None else metadata.fresh
            attend_plainly(self.params, rows, kv_cache, query, key, value, output)
        elif kv_cache is None:
            native.attention_fresh(library, self.facts, metadata.fresh, key, value, query, output)
        else:
            native.attention(library, self.facts, metadata.rows, self.view(kv_cache), query, output)
        return output

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: CpuPagedMetadata, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        lse = torch.full(query.shape[:2], -torch.inf, dtype=torch.float32)
        library = self._kernels.library()
        if library is None:
            attend_plainly(self.params, metadata.rows, kv_cache, query, query, query, output, lse)
        else:
            native.attention(library, self.facts, metadata.rows, self.view(kv_cache), query, output, lse)
        return output, lse

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        library = self._kernels.library()
        if library is None:
            write_plainly(key, value, kv_cache, slot_mapping)
        else:
            native.write_kv(library, self.facts, key, value, slot_mapping, self.view(kv_cache))

    def view(self, kv_cache: torch.Tensor) -> native.KVCache:
        """The layer's cache as kernels read it."""
        return native.cache_view(kv_cache, self.params.num_kv_heads, self.params.head_size)


class CpuPagedBackend(AttentionBackend):
    """Float32 attention. With ``parts`` 0 a token has the same bits whatever else is in the step; otherwise prompts may
    go through matrix units, see :meth:`~hardpoint_cpu.native.attention.LayerFacts.make`.
    """

    name = "cpu_paged"
    returns_lse = True
    known_needs = AttentionBackend.known_needs | {"chunk_size"}

    def __init__(self, kernels: Kernels, *, parts: int = 0) -> None:
        self._kernels = kernels
        self._parts = parts

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.batch_invariant and self._parts:
            return "it was made for a run without --batch-invariant, where bits may depend on a token's neighbors"
        return _refuse_shape(need) or self._refuse_kernels(need)

    def _refuse_kernels(self, need: AttentionNeed) -> str | None:
        # Plain torch does not round alike, so nobody may change over from it within a run that must not change.
        library = self._kernels.wait() if need.batch_invariant else self._kernels.library()
        report = self._kernels.report()
        if library is None and report.state is KernelState.UNAVAILABLE:
            return f"there are no compiled kernels: {report.reason}"
        return None

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        del need
        return BLOCK_SIZES

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        del spec, layer_names, max_rows, max_tokens, device
        return CpuPagedBuilder()

    def create_impl(self, params: AttentionLayerParams) -> AttentionImpl:
        return CpuPagedImpl(params, self._kernels, self._parts)


def _refuse_shape(need: AttentionNeed) -> str | None:
    if need.device.device_type != "cpu":
        return f"it computes on the CPU, not on {need.device.device_type}"
    if need.dtype != "float32":
        return f"it computes in float32, not {need.dtype}"
    if need.kv_cache_dtype not in ("auto", *STORED):
        return f"KV cache dtype {need.kv_cache_dtype} is not one of auto, {', '.join(STORED)}"
    if need.kind not in KINDS:
        return f"attention kind {need.kind.value} is not one of {', '.join(kind.value for kind in KINDS)}"
    if need.uses_mla:
        return "latent attention (MLA) keeps no values of their own, which the kernels read"
    if need.chunk_size is not None:
        return "it has no chunked local attention"
    if need.num_kv_heads < 1 or need.num_heads % need.num_kv_heads:
        return f"{need.num_heads} query heads are no multiple of {need.num_kv_heads} key/value heads"
    if need.head_size < 1 or need.head_size % 8 or need.head_size > native.MAX_HEAD_SIZE:
        return f"head size {need.head_size} is no multiple of 8 up to {native.MAX_HEAD_SIZE}"
    if need.uses_alibi and need.kind is not AttentionKind.DECODER:
        return f"ALiBi biases are causal here and do not fit attention kind {need.kind.value}"
    return None


def _probe() -> ProbeResult:
    report = KernelProvider(Host()).report()
    if report.state is KernelState.UNAVAILABLE:
        return ProbeResult(ProbeStatus.ABSENT, f"no compiled kernels: {report.reason}")
    return ProbeResult(ProbeStatus.AVAILABLE, f"kernels for {report.level} are {report.state}")


@plugin(
    "attention_backend",
    probe=_probe,
    capabilities={
        "returns_lse": True,
        "kinds": [kind.value for kind in KINDS],
        "mla": False,
        "batch_invariant": True,
        BLOCK_SIZES_CAPABILITY: {"multiple_of": BLOCK_SIZES.multiple_of},
    },
)
def create(ctx: PluginContext, options: NoOptions) -> AttentionBackend:
    """Factory of the plugin ``cpu_paged``. Under another platform than the CPU's it has kernels of its own."""
    del options
    platform = ctx.platform
    kernels = platform.kernels if isinstance(platform, CpuPlatform) else KernelProvider(Host())
    # Nobody said yet what the run will ask for where there is no worker.
    config = ctx.config if isinstance(ctx, WorkerContext) else None
    is_fixed = config is None or config.batch_invariant
    return CpuPagedBackend(kernels, parts=0 if is_fixed else 3)
