"""What FlashAttention's metadata builder makes of a step, and what it never does."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch

from flash_cases import FlashCase
from flash_double import FlashDouble, Recorded
from hardpoint.interfaces.attention import GraphSupport
from hardpoint.interfaces.kv_cache_specs import EncoderOnlyAttentionSpec, FullAttentionSpec
from hardpoint_attention.flash import FlashOptions
from hardpoint_testing_torch import AttentionShape, FakeGraphBackend
from hardpoint_testing_torch.step_buffers import HostBlind

DECODES = [(9, 1), (30, 1), (4, 1), (12, 1), (7, 1), (1, 1), (2, 1), (60, 1)]
SHARED = [(300 + row, 1) for row in range(8)]
"""Eight rows whose contexts begin with the same 18 blocks of 16 tokens, where told so."""
HEADS_OF_256 = AttentionShape(dtype=torch.bfloat16, block_size=128, head_size=256, num_heads=2, num_kv_heads=1)


@pytest.fixture
def double() -> Iterator[FlashDouble]:
    with FlashDouble().installed() as installed:
        yield installed


def schedules(double: FlashDouble) -> list[Recorded]:
    return [call for call in double.calls if call.function == "get_scheduler_metadata"]


def test_the_batch_is_passed_on_as_it_is() -> None:
    """R5.20: counts without padding, and the common tensors themselves."""
    case = FlashCase.create(4)
    common = case.common([(9, 1), (0, 5)])
    metadata = case.builder.build(common)
    assert (metadata.num_rows, metadata.num_tokens) == (2, 6)
    part = metadata.plain
    assert (part.max_query_len, part.max_key_len, part.causal) == (5, 10, True)
    assert part.cu_query_lens is common.query_start_loc
    assert part.key_lens is common.seq_lens
    assert part.page_table is common.block_table
    assert metadata.slot_mapping is common.slot_mapping
    assert (metadata.cascade, metadata.context, metadata.ranges, metadata.prompt_lens) == (None,) * 4


def test_prefix_sums_of_keys_where_a_generation_wants_them() -> None:
    """R5.20: sums on the device, in a buffer that stays."""
    case = FlashCase.create(2)
    first = case.builder.build(case.common([(9, 1), (0, 5)])).plain.cu_key_lens
    second = case.builder.build(case.common([(3, 2)])).plain.cu_key_lens
    assert first is not None
    assert second is not None
    assert second.tolist() == [0, 5]
    assert first.data_ptr() == second.data_ptr()
    assert FlashCase.create(4).builder.build(case.common([(9, 1)])).plain.cu_key_lens is None


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("fast", [False, True])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_schedules_of_generation_3_alone(
    double: FlashDouble, generation: int, fast: bool, batch_invariant: bool
) -> None:
    """R5.31."""
    if generation == 2 and batch_invariant:
        pytest.skip("generation 2 refuses batch invariance")
    case = FlashCase.create(generation, batch_invariant=batch_invariant)
    metadata = case.builder.build(case.common(DECODES), fast=fast)
    is_planned = generation == 3 and not fast and not batch_invariant
    assert (metadata.plain.schedule is not None) is is_planned
    assert len(schedules(double)) == is_planned


def test_what_a_schedule_is_asked_for(double: FlashDouble) -> None:
    """R5.32, R5.35: the one window of all layers is adopted."""
    case = FlashCase.create(3, windows=[7, 7])
    common = case.common([(9, 1), (0, 5)])
    case.builder.build(common)
    (call,) = schedules(double)
    asked = {name: call[name] for name in ("batch_size", "max_seqlen_q", "max_seqlen_k", "num_heads_q", "num_heads_kv")}
    assert asked == {"batch_size": 2, "max_seqlen_q": 5, "max_seqlen_k": 10, "num_heads_q": 6, "num_heads_kv": 2}
    assert (call["window_size"], call["causal"], call["page_size"], call["headdim"]) == ((6, 0), True, 16, 16)
    assert call["cache_seqlens"] is common.seq_lens


def test_layers_of_different_windows_have_no_schedule_ever(double: FlashDouble) -> None:
    """R5.32: layers are looked at in the first build, since builders are made before them; then it is settled."""
    case = FlashCase.create(3, windows=[None, 7])
    assert not case.builder.plans_ahead
    for _ in range(2):
        assert case.builder.build(case.common(DECODES)).plain.schedule is None
    assert not case.builder.plans_ahead
    assert schedules(double) == []


def test_a_layer_with_another_window_gets_no_schedule(double: FlashDouble) -> None:
    """R5.32, R5.45: one that came after the first build, which settled for another window."""
    case = FlashCase.create(3)
    problem = case.problem(DECODES)
    case.run(problem)
    assert double.last["scheduler_metadata"] is not None
    late = case.backend.create_impl(replace(problem.params("late"), sliding_window=3))
    cache, output = problem.kv_cache(), problem.empty_output()
    metadata = case.builder.build(problem.common())
    late.forward(problem.query, problem.key, problem.value, cache, metadata, output)
    assert double.last["window_size"] == (2, 0)
    assert double.last["scheduler_metadata"] is None


def test_chunks_are_part_of_a_schedule(double: FlashDouble) -> None:
    """R5.32: the one chunk size of all layers is adopted too."""
    case = FlashCase.create(3)
    problem = case.problem([(1, 1)])
    chunked = replace(problem.params("layer.0"), chunk_size=8)
    case.backend.create_impl(chunked)
    case.builder.build(case.common(DECODES))
    assert [call["attention_chunk"] for call in schedules(double)] == [8]


def test_encoders_have_no_schedule(double: FlashDouble) -> None:
    """R5.46: they read no pages."""
    spec = EncoderOnlyAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="bfloat16")
    case = FlashCase.create(3, spec=spec)
    assert case.builder.build(case.common([(0, 9)], causal=False)).plain.schedule is None
    assert schedules(double) == []


def test_layers_may_come_after_the_builder(double: FlashDouble) -> None:
    """R5.32."""
    case = FlashCase.create(3)
    builder = case.backend.create_builder(case.problem([(1, 1)]).spec(), ["late"], 16, 64, torch.device("cpu"))
    case.backend.create_impl(replace(case.problem([(1, 1)]).params("late"), sliding_window=3))
    builder.build(case.common(DECODES))
    (call,) = schedules(double)
    assert call["window_size"] == (2, 0)


def test_a_smaller_captured_step_leaves_no_stale_schedule(double: FlashDouble, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.34, P5.1: eight rows, then three; a kernel that reads the buffer to its end finds zeros."""
    case = FlashCase.create(3)

    def eight_then_three() -> torch.Tensor:
        large = case.builder.build(case.common(DECODES, for_graph=True)).plain.schedule
        small_problem = case.problem(DECODES[:3])
        output = case.run(small_problem, for_graph=True)
        schedule = double.last["scheduler_metadata"]
        assert large is not None
        assert schedule.data_ptr() == large.data_ptr()
        assert schedule.shape == (4,)
        return output

    assert eight_then_three().abs().max() < 100
    # The same without the zeros, to know that the double would tell.
    monkeypatch.setattr(torch.Tensor, "zero_", lambda tensor: tensor)
    assert eight_then_three().abs().max() > 100


