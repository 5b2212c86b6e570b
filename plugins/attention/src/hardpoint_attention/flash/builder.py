"""Builds a step's records for FlashAttention layers: nothing is read back from the device, nothing allocated anew.

Legend: R rows (padded ones included), T query tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata, GraphSupport
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.interfaces.kv_cache_specs import EncoderOnlyAttentionSpec, FullAttentionSpec
from hardpoint_attention.cascade import CascadePolicy, CascadeQuestion, decide_cascade
from hardpoint_attention.dcp import QuerySplit, offers_fused_draft_update
from hardpoint_attention.flash.buffers import StagedBuffer, store_schedule
from hardpoint_attention.flash.layers import GroupTraits, KnownLayer, LayerView, group_traits
from hardpoint_attention.flash.metadata import CascadeParts, ContextParts, FlashMetadata, RowPart
from hardpoint_attention.flash.scheduling import SchedulePlanner, plans_ahead, schedule_size, split_bound
from hardpoint_torch_runtime.layers.context_shards import ContextShards

__all__ = ["BuilderSettings", "FlashMetadataBuilder"]


@dataclass(frozen=True, slots=True)
class BuilderSettings:
    """What a builder is told once.

    Attributes:
        generation: that serves layers of the group's shape.
        page_tokens: page size of the kernel for heads of 256 entries, None where that does not run.
        max_rows, max_tokens: of any step.
        split_bound, graph_tokens: most splits in captured steps, and the largest of these.
        num_processors: of the device; cascade is weighed by it.
        dcp_interleave: tokens dealt to a rank at a time.
        load_scheduler: gives the package's function for schedules when one is first needed.
    """

    generation: int
    page_tokens: int | None
    max_rows: int
    max_tokens: int
    batch_invariant: bool
    split_bound: int
    graph_tokens: int
    num_processors: int
    dcp_interleave: int
    cascade: CascadePolicy
    load_scheduler: Callable[[], Callable[..., torch.Tensor]]


class FlashMetadataBuilder(AttentionMetadataBuilder):
    """One per KV cache group.

    Attributes:
        updates_for_drafts: whether :meth:`update_for_draft` is offered (R5.90).
        plans_ahead: whether builds that are not fast lay tiles out ahead; known from the first build on.
    """

    reorder_threshold = None

    def __init__(
        self,
        spec: AttentionSpec,
        layer_names: Sequence[str],
        known: Mapping[str, KnownLayer],
        settings: BuilderSettings,
        device: torch.device,
    ) -> None:
        self.spec = spec
        self.settings = settings
        self._names, self._known = tuple(layer_names), known
        self._traits: GroupTraits | None = None
        self._planner: SchedulePlanner | None = None
        self._dcp_size = spec.context_shards if isinstance(spec, FullAttentionSpec) else 1
        self.graph_support = GraphSupport.ALWAYS if settings.generation == 3 else GraphSupport.UNIFORM_BATCH
        self.reorder_threshold = 1 if self._dcp_size > 1 else None
        self.updates_for_drafts = offers_fused_draft_update(self._dcp_size)
        rows = settings.max_rows
        self._schedule = torch.zeros(schedule_size(rows), dtype=torch.int32, device=device)
        self._cu_key_lens = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._suffix_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._context_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._prompt_lens = torch.zeros(rows, dtype=torch.int32, device=device)
        self._cu_suffix_lens = torch.zeros(rows + 1, dtype=torch.int32, device=device)
        self._prefix = StagedBuffer((4,), device)
        self._ranges = StagedBuffer((2, settings.max_tokens), device)

    @property
    def plans_ahead(self) -> bool:
        """See the class."""
        return self._traits is not None and self._planned_view(self._traits) is not None

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> FlashMetadata:
        """Raises ``TypeError`` for causality that differs by row (R5.24), ``ValueError`` for incomplete DCP lengths."""
        if not isinstance(common.causal, bool):
            raise TypeError(
                "causality that differs by row was given, which no FlashAttention kernel takes; declare "
                "uses_row_causality so that another backend is chosen"
            )
        traits = self._learn_layers()
        max_splits = split_bound(
            configured=self.settings.split_bound,
            num_tokens=common.num_tokens,
            graph_tokens=self.settings.graph_tokens,
            for_graph=common.for_graph,
            batch_invariant=self.settings.batch_invariant,
        )
        if self.settings.page_tokens is not None:
            max_splits = 1
        plain = self._plain(common, traits, common.causal)
        context = self._context(common) if self._dcp_size > 1 else None
        cascade = None if context is not None else self._cascade(common, traits, plain)
        view = None if fast else self._planned_view(traits)
        if view is not None and cascade is not None:
            cascade = self._scheduled_cascade(common, cascade, traits, view, max_splits)
        elif view is not None and context is None:
            plain = self._scheduled(common, plain, traits, view, max_splits)
        return FlashMetadata(
            num_rows=common.num_rows,
            num_tokens=common.num_tokens,
            plain=plain,
            slot_mapping=common.slot_mapping,
            causal=common.causal,
            max_splits=max_splits,
            cascade=cascade,
            context=context,
            ranges=self._fill_ranges(common),
            prompt_lens=self._fill_prompts(common),
            scheduled_view=view,
        )

    def update_for_draft(self, metadata: FlashMetadata, common: CommonAttentionMetadata) -> FlashMetadata:
        """Bring captured ``metadata`` up to the next draft step, whose lengths are in the same tensors.

        Raises ``TypeError`` where contexts are dealt out among ranks: a replay would not repeat what the host decides
        about them (R5.90, P5.8).
        """
        if not self.updates_for_drafts:
            raise TypeError(
                f"metadata cannot be reused across draft steps while {self._dcp_size} ranks share contexts; build anew"
            )
        traits, view = self._learn_layers(), metadata.scheduled_view
        plain = self._plain(common, traits, metadata.plain.causal)
        if view is not None and metadata.plain.schedule is not None:
            plain = self._scheduled(common, plain, traits, view, metadata.max_splits)
        return replace(metadata, plain=plain, cascade=None, num_tokens=common.num_tokens, num_rows=common.num_rows)

    def _learn_layers(self) -> GroupTraits:
        """R5.32: layers are looked at when the first step is built; they did not exist before."""
        if self._traits is None or self._traits.num_heads == 0:
            self._traits = group_traits(self._names, self._known, self.settings.generation)
        return self._traits

    def _planned_view(self, traits: GroupTraits) -> LayerView | None:
        """What schedules are made for: the one view that all layers share; None: schedules are off."""
        possible = plans_ahead(traits.generations, fast=False, batch_invariant=self.settings.batch_invariant)
        # Encoders read no pages, so that their calls take no schedule.
        has_pages = not isinstance(self.spec, EncoderOnlyAttentionSpec)
        return traits.only_view if possible and has_pages else None

    def _plain(self, common: CommonAttentionMetadata, traits: GroupTraits, causal: bool) -> RowPart:
        table, max_key_len = common.block_table, common.max_seq_len
        page = self.settings.page_tokens
        wants_sums = traits.is_cross or 2 in (*traits.generations, self.settings.generation)
        if page is not None:
            # R5.60: the kernel walks all columns it is given, in whole pages.
            num_pages = -(-max_key_len // page)
            table, max_key_len = table[:, :num_pages], num_pages * page
        return RowPart(
            cu_query_lens=common.query_start_loc,
            max_query_len=common.max_query_len,
            key_lens=common.seq_lens,
            max_key_len=max_key_len,
            page_table=table,
            causal=causal and not traits.is_cross,
            cu_key_lens=_prefix_sums(common.seq_lens, self._cu_key_lens) if wants_sums else None,
        )

    def _cascade(self, common: CommonAttentionMetadata, traits: GroupTraits, plain: RowPart) -> CascadeParts | None:
        prefix_blocks = self._prefix_blocks(common)
        # Where the host has bounds only, it cannot tell where the shortest context ends.
        if prefix_blocks == 0 or not common.seq_lens_is_exact or traits.num_heads == 0 or not common.causal:
            return None
        prefix_tokens = prefix_blocks * common.block_size
        has_ranges = common.mm_ranges is not None and any(common.mm_ranges)
        question = CascadeQuestion(
            prefix_tokens=prefix_tokens,
            num_rows=common.num_rows,
            max_query_len=common.max_query_len,
            num_heads=traits.num_heads,
            num_kv_heads=self.spec.num_kv_heads,
            num_processors=self.settings.num_processors,
            uses_alibi=traits.uses_alibi,
            uses_window=traits.has_windows,
            is_local=traits.is_local or traits.is_cross or has_ranges,
        )
        if not decide_cascade(question, self.settings.cascade).is_accepted:
            return None
        return self._cascade_parts(common, plain, prefix_blocks, prefix_tokens)

    def _prefix_blocks(self, common: CommonAttentionMetadata) -> int:
        """Common blocks that end before any row's new tokens; none on the path for heads of 256 (R5.61)."""
        if common.num_common_prefix_blocks == 0 or self.settings.page_tokens is not None or common.for_graph:
            return 0
        rows = common.num_rows
        context = common.seq_lens_cpu[:rows] - np.diff(common.query_start_loc_cpu[: rows + 1])
        return min(common.num_common_prefix_blocks, int(context.min()) // common.block_size) if rows else 0

    def _cascade_parts(
        self, common: CommonAttentionMetadata, plain: RowPart, prefix_blocks: int, prefix_tokens: int
    ) -> CascadeParts:
        rows = common.seq_lens.shape[0]
        host = self._prefix.stage()
        host[:] = (0, common.num_tokens, 0, prefix_tokens)
        numbers = self._prefix.upload()
        suffix_lens = torch.sub(common.seq_lens, prefix_tokens, out=self._suffix_lens[:rows])
        # Padded rows have no keys at all, and must not get fewer.
        suffix_lens.clamp_(min=0)
        needs_sums = plain.cu_key_lens is not None
        prefix = RowPart(
            cu_query_lens=numbers[:2],
            max_query_len=common.num_tokens,
            key_lens=numbers[3:],
            max_key_len=prefix_tokens,
            page_table=common.block_table[:1, :prefix_blocks],
            causal=False,
            cu_key_lens=numbers[2:] if needs_sums else None,
        )
        suffix = RowPart(
            cu_query_lens=common.query_start_loc,
            max_query_len=common.max_query_len,
            key_lens=suffix_lens,
            max_key_len=common.max_seq_len - prefix_tokens,
            page_table=common.block_table[:, prefix_blocks:],
            causal=True,
            cu_key_lens=_prefix_sums(suffix_lens, self._cu_suffix_lens) if needs_sums else None,
        )
        return CascadeParts(prefix_tokens, prefix, suffix)

    def _scheduled(
        self, common: CommonAttentionMetadata, part: RowPart, traits: GroupTraits, view: LayerView, num_splits: int
    ) -> RowPart:
        schedule = self._schedule_planner().plan(part, traits, view, common.block_size, num_splits)
        # Steps with a cascade are never captured, so that one buffer will do.
        return replace(part, schedule=store_schedule(schedule, self._schedule) if common.for_graph else schedule)

    def _scheduled_cascade(
        self,
        common: CommonAttentionMetadata,
        parts: CascadeParts,
        traits: GroupTraits,
        view: LayerView,
        num_splits: int,
    ) -> CascadeParts:
        """R5.35: one schedule for all queries over the prefix, one for each row's over the rest."""
        prefix = self._scheduled(common, parts.prefix, traits, view, num_splits)
        suffix = self._scheduled(common, parts.suffix, traits, view, num_splits)
        return replace(parts, prefix=prefix, suffix=suffix)

    def _schedule_planner(self) -> SchedulePlanner:
        if self._planner is None:
            self._planner = SchedulePlanner(
                self.settings.load_scheduler(),
                self.spec.num_kv_heads,
                self.spec.head_size,
                getattr(torch, self.spec.dtype),
            )
        return self._planner

    def _context(self, common: CommonAttentionMetadata) -> ContextParts:
        lengths, lengths_cpu = common.dcp_local_seq_lens, common.dcp_local_seq_lens_cpu
        if lengths is None:
            raise ValueError(
                f"{self._dcp_size} ranks share contexts, but the step does not say how much of each is on this one; "
                "fill dcp_local_seq_lens"
            )
        rows = lengths.shape[0]
        self._context_lens[:rows].copy_(lengths)
        # R5.91: a padded row of a replay would otherwise read what an earlier batch had.
        self._context_lens[rows:].zero_()
        query_lens = np.diff(common.query_start_loc_cpu[: common.num_rows + 1])
        longest = int((common.seq_lens_cpu[: common.num_rows] - query_lens).max(initial=0))
        if lengths_cpu is None or common.for_graph:
            bound = ContextShards(self._dcp_size, self.settings.dcp_interleave).bound(longest)
        else:
            bound = int(lengths_cpu[: common.num_rows].max(initial=0))
        part = RowPart(
            cu_query_lens=common.query_start_loc,
            max_query_len=common.max_query_len,
            key_lens=self._context_lens[:rows],
            max_key_len=max(bound, 1),
            page_table=common.block_table,
            causal=False,
        )
        return ContextParts(part, common.for_graph or longest > 0, _counts(query_lens))

    def _fill_ranges(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        """R5.37: laid out per query token on the host, copied only where the batch has any."""
        if common.mm_ranges is None or not any(common.mm_ranges):
            return None
        bounds = self._ranges.stage()
        bounds[:] = 0
        starts = common.query_start_loc_cpu
        for row, ranges in enumerate(common.mm_ranges):
            first_token, query_len = int(starts[row]), int(starts[row + 1] - starts[row])
            context = int(common.seq_lens_cpu[row]) - query_len
            for begin, end in ranges:
                first, last = max(begin - context, 0), min(end - context, query_len)
                if first < last:
                    bounds[0, first_token + first : first_token + last] = begin
                    bounds[1, first_token + first : first_token + last] = end
        return self._ranges.upload()

    def _fill_prompts(self, common: CommonAttentionMetadata) -> torch.Tensor | None:
        if common.prompt_lens is None:
            return None
        rows = common.prompt_lens.shape[0]
        return self._prompt_lens[:rows].copy_(common.prompt_lens)


def _prefix_sums(lengths: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """int32 [R + 1] at the head of ``buffer``."""
    count = lengths.shape[0]
    torch.cumsum(lengths, 0, dtype=torch.int32, out=buffer[1 : count + 1])
    return buffer[: count + 1]


def _counts(query_lens: np.ndarray) -> QuerySplit | None:
    """Decodes and prefills, where the former are in front."""
    is_prefill = query_lens > 1
    decodes = int(np.argmax(is_prefill)) if is_prefill.any() else len(is_prefill)
    if not is_prefill[decodes:].all():
        return None
    tokens = int(query_lens[:decodes].sum())
    return QuerySplit(decodes, tokens, len(query_lens) - decodes, int(query_lens.sum()) - tokens)
