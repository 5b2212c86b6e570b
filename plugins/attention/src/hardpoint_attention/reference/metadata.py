"""Per-step metadata: the batch on the host, and the row groups for every kind of layer in it.

Layers that agree in what they see and in cache layout share one plan, made when the first of them runs.
"""

from __future__ import annotations

import enum
from collections.abc import Iterator
from dataclasses import dataclass, field, replace

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata, GraphSupport
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint_attention.cascade import CascadePolicy, CascadeQuestion, decide_cascade, estimate_cascade
from hardpoint_attention.reference.groups import CachePages, RowGroup, Spelling, foreign_group, fresh_group, paged_group
from hardpoint_attention.reference.layer_cache import Workspace
from hardpoint_attention.reference.plan import (
    SHORT_QUERY,
    Batch,
    PlanLimits,
    foreign_row_sets,
    fresh_row_sets,
    paged_row_sets,
)
from hardpoint_attention.reference.visibility import BatchFacts, Visibility

__all__ = ["KeyPart", "LayerView", "ReferenceMetadata", "ReferenceMetadataBuilder"]

GATHER_BYTES = 2 * 1024 * 1024
"""Scratch gathered at once: small enough to be read back from a core's cache rather than from memory."""


class KeyPart(enum.Enum):
    """Which keys a plan is for. Cascade: ``PREFIX`` and ``SUFFIX``. Decode context parallelism: ``CONTEXT``, this
    rank's share of what was cached before the step, and ``STEP``, the step's own tokens alone."""

    WHOLE = enum.auto()
    PREFIX = enum.auto()
    SUFFIX = enum.auto()
    CONTEXT = enum.auto()
    STEP = enum.auto()


@dataclass(frozen=True, slots=True)
class LayerView:
    """What tells layers apart for planning.

    Attributes:
        window: the layer's own sliding window, which wins over the group's (R5.45); likewise ``chunk``.
        num_kv_heads: K.
        pages_per_block: distance between two blocks of the layer's cache in pages of one head (K if its blocks are
            adjacent); 0 for layers that read the step's own keys instead.
        page_bytes: bytes of one head's page.
        tile_queries: query tokens of a long row computed at once.
        spelling: what the layer needs written out.
        cache_only: the step's own keys are not at hand.
        keeps_prompt: the window does not hide the prompt (R-SWA).
        is_cross: keys are another sequence's, all visible.
    """

    window: int | None
    num_kv_heads: int
    pages_per_block: int
    page_bytes: int
    tile_queries: int
    spelling: Spelling
    cache_only: bool = False
    chunk: int | None = None
    keeps_prompt: bool = False
    is_cross: bool = False
    part: KeyPart = KeyPart.WHOLE