def test_without_a_graph_the_schedule_is_the_packages_own(double: FlashDouble) -> None:
    """R5.34."""
    case = FlashCase.create(3)
    schedule = case.builder.build(case.common(DECODES)).plain.schedule
    captured = case.builder.build(case.common(DECODES, for_graph=True)).plain.schedule
    assert schedule is not None
    assert captured is not None
    assert schedule.data_ptr() != captured.data_ptr()


@pytest.mark.parametrize(
    ("changes", "options", "expected"),
    [
        ({}, {}, 0),
        ({"for_graph": True}, {}, 32),
        ({"for_graph": True}, {"max_splits": 8}, 8),
        ({"for_graph": True}, {"max_graph_tokens": 7}, 0),
    ],
)
def test_splits(double: FlashDouble, changes: dict[str, Any], options: dict[str, Any], expected: int) -> None:
    """R5.33: what is configured bounds captured steps up to the largest, and the kernel's call gets it."""
    case = FlashCase.create(3, options=FlashOptions(**options))
    assert case.builder.build(case.common(DECODES, **changes)).max_splits == expected
    case.run(case.problem(DECODES), **changes)
    assert double.last["num_splits"] == expected


def test_splits_in_batch_invariant_mode(double: FlashDouble) -> None:
    """R5.33: always one."""
    case = FlashCase.create(3, batch_invariant=True)
    assert case.builder.build(case.common(DECODES)).max_splits == 1


