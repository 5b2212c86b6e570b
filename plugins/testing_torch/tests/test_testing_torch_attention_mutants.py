"""Each capability that the attention rules know has mutants of a correct backend, and each of them fails."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from hardpoint.interfaces.attention import (
    AttentionBackend,
    AttentionImpl,
    AttentionKind,
    AttentionLayerParams,
    AttentionMetadataBuilder,
    AttentionNeed,
    CommonAttentionMetadata,
    GraphSupport,
)
from hardpoint.interfaces.kv_cache import AttentionSpec
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import AttentionBackendSuite, PlainAttention, PlainAttentionBackend, StoredStates

Metadata = CommonAttentionMetadata


class ChunkTooLong(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        chunk = params.chunk_size
        super().__init__(replace(params, chunk_size=None if chunk is None else chunk + 1))


class ChunkOfTheStep(PlainAttention):
    """P5.6: counts chunks from the step's first query on."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        chunk, self.params = self.params.chunk_size, replace(self.params, chunk_size=None)
        seen = super().visible(metadata, row, num_queries, num_keys)
        self.params = replace(self.params, chunk_size=chunk)
        if chunk is not None:
            seen &= torch.arange(num_queries)[:, None] // chunk == torch.arange(num_keys) // chunk
        return seen


class ForgetsThePrompt(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(replace(params, keeps_prompt=False))


class PromptOfTheFirstRow(PlainAttention):
    def near(self, distance: torch.Tensor, keys: torch.Tensor, metadata: Metadata, row: int) -> torch.Tensor:
        return super().near(distance, keys, metadata, 0)


class StaysCausalInRanges(PlainAttention):
    """P5.4: the kernel's own causality is still on under the mask."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        seen = super().visible(metadata, row, num_queries, num_keys)
        return seen.tril(num_keys - num_queries) if metadata.mm_ranges is not None else seen


class KeepsTheWindowInRanges(PlainAttention):
    """P5.4: the kernel's own window is still on under the mask."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        seen = super().visible(metadata, row, num_queries, num_keys)
        if metadata.mm_ranges is not None and self.params.sliding_window is not None:
            seen = seen.triu(num_keys - num_queries - self.params.sliding_window + 1)
        return seen


class RangesOfTheStep(PlainAttention):
    """P5.6: takes the index of a query within its chunk for its position."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        seen = super().visible(replace(metadata, mm_ranges=None), row, num_queries, num_keys)
        queries, keys = torch.arange(num_queries)[:, None], torch.arange(num_keys)
        for begin, end in metadata.mm_ranges[row] if metadata.mm_ranges is not None else ():
            seen |= (begin <= queries) & (queries < end) & (begin <= keys) & (keys < end)
        return seen


class OneRange(PlainAttention):
    """Any range will do for the key."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        if metadata.mm_ranges is not None and metadata.mm_ranges[row]:
            ranges = metadata.mm_ranges[row]
            joined = [[(ranges[0][0], ranges[-1][1])] if index == row else [] for index in range(metadata.num_rows)]
            metadata = replace(metadata, mm_ranges=joined)
        return super().visible(metadata, row, num_queries, num_keys)


class AllRowsAsTheFirst(PlainAttention):
    def is_causal(self, metadata: Metadata, row: int) -> bool:
        return super().is_causal(metadata, 0)


class LooksBackOnly(PlainAttention):
    """R5.44: the window of bidirectional rows stays one-sided."""

    def near(self, distance: torch.Tensor, keys: torch.Tensor, metadata: Metadata, row: int) -> torch.Tensor:
        near = super().near(distance, keys, metadata, row)
        if self.params.sliding_window is None or self.is_causal(metadata, row):
            return near
        queries = len(keys) - len(distance) + torch.arange(len(distance))[:, None]
        return near | (keys > queries)


class CrossesCausally(PlainAttention):
    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        seen = super().visible(metadata, row, num_queries, num_keys)
        is_cross = self.params.kind is AttentionKind.ENCODER_DECODER
        return seen.tril(num_keys - num_queries) if is_cross else seen


class WindowAcross(PlainAttention):
    """Lets a window count from places that queries of cross-attention have not."""

    def visible(self, metadata: Metadata, row: int, num_queries: int, num_keys: int) -> torch.Tensor:
        seen = super().visible(metadata, row, num_queries, num_keys)
        if self.params.kind is AttentionKind.ENCODER_DECODER and self.params.sliding_window is not None:
            distance = torch.arange(num_keys - num_queries, num_keys)[:, None] - torch.arange(num_keys)
            seen &= distance.abs() < self.params.sliding_window
        return seen


class WrongLayout(PlainAttention):
    """P5.2: takes heads and places of a block for one another."""

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        blocks, heads, size, width = cache.shape
        return super().stored(cache.reshape(blocks, size, heads, width).transpose(1, 2), metadata, row)


class ValuesFirst(PlainAttention):
    """P5.2."""

    def read(self, stored: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        keys, values = super().read(stored, value_size)
        return values, keys


class SinksAtTheStart(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        super().__init__(replace(params, sinks=None if params.sinks is None else params.sinks.clone()))


class ScalesAtTheStart(PlainAttention):
    def __init__(self, params: AttentionLayerParams) -> None:
        scale = None if params.key_scale is None else params.key_scale.clone()
        super().__init__(replace(params, key_scale=scale))


class OneScale(PlainAttention):
    """The keys' for both, whatever was stored with."""

    def read(self, stored: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        how = self.stored_as(stored, value_size)
        return replace(how, value_scale=how.key_scale).decode(stored, self.params.head_size)


class ScaleOfTheFirstHead(PlainAttention):
    def read(self, stored: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        how = self.stored_as(stored, value_size)
        first = how if how.key_scale is None else replace(how, key_scale=how.key_scale[:1])
        return first.decode(stored, self.params.head_size)


class SwapsScales(PlainAttention):
    """Those behind the content."""

    def read(self, stored: torch.Tensor, value_size: int) -> tuple[torch.Tensor, torch.Tensor]:
        if stored.dtype is torch.int8:
            stored = torch.cat((stored[..., :-8], stored[..., -4:], stored[..., -8:-4]), dim=-1)
        return super().read(stored, value_size)


class Overflows(PlainAttention):
    """Casts without a bound: what is out of range is NaN."""

    def write_kv(
        self, key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slot_mapping: torch.Tensor
    ) -> None:
        states = torch.cat((key, value), dim=-1).float()
        if kv_cache.dtype.itemsize > 1 or kv_cache.dtype is torch.int8:
            return super().write_kv(key, value, kv_cache, slot_mapping)
        scales = [torch.ones(1) if each is None else each for each in (self.params.key_scale, self.params.value_scale)]
        size = self.params.head_size
        scaled = torch.cat((states[..., :size] / scales[0][:, None], states[..., size:] / scales[1][:, None]), dim=-1)
        real = (slot_mapping >= 0).nonzero().flatten()
        slots, block = slot_mapping[real], kv_cache.shape[2]
        places = kv_cache.view(torch.uint8).transpose(1, 2)
        places[slots // block, slots % block] = scaled[real].to(kv_cache.dtype).view(torch.uint8)
        return None


class StoresTooLittle(PlainAttention):
    def stored_as(self, states: torch.Tensor, value_size: int) -> StoredStates:
        return _Smaller(*_fields(super().stored_as(states, value_size)))


class _Smaller(StoredStates):
    def encode(self, keys: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        if self.dtype.itemsize > 1:
            return super().encode(keys, values)
        return super().encode(keys * 0.97, values * 0.97)


def _fields(stored: StoredStates) -> tuple[Any, ...]:
    return stored.kv_cache_dtype, stored.key_scale, stored.value_scale, stored.value_size


class LeavesSinksOut(PlainAttention):
    """Of the log-sum-exp only."""

    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = super().attend(query, keys, values, visible)
        if self.params.sinks is not None:
            lse = torch.log(torch.exp(lse) - torch.exp(self.params.sinks))
        return output, lse


class BinaryLogarithm(PlainAttention):
    def forward_with_lse(self, *given: Any) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = super().forward_with_lse(*given)
        return output, lse / torch.log(torch.tensor(2.0))


class NothingIsNaN(PlainAttention):
    def attend(
        self, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, visible: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        output, lse = super().attend(query, keys, values, visible)
        return torch.where(lse[..., None] == -torch.inf, torch.nan, output), lse


class ReadsOneBlockAlone(PlainAttention):
    """I5.1: sound only where blocks lie one after another."""

    def stored(self, cache: torch.Tensor, metadata: Any, row: int) -> torch.Tensor:
        table = metadata.block_table.clone()
        table[row] = (table[row, 0] + torch.arange(table.shape[1])).clamp(max=len(cache) - 1)
        return super().stored(cache, replace(metadata, block_table=table), row)


class WritesPaddingRows(PlainAttention):
    """R5.48: spreads what padding holds."""

    def forward(self, query: torch.Tensor, *rest: Any) -> torch.Tensor:
        return super().forward(query + 0 * query.sum(), *rest)


KERNEL_FAULTS: dict[type[PlainAttention], str] = {
    ChunkTooLong: "test_chunked_local",
    WindowAcross: "test_whatever_is_accepted_is_computed",
    ChunkOfTheStep: "test_chunked_local",
    ForgetsThePrompt: "test_a_window_that_keeps_the_prompt",
    PromptOfTheFirstRow: "test_a_window_that_keeps_the_prompt",
    StaysCausalInRanges: "test_multimodal_ranges",
    KeepsTheWindowInRanges: "test_multimodal_ranges",
    RangesOfTheStep: "test_multimodal_ranges",
    OneRange: "test_multimodal_ranges",
    AllRowsAsTheFirst: "test_causality_by_row",
    LooksBackOnly: "test_causality_by_row",
    CrossesCausally: "test_cross_attention_sees_all_encoder_tokens",
    WrongLayout: "test_equals_the_dense_answer",
    ValuesFirst: "test_equals_the_dense_answer",
    SinksAtTheStart: "test_sinks_are_read_at_every_call",
    ScalesAtTheStart: "test_scales_are_read_at_every_call",
    OneScale: "test_quantized_caches",
    ScaleOfTheFirstHead: "test_quantized_caches",
    SwapsScales: "test_quantized_caches",
    Overflows: "test_values_out_of_range_become_the_largest",
    StoresTooLittle: "test_writing_quantized_states",
    LeavesSinksOut: "test_log_sum_exp",
    BinaryLogarithm: "test_prefix_and_suffix_make_the_whole",
    NothingIsNaN: "test_queries_that_see_nothing",
    ReadsOneBlockAlone: "test_block_ids_do_not_matter",
    WritesPaddingRows: "test_padding_does_not_matter",
}


class Entry:
    """Columns of a schedule: the step's queries, the row's tokens, its row of the block table."""

    BEGIN, END, LENGTH, ROW = range(4)


class ScheduleBuilder(AttentionMetadataBuilder):
    """Plans the longest rows first, into buffers of its own that graphs may read again. ``window`` is the group's."""

    graph_support = GraphSupport.DECODE_ONLY
    clears_tail: ClassVar[bool] = True
    keeps_buffers: ClassVar[bool] = True
    reads_device: ClassVar[bool] = False

    def __init__(self, max_rows: int, window: int | None) -> None:
        self.window = window
        self.schedule = torch.zeros(max_rows, 4, dtype=torch.int64)

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> tuple[Any, ...]:
        del fast
        if self.reads_device:
            common.seq_lens.cpu()
        starts, lengths = common.query_start_loc_cpu, common.seq_lens_cpu
        order = np.argsort(-lengths[: common.num_rows], kind="stable")
        rows = [(starts[row], starts[row + 1], lengths[row], row) for row in order]
        schedule = self.schedule if self.keeps_buffers else torch.zeros_like(self.schedule)
        schedule[: len(rows)] = torch.tensor(np.array(rows).reshape(-1, 4))
        if self.clears_tail:
            schedule[len(rows) :] = 0
        return schedule, common, self.window


class ScheduledAttention(PlainAttention):
    """Does what the schedule says, all entries of it."""

    uses_groups_window: ClassVar[bool] = False

    def forward_with_lse(
        self, query: torch.Tensor, kv_cache: torch.Tensor, metadata: Any, output: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        return AttentionImpl.forward_with_lse(self, query, kv_cache, metadata, output)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        output: torch.Tensor,
    ) -> torch.Tensor:
        if metadata is None:
            return output.zero_()
        schedule, common, window = metadata
        if self.uses_groups_window:
            self.params = replace(self.params, sliding_window=window)
        for begin, end, length, row in schedule.tolist():
            if end > begin:
                one = replace(
                    common,
                    num_rows=1,
                    query_start_loc_cpu=np.array([0, end - begin]),
                    seq_lens_cpu=np.array([length]),
                    block_table=common.block_table[row : row + 1],
                )
                step = slice(begin, end)
                super().forward(query[step], key[step], value[step], kv_cache, one, output[step])
        return output


class ScheduledBackend(PlainAttentionBackend):
    returns_lse = False
    known_needs = AttentionBackend.known_needs
    impl: type[PlainAttention] = ScheduledAttention
    builder: type[ScheduleBuilder] = ScheduleBuilder

    def refuse(self, need: AttentionNeed) -> str | None:
        if need.kind is AttentionKind.ENCODER_DECODER:
            return "the schedule takes a row's keys for as many as its queries"
        return super().refuse(need)

    def create_builder(
        self, spec: AttentionSpec, layer_names: Sequence[str], max_rows: int, max_tokens: int, device: torch.device
    ) -> AttentionMetadataBuilder:
        return self.builder(max_rows, getattr(spec, "sliding_window", None))


class LeavesTheTail(ScheduledBackend):
    """P5.1."""

    class builder(ScheduleBuilder):
        clears_tail = False


class Allocates(ScheduledBackend):
    """P5.9."""

    class builder(ScheduleBuilder):
        keeps_buffers = False


class WaitsForTheDevice(ScheduledBackend):
    class builder(ScheduleBuilder):
        reads_device = True


class TakesTheGroupsWindow(ScheduledBackend):
    """P5.10."""

    class impl(ScheduledAttention):
        uses_groups_window = True


STEP_FAULTS: dict[type[ScheduledBackend], str] = {
    LeavesTheTail: "test_a_small_build_after_a_large_one_is_as_if_alone or test_metadata_of_a_graph",
    Allocates: "test_buffers_stay_where_they_are or test_metadata_of_a_graph",
    WaitsForTheDevice: "test_building_never_waits_for_the_device",
    TakesTheGroupsWindow: "test_a_layers_own_window_wins",
}


def failures(backend_class: type[PlainAttentionBackend], rule: str) -> set[str]:
    class Mutated(AttentionBackendSuite):
        @pytest.fixture
        def backend(self) -> AttentionBackend:
            return backend_class()

    return set(run_suite(Mutated, only=rule).failed)


@pytest.mark.slow
@pytest.mark.parametrize("mutant", KERNEL_FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_wrong_kernel_fails(mutant: type[PlainAttention]) -> None:
    """L12.20, with P5.2, P5.4, P5.6 among the faults."""

    class Mutated(PlainAttentionBackend):
        impl = mutant

    assert KERNEL_FAULTS[mutant] in failures(Mutated, KERNEL_FAULTS[mutant])


@pytest.mark.slow
@pytest.mark.parametrize("mutant", STEP_FAULTS, ids=lambda mutant: mutant.__name__)
def test_wrong_metadata_fails(mutant: type[ScheduledBackend]) -> None:
    """P5.1, P5.9, P5.10, R5.36: each of the rules that are to find the fault does."""
    assert failures(mutant, STEP_FAULTS[mutant]) >= {
        rule if not rule.endswith("graph") else "test_metadata_of_a_graph_follows_the_step"
        for rule in STEP_FAULTS[mutant].split(" or ")
    }


@pytest.mark.slow
def test_a_sound_schedule_passes() -> None:
    """What the mutants of metadata are made of keeps every rule, those for graphs included."""

    class Sound(AttentionBackendSuite):
        @pytest.fixture
        def backend(self) -> AttentionBackend:
            return ScheduledBackend()

    outcome = run_suite(Sound)
    assert not outcome.failed, outcome.failed
    assert {"test_metadata_of_a_graph_follows_the_step", "test_buffers_stay_where_they_are"} <= outcome.passed