@dataclass(slots=True)
class ReferenceMetadata:
    """One step as all layers of a KV group see it; valid until the next build.

    Attributes:
        prefix_blocks: leading blocks that all rows share and have behind them.
        context_lens: int64 [rows], where contexts are dealt out among ranks: how much of each is in this rank's cache.
    """

    batch: Batch
    block_table: torch.Tensor
    facts: BatchFacts
    workspace: Workspace
    policy: CascadePolicy = estimate_cascade
    num_processors: int = 1
    prefix_blocks: int = 0
    context_lens: np.ndarray | None = None
    _plans: dict[LayerView, tuple[RowGroup, ...]] = field(default_factory=dict)
    _verdicts: dict[CascadeQuestion, bool] = field(default_factory=dict)

    def groups(self, view: LayerView) -> tuple[RowGroup, ...]:
        """Row groups that together cover all query tokens of the step."""
        plan = self._plans.get(view)
        if plan is None:
            plan = self._plans[view] = tuple(self._plan(view))
        return plan

    def takes_cascade(self, view: LayerView, num_heads: int, *, uses_alibi: bool) -> bool:
        """Whether a layer is to attend to the common prefix once for all rows."""
        if self.prefix_blocks == 0 or view.is_cross or view.pages_per_block == 0:
            return False
        question = CascadeQuestion(
            prefix_tokens=self.prefix_blocks * self.batch.block_size,
            num_rows=len(self.batch.seq_lens),
            max_query_len=int(self.batch.query_lens.max()),
            num_heads=num_heads,
            num_kv_heads=view.num_kv_heads,
            num_processors=self.num_processors,
            uses_alibi=uses_alibi,
            uses_window=view.window is not None,
            is_local=view.chunk is not None,
            dcp_size=1 if self.context_lens is None else 2,
        )
        if question not in self._verdicts:
            self._verdicts[question] = decide_cascade(question, self.policy).is_accepted
        return self._verdicts[question]

    def _plan(self, view: LayerView) -> Iterator[RowGroup]:
        batch, table = self.batch, self.block_table
        rules = Visibility(True, view.window, view.chunk, self._prompt_lens(view))
        if view.is_cross:
            return self._cross(view)
        if view.part is KeyPart.PREFIX:
            # All queries as one sequence, which is not causal: each of them comes after the whole prefix.
            prefix = np.array([self.prefix_blocks * batch.block_size])
            return self._paged(view, Batch(batch.starts[[0, -1]], prefix, batch.block_size), table[:1])
        if view.part is KeyPart.CONTEXT:
            return self._paged(view, replace(batch, seq_lens=self._context_lens()), table)
        if view.part is KeyPart.STEP:
            batch = replace(batch, seq_lens=batch.query_lens)
        if view.part is KeyPart.SUFFIX:
            rules = replace(rules, key_begin=self.prefix_blocks * batch.block_size)
        return self._causal(view, batch, rules)

    def _causal(self, view: LayerView, batch: Batch, rules: Visibility) -> Iterator[RowGroup]:
        """Rows that may see keys of their own sequence, each class by its rules."""
        facts = self.facts
        if rules.prompt_lens is not None:
            facts = replace(facts, causal=True)
        lengths, device = batch.query_lens, self.block_table.device
        for visibility, rows in facts.classes(rules, len(batch.seq_lens)):
            # The first chunk of a prompt brings all its keys along: no need to read them back from the cache.
            is_fresh = (lengths[rows] == batch.seq_lens[rows]) & (lengths[rows] > SHORT_QUERY)
            if view.spelling.masks or not visibility.is_whole(int(lengths.max(initial=0))):
                # A spelled-out mask grows with the square of the length, so longer rows are tiled.
                is_fresh &= lengths[rows] <= view.tile_queries
            if view.pages_per_block == 0:
                is_fresh[:] = True
            elif view.cache_only:
                is_fresh[:] = False
            for row_set in fresh_row_sets(batch, rows[is_fresh]):
                yield fresh_group(row_set, visibility, device, view.spelling)
            if not is_fresh.all():
                yield from self._paged(view, batch, self.block_table, rows[~is_fresh], visibility)

    def _paged(
        self,
        view: LayerView,
        batch: Batch,
        table: torch.Tensor,
        rows: np.ndarray | None = None,
        visibility: Visibility | None = None,
    ) -> Iterator[RowGroup]:
        """Groups over cached keys; of all rows, and all visible, unless something else is said."""
        rows = np.arange(len(batch.seq_lens)) if rows is None else rows
        visibility = Visibility(causal=False) if visibility is None else visibility
        limits = PlanLimits(max(1, GATHER_BYTES // (view.page_bytes * view.num_kv_heads)), view.tile_queries)
        cache = CachePages(table, batch.block_size, view.num_kv_heads, view.pages_per_block)
        for row_set in paged_row_sets(batch, rows, visibility, limits):
            yield paged_group(row_set, visibility, cache, table.device, view.spelling)

    def _cross(self, view: LayerView) -> Iterator[RowGroup]:
        if view.pages_per_block:
            yield from self._paged(view, self.batch, self.block_table)
            return
        first_keys = np.cumsum(self.batch.seq_lens) - self.batch.seq_lens
        for row_set in foreign_row_sets(self.batch):
            yield foreign_group(row_set, int(first_keys[row_set.rows[0]]), self.block_table.device)

    def _prompt_lens(self, view: LayerView) -> np.ndarray | None:
        if not view.keeps_prompt or view.window is None:
            return None
        if self.facts.prompt_lens is None:
            raise ValueError("layers with keeps_prompt need the metadata's prompt_lens, which this step lacks")
        return self.facts.prompt_lens

    def _context_lens(self) -> np.ndarray:
        if self.context_lens is None:
            raise ValueError("contexts dealt out among ranks need the metadata's dcp_local_seq_lens, which are missing")
        return self.context_lens


class ReferenceMetadataBuilder(AttentionMetadataBuilder):
    """Takes any batch order. With exact host copies, building reads nothing else and does not wait for the device."""

    graph_support = GraphSupport.NEVER
    reorder_threshold = None

    def __init__(self, spec: AttentionSpec, device: torch.device, policy: CascadePolicy = estimate_cascade) -> None:
        self.spec = spec
        self._policy = policy
        self._num_processors = _num_processors(device)
        self._workspace = Workspace(device)

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> ReferenceMetadata:
        del fast
        num_rows = common.num_rows
        # Planning needs true lengths; where the host has bounds only, this backend waits for the device.
        seq_lens = common.seq_lens_cpu if common.seq_lens_is_exact else common.seq_lens.cpu().numpy()
        batch = Batch(
            starts=common.query_start_loc_cpu[: num_rows + 1].astype(np.int64),
            seq_lens=seq_lens[:num_rows].astype(np.int64),
            block_size=common.block_size,
        )
        ranges = common.mm_ranges
        return ReferenceMetadata(
            batch,
            common.block_table,
            BatchFacts(
                causal=_causality(common),
                ranges=ranges if ranges is not None and any(ranges) else None,
                prompt_lens=_host_rows(common.prompt_lens_cpu, common.prompt_lens, num_rows),
            ),
            self._workspace,
            self._policy,
            self._num_processors,
            _prefix_blocks(common, batch),
            _host_rows(common.dcp_local_seq_lens_cpu, common.dcp_local_seq_lens, num_rows),
        )


def _causality(common: CommonAttentionMetadata) -> bool | np.ndarray:
    if isinstance(common.causal, bool):
        return common.causal
    if common.row_causal_cpu is not None:
        return common.row_causal_cpu[: common.num_rows].astype(bool)
    causal: np.ndarray = common.causal[: common.num_rows].cpu().numpy()
    return causal


def _host_rows(on_host: np.ndarray | None, on_device: torch.Tensor | None, num_rows: int) -> np.ndarray | None:
    """int64 [rows], from the device only where the host has none."""
    if on_host is None and on_device is not None:
        on_host = on_device.cpu().numpy()
    return None if on_host is None else on_host[:num_rows].astype(np.int64)


def _prefix_blocks(common: CommonAttentionMetadata, batch: Batch) -> int:
    """Common blocks that every row has behind it: a query sees all of the prefix, or there is nothing to share."""
    if common.num_common_prefix_blocks == 0 or batch.seq_lens.size == 0:
        return 0
    context = int((batch.seq_lens - batch.query_lens).min())
    return min(common.num_common_prefix_blocks, context // batch.block_size)


def _num_processors(device: torch.device) -> int:
    if device.type == "cuda":
        count: int = torch.cuda.get_device_properties(device).multi_processor_count
        return count
    return torch.get_num_threads()