def test_a_shared_prefix_takes_two_parts_and_two_schedules(double: FlashDouble) -> None:
    """R5.21, R5.35: the prefix as one sequence of all queries, not causal; each row's rest, causal."""
    case = FlashCase.create(3, num_processors=1)
    common = case.common(SHARED, num_common_prefix_blocks=18)
    metadata = case.builder.build(common)
    parts = metadata.cascade
    assert parts is not None
    assert parts.prefix_tokens == 288
    prefix, suffix = parts.prefix, parts.suffix
    assert (prefix.cu_query_lens.tolist(), prefix.key_lens.tolist()) == ([0, 8], [288])
    assert (prefix.max_query_len, prefix.max_key_len, prefix.causal) == (8, 288, False)
    assert prefix.page_table.tolist() == common.block_table[:1, :18].tolist()
    assert suffix.key_lens.tolist() == [length + 1 - 288 for length, _ in SHARED]
    assert (suffix.max_query_len, suffix.max_key_len, suffix.causal) == (1, 20, True)
    assert suffix.page_table.data_ptr() == common.block_table[:, 18:].data_ptr()
    first, second = schedules(double)
    assert [(call["batch_size"], call["causal"]) for call in (first, second)] == [(1, False), (8, True)]
    assert prefix.schedule is not None
    assert suffix.schedule is not None
    assert metadata.plain.schedule is None


