"""Per-step metadata: the batch on the host, and the row groups for every kind of layer in it.

Layers that agree in window and cache layout share one plan, made when the first of them runs.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata, GraphSupport
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint_attention.reference.groups import CachePages, RowGroup, fresh_group, paged_group
from hardpoint_attention.reference.plan import (
    SHORT_QUERY,
    Batch,
    PlanLimits,
    Visibility,
    fresh_row_sets,
    paged_row_sets,
)

__all__ = ["LayerView", "ReferenceMetadata", "ReferenceMetadataBuilder", "Workspace"]

GATHER_BYTES = 2 * 1024 * 1024
"""Scratch gathered at once: small enough to be read back from a core's cache rather than from memory."""


class Workspace:
    """Scratch memory that only grows, shared by the layers of one KV group."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._bytes = torch.empty(0, dtype=torch.uint8, device=device)

    def take(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        """Uninitialized [rows, columns]; valid until the next call."""
        size = rows * columns * dtype.itemsize
        if size > self._bytes.numel():
            self._bytes = torch.empty(size, dtype=torch.uint8, device=self._device)
        return self._bytes[:size].view(dtype).view(rows, columns)


@dataclass(frozen=True, slots=True)
class LayerView:
    """What tells layers apart for planning.

    Attributes:
        window: the layer's own sliding window, which wins over the group's (R5.45).
        num_kv_heads: K.
        pages_per_block: distance between two blocks of the layer's cache in pages of one head (K if its blocks are
            adjacent); 0 for layers that read the step's own keys instead.
        page_bytes: bytes of one head's page.
        tile_queries: query tokens of a long row computed at once.
        biased: masks and distances are needed explicitly.
        cache_only: the step's own keys are not at hand.
    """

    window: int | None
    num_kv_heads: int
    pages_per_block: int
    page_bytes: int
    tile_queries: int
    biased: bool
    cache_only: bool = False


@dataclass(slots=True)
class ReferenceMetadata:
    """One step as all layers of a KV group see it; valid until the next build."""

    batch: Batch
    block_table: torch.Tensor
    causal: bool
    workspace: Workspace
    _plans: dict[LayerView, tuple[RowGroup, ...]] = field(default_factory=dict)

    def groups(self, view: LayerView) -> tuple[RowGroup, ...]:
        """Row groups that together cover all query tokens of the step."""
        plan = self._plans.get(view)
        if plan is None:
            plan = self._plans[view] = tuple(self._plan(view))
        return plan

    def _plan(self, view: LayerView) -> Iterator[RowGroup]:
        batch, device = self.batch, self.block_table.device
        visibility = Visibility(self.causal, view.window)
        rows = np.arange(len(batch.seq_lens))
        # The first chunk of a prompt brings all its keys along: no need to read them back from the cache.
        lengths = batch.query_lens
        is_fresh = (lengths == batch.seq_lens) & (lengths > SHORT_QUERY)
        if view.biased or view.window is not None:
            # A spelled-out mask grows with the square of the length, so longer rows are tiled.
            is_fresh &= lengths <= view.tile_queries
        if view.pages_per_block == 0:
            is_fresh[:] = True
        elif view.cache_only:
            is_fresh[:] = False
        for row_set in fresh_row_sets(batch, rows[is_fresh]):
            yield fresh_group(row_set, visibility, device, biased=view.biased)
        if is_fresh.all():
            return
        limits = PlanLimits(max(1, GATHER_BYTES // (view.page_bytes * view.num_kv_heads)), view.tile_queries)
        cache = CachePages(self.block_table, batch.block_size, view.num_kv_heads, view.pages_per_block)
        for row_set in paged_row_sets(batch, rows[~is_fresh], visibility, limits):
            yield paged_group(row_set, visibility, cache, device, biased=view.biased)


class ReferenceMetadataBuilder(AttentionMetadataBuilder):
    """Takes any batch order. With exact host copies, building reads nothing else and does not wait for the device."""

    graph_support = GraphSupport.NEVER
    reorder_threshold = None

    def __init__(self, spec: AttentionSpec, device: torch.device) -> None:
        self.spec = spec
        self._workspace = Workspace(device)

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> ReferenceMetadata:
        del fast
        num_rows = common.num_rows
        if not isinstance(common.causal, bool):
            raise TypeError("all rows must be causal or none: uses_row_causality is a need that this backend refuses")
        # Planning needs true lengths; where the host has bounds only, this backend waits for the device.
        seq_lens = common.seq_lens_cpu if common.seq_lens_is_exact else common.seq_lens.cpu().numpy()
        batch = Batch(
            starts=common.query_start_loc_cpu[: num_rows + 1].astype(np.int64),
            seq_lens=seq_lens[:num_rows].astype(np.int64),
            block_size=common.block_size,
        )
        return ReferenceMetadata(batch, common.block_table, common.causal, self._workspace)