@pytest.mark.parametrize(
    ("rows", "blocks", "windows", "reason"),
    [
        (SHARED[:7], 18, [None], "fewer than eight rows"),
        (SHARED, 15, [None], "240 tokens"),
        (SHARED, 18, [None, 7], "a layer has a window"),
        (SHARED, 0, [None], "nothing in common"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_when_a_prefix_is_not_attended_to_apart(
    rows: list[tuple[int, int]], blocks: int, windows: list[int | None], reason: str
) -> None:
    """R5.35, R5.80."""
    case = FlashCase.create(4, windows=windows)
    assert case.builder.build(case.common(rows, num_common_prefix_blocks=blocks)).cascade is None, reason


def test_a_prefix_ends_before_the_new_tokens_of_any_row() -> None:
    """R5.83: whole blocks of the shortest context, also where more blocks are common."""
    case = FlashCase.create(4, options=FlashOptions(cascade="always"))
    rows = [(35, 3), *[(70, 1)] * 7]
    parts = case.builder.build(case.common(rows, num_common_prefix_blocks=4)).cascade
    assert parts is not None
    assert parts.prefix_tokens == 32


def test_bounds_of_lengths_and_captured_steps_have_no_cascade() -> None:
    """R5.36: where the host does not know the lengths it does not decide by them."""
    case = FlashCase.create(4, options=FlashOptions(cascade="always"))
    for changes in ({"seq_lens_is_exact": False}, {"for_graph": True}):
        common = case.common(SHARED, num_common_prefix_blocks=18, **changes)
        assert case.builder.build(common).cascade is None


def dealt_out(ranks: int = 2) -> FullAttentionSpec:
    return FullAttentionSpec(block_size=16, num_kv_heads=2, head_size=16, dtype="bfloat16", context_shards=ranks)


def test_dealt_out_contexts_come_before_a_shared_prefix() -> None:
    """R5.22, R5.35."""
    case = FlashCase.create(4, spec=dealt_out(), options=FlashOptions(cascade="always"))
    local = np.array([150] * 8, dtype=np.int32)
    common = case.common(SHARED, num_common_prefix_blocks=18, dcp_local_seq_lens=torch.from_numpy(local))
    metadata = case.builder.build(common)
    assert metadata.cascade is None
    context = metadata.context
    assert context is not None
    assert context.has_context
    assert context.context.key_lens.tolist() == local.tolist()
    # R5.91: ceil(307 / 2), no rank having more of the longest context.
    assert (context.context.max_key_len, context.context.causal) == (154, False)
    assert context.counts is not None
    assert (context.counts.num_decodes, context.counts.num_decode_tokens, context.counts.num_prefills) == (8, 8, 0)
    assert case.builder.reorder_threshold == 1


def test_host_copies_narrow_the_bound_of_contexts() -> None:
    """R5.91."""
    case = FlashCase.create(4, spec=dealt_out())
    local = np.array([5, 2], dtype=np.int32)
    given = {"dcp_local_seq_lens": torch.from_numpy(local), "dcp_local_seq_lens_cpu": local}
    context = case.builder.build(case.common([(9, 1), (5, 1)], **given)).context
    assert context is not None
    assert context.context.max_key_len == 5


def test_a_smaller_batch_of_dealt_out_contexts_leaves_zeros() -> None:
    """R5.91, P5.1: rows that a replay has beside the batch's own read no context."""
    case = FlashCase.create(4, spec=dealt_out())
    for rows in (DECODES, DECODES[:3]):
        local = torch.tensor([length // 2 for length, _ in rows], dtype=torch.int32)
        context = case.builder.build(case.common(rows, dcp_local_seq_lens=local)).context
        assert context is not None
        buffer = context.context.key_lens.untyped_storage()
    whole = torch.empty(0, dtype=torch.int32).set_(buffer)
    assert whole.tolist() == [4, 15, 2, *[0] * 13]


def test_first_chunks_alone_have_no_context() -> None:
    """R5.90: a decision of the host, which is why captured steps never leave the context out."""
    case = FlashCase.create(4, spec=dealt_out())
    none = {"dcp_local_seq_lens": torch.zeros(1, dtype=torch.int32)}
    first = case.builder.build(case.common([(0, 9)], **none)).context
    captured = case.builder.build(case.common([(0, 1)], for_graph=True, **none)).context
    assert first is not None
    assert captured is not None
    assert not first.has_context
    assert captured.has_context


def test_lengths_of_dealt_out_contexts_are_needed() -> None:
    case = FlashCase.create(4, spec=dealt_out())
    with pytest.raises(ValueError, match="fill dcp_local_seq_lens"):
        case.builder.build(case.common([(9, 1)]))


@pytest.mark.parametrize("ranks", [1, 2])
def test_draft_steps_reuse_metadata_unless_contexts_are_dealt_out(ranks: int) -> None:
    """R5.90, P5.8."""
    case = FlashCase.create(4, spec=dealt_out(ranks))
    given = {"dcp_local_seq_lens": torch.zeros(2, dtype=torch.int32)} if ranks > 1 else {}
    metadata = case.builder.build(case.common([(9, 1), (5, 1)], **given))
    longer = case.common([(10, 1), (6, 1)], **given)
    assert case.builder.updates_for_drafts is (ranks == 1)
    if ranks == 1:
        updated = case.builder.update_for_draft(metadata, longer)
        assert updated.plain == case.builder.build(longer).plain
    else:
        with pytest.raises(TypeError, match="2 ranks share contexts"):
            case.builder.update_for_draft(metadata, longer)


def test_draft_steps_of_generation_3_get_a_new_schedule(double: FlashDouble) -> None:
    """R5.90, R5.34: in the buffer that the captured kernels read."""
    case = FlashCase.create(3)
    metadata = case.builder.build(case.common(DECODES, for_graph=True))
    updated = case.builder.update_for_draft(metadata, case.common(DECODES, for_graph=True))
    assert metadata.plain.schedule is not None
    assert updated.plain.schedule is not None
    assert updated.plain.schedule.data_ptr() == metadata.plain.schedule.data_ptr()


def test_causality_by_row_is_not_taken() -> None:
    """R5.24."""
    case = FlashCase.create(4)
    with pytest.raises(TypeError, match="uses_row_causality"):
        case.builder.build(case.common([(9, 1)], causal=torch.tensor([True])))


def test_ranges_are_laid_out_by_query_token() -> None:
    """R5.37: absolute positions, cut to the step's queries; nothing where no row has any."""
    case = FlashCase.create(4, max_tokens=16)
    rows = [(4, 4), (0, 3), (2, 2)]
    ranges = [[(1, 3), (5, 7)], [], [(0, 9)]]
    built = case.builder.build(case.common(rows, mm_ranges=ranges)).ranges
    assert built is not None
    assert built[0].tolist() == [0, 5, 5, 0, 0, 0, 0, 0, 0, *[0] * 7]
    assert built[1].tolist() == [0, 7, 7, 0, 0, 0, 0, 9, 9, *[0] * 7]
    before = built.clone()
    no_ranges: list[dict[str, Any]] = [{"mm_ranges": None}, {"mm_ranges": [[], [], []]}]
    for nothing in no_ranges:
        assert case.builder.build(case.common(rows, **nothing)).ranges is None
    assert torch.equal(built, before), "copied although there was nothing to copy"


def test_ranges_of_a_smaller_step_leave_nothing_behind() -> None:
    """R5.37, I5.5."""
    case = FlashCase.create(4, max_tokens=16)
    large = case.builder.build(case.common([(0, 9)], mm_ranges=[[(0, 9)]])).ranges
    small = case.builder.build(case.common([(0, 3)], mm_ranges=[[(1, 2)]])).ranges
    assert large is not None
    assert small is not None
    assert small.data_ptr() == large.data_ptr()
    assert small.tolist() == [[0, 1, 0, *[0] * 13], [0, 2, 0, *[0] * 13]]


def test_prompt_lengths_get_a_buffer_of_their_own() -> None:
    """R5.37, R5.38."""
    case = FlashCase.create(4)
    found = []
    for lengths in ([3, 4], [7]):
        common = case.common([(9, 1)] * len(lengths), prompt_lens=torch.tensor(lengths, dtype=torch.int32))
        built = case.builder.build(common).prompt_lens
        assert built is not None
        assert built.tolist() == lengths
        found.append(built.data_ptr())
    assert found[0] == found[1]


@pytest.mark.parametrize(("context", "pages"), [(0, 1), (127, 1), (128, 2), (300, 3)])
def test_heads_of_256_read_whole_pages(context: int, pages: int) -> None:
    """R5.60: ceil(keys / page) columns, keys rounded up, one split."""
    case = FlashCase.create(4, HEADS_OF_256)
    common = case.common([(context, 1), (0, 1)], for_graph=True)
    metadata = case.builder.build(common)
    part = metadata.plain
    assert part.page_table.shape == (2, pages)
    assert part.page_table.data_ptr() == common.block_table.data_ptr()
    assert part.max_key_len == pages * 128
    assert metadata.max_splits == 1


def test_heads_of_256_have_no_cascade() -> None:
    """R5.61: a prefix need not end with a page."""
    case = FlashCase.create(4, HEADS_OF_256, options=FlashOptions(cascade="always"))
    assert case.builder.build(case.common([(400, 1)] * 8, num_common_prefix_blocks=3)).cascade is None


STEPS: dict[str, dict[str, Any]] = {
    "plain": {},
    "captured": {"for_graph": True},
    "shared prefix": {"num_common_prefix_blocks": 18},
    "ranges": {"mm_ranges": [[(0, 5)], *[[]] * 7]},
    "prompts": {"prompt_lens": torch.full((8,), 3, dtype=torch.int32)},
}


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("step", STEPS)
def test_building_reads_nothing_back(generation: int, step: str) -> None:
    """R5.36: device tensors that raise where the host would wait for them."""
    options = FlashOptions(cascade="always")
    case = FlashCase.create(generation, AttentionShape(dtype=torch.bfloat16, block_size=16), options=options)
    common = case.common(SHARED, **STEPS[step])
    given = {each.name: getattr(common, each.name) for each in fields(common)}
    blind = {name: HostBlind.of(value) for name, value in given.items() if isinstance(value, torch.Tensor)}
    case.builder.build(replace(common, **blind), fast=True)  # type: ignore[arg-type]


@pytest.mark.slow
@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("step", STEPS)
def test_building_allocates_nothing(generation: int, step: str) -> None:
    """R5.38, I5.4, P5.9: in a capture that forbids new memory. Schedules are the package's and left out."""
    options = FlashOptions(cascade="always")
    case = FlashCase.create(generation, AttentionShape(dtype=torch.bfloat16, block_size=16), options=options)
    common = case.common(SHARED, **STEPS[step])
    assert (case.builder.build(common, fast=True).cascade is not None) is (step == "shared prefix")
    graphs = FakeGraphBackend(forbid_allocation=True)
    captured = graphs.capture(lambda: case.builder.build(common, fast=True), [common.seq_lens], None)
    assert captured.allocated_bytes == 0


@pytest.mark.slow
def test_building_dealt_out_contexts_allocates_nothing() -> None:
    """R5.38."""
    case = FlashCase.create(4, spec=dealt_out())
    common = case.common(DECODES, dcp_local_seq_lens=torch.full((8,), 3, dtype=torch.int32), for_graph=True)
    FakeGraphBackend(forbid_allocation=True).capture(lambda: case.builder.build(common), [common.seq_lens], None)


@pytest.mark.parametrize("generation", [2, 3, 4])
@pytest.mark.parametrize("step", STEPS)
def test_a_small_step_after_a_large_one_is_as_on_a_new_builder(double: FlashDouble, generation: int, step: str) -> None:
    """I5.5, R5.38: building is a function of the step and of buffers that forget."""
    shape = AttentionShape(dtype=torch.bfloat16, block_size=16)
    used, fresh = (FlashCase.create(generation, shape, options=FlashOptions(cascade="always")) for _ in range(2))
    used.builder.build(used.common([(500, 9)] * 16, mm_ranges=[[(0, 500)]] * 16))
    common = used.common(SHARED, **STEPS[step])
    assert_same(used.builder.build(common), fresh.builder.build(common))


def assert_same(left: Any, right: Any, path: str = "metadata") -> None:
    """Equal records, with equal contents of tensors, those behind a view included."""
    assert type(left) is type(right), path
    if isinstance(left, torch.Tensor):
        assert torch.equal(left, right), path
    elif is_dataclass(left):
        for field in fields(left):
            assert_same(getattr(left, field.name), getattr(right, field.name), f"{path}.{field.name}")
    else:
        assert left == right, path


def test_what_graphs_may_hold() -> None:
    """R5.31: generation 3 lays out any batch; the others' decodes differ in kind from longer queries."""
    support = {generation: FlashCase.create(generation).builder.graph_support for generation in (2, 3, 4)}
    assert support == {2: GraphSupport.UNIFORM_BATCH, 3: GraphSupport.ALWAYS, 4: GraphSupport.UNIFORM_BATCH}
