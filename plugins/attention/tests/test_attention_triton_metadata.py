"""Metadata of the Triton backend: buffers that stay, tails that are zero, and nothing that waits."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
import torch

from hardpoint.interfaces.attention import AttentionKind, CommonAttentionMetadata, GraphSupport
from hardpoint_attention.triton import TritonMetadata, TritonMetadataBuilder
from hardpoint_testing_torch import AttentionProblem, AttentionShape, make_problem

CPU = torch.device("cpu")
MIXED = [(17, 1), (0, 9), (3, 7)]
RANGED = AttentionShape(uses_mm_prefix=True)


def builder(max_rows: int = 8, max_tokens: int = 64) -> TritonMetadataBuilder:
    return TritonMetadataBuilder(max_rows, max_tokens, CPU)


def with_ranges(ranges: tuple[tuple[tuple[int, int], ...], ...], rows: list[tuple[int, int]]) -> AttentionProblem:
    return replace(make_problem(RANGED, rows), mm_ranges=ranges)


def ranges_of(metadata: TritonMetadata) -> list[list[list[int]]]:
    """By row, as a kernel reads them."""
    starts, ranges = metadata.masks.range_starts, metadata.masks.ranges
    assert starts is not None
    assert ranges is not None
    ends = starts.tolist()
    return [ranges[ends[row] : ends[row + 1]].tolist() for row in range(metadata.num_rows)]


def test_it_takes_any_order_and_any_graph() -> None:
    """R5.20, R5.38: no schedule is made, so none can be stale."""
    assert builder().graph_support is GraphSupport.ALWAYS
    assert builder().reorder_threshold is None


def test_a_step_is_passed_on_by_reference() -> None:
    """R5.20."""
    common = make_problem(AttentionShape(), MIXED).common()
    metadata = builder().build(common)
    assert metadata.seq_lens is common.seq_lens
    assert metadata.block_table is common.block_table
    assert metadata.query_start_loc is metadata.key_starts is common.query_start_loc
    assert (metadata.num_rows, metadata.num_tokens, metadata.max_query_len) == (3, 17, 9)
    assert metadata.masks.ranges is None, "without ranges nothing is copied (R5.37)"


def test_only_ranges_with_queries_of_the_step_are_copied() -> None:
    """R5.37, R5.52: positions are absolute, so the second chunk of a prompt needs no others."""
    ranges = (((0, 5), (15, 20)), ((2, 4), (8, 30)), ((0, 3), (1, 2), (6, 6), (10, 12)))
    made = builder().build(with_ranges(ranges, MIXED).common())
    assert ranges_of(made) == [[[15, 20]], [[2, 4], [8, 30]], []]


def test_lengths_that_are_bounds_only_exclude_no_range() -> None:
    common = with_ranges((((0, 5),), (), ()), MIXED).common()
    assert ranges_of(builder().build(replace(common, seq_lens_is_exact=False))) == [[[0, 5]], [], []]


def test_more_ranges_than_tokens_are_an_error() -> None:
    with pytest.raises(ValueError, match="more than 4 multimodal ranges"):
        builder(max_tokens=4).build(with_ranges((((0, 9),) * 5,), [(0, 9)]).common())


def test_more_rows_than_there_is_room_for_are_an_error() -> None:
    with pytest.raises(ValueError, match="3 rows came to a builder made for 2; raise --max-num-seqs"):
        builder(max_rows=2).build(make_problem(AttentionShape(), MIXED).common())


def test_nothing_is_left_of_a_larger_step() -> None:
    """R5.34, P5.1, I5.5: building large then small is building small."""
    used, fresh = builder(), builder()
    large = with_ranges(tuple(((0, 3), (3, 9)) for _ in range(6)), [(2, 8)] * 6)
    small = with_ranges((((0, 4),),), [(0, 5)])
    used.build(large.common())
    one, other = used.build(small.common()), fresh.build(small.common())
    for left, right in ((one.masks.range_starts, other.masks.range_starts), (one.masks.ranges, other.masks.ranges)):
        assert left is not None
        assert right is not None
        assert torch.equal(left, right)
    assert one.masks.ranges is not None
    assert not one.masks.ranges[1:].any(), "the tail is zero"


def test_buffers_stay_where_they_are() -> None:
    """I5.4, R5.38: replays read what was captured."""
    made = builder()
    across = AttentionShape(kind=AttentionKind.ENCODER_DECODER)

    def places(count: int) -> list[int]:
        ranged = made.build(with_ranges((((0, 4),),) * count, [(0, 5)] * count).common())
        crossed = made.build(make_problem(across, [(0, 2)] * count).common())
        shared = replace(make_problem(AttentionShape(), [(9, 1)] * count), num_common_prefix_blocks=2)
        cascaded = made.build(shared.common())
        tensors = [ranged.masks.ranges, ranged.masks.range_starts, crossed.key_starts, cascaded.prefix_starts]
        return [tensor.data_ptr() for tensor in tensors if tensor is not None]

    assert places(5) == places(2) == places(8)
    assert len(places(1)) == 4


def test_keys_of_cross_attention_lie_by_their_own_lengths() -> None:
    problem = make_problem(
        AttentionShape(kind=AttentionKind.ENCODER_DECODER), [(0, 2), (0, 1)], encoder_rows=[(0, 3), (0, 7)]
    )
    made = builder()
    made.build(make_problem(AttentionShape(kind=AttentionKind.ENCODER_DECODER), [(0, 1)] * 4).common())
    metadata = made.build(problem.common())
    assert metadata.key_starts.tolist() == [0, 3, 10, *[0] * 6]
    assert metadata.masks.causal is False


def test_causality_may_differ_by_row() -> None:
    """R5.23."""
    problem = make_problem(AttentionShape(uses_row_causality=True), MIXED)
    masks = builder().build(problem.common()).masks
    assert masks.causal is None
    assert masks.row_causal is not None
    assert masks.row_causal.tolist() == list(problem.row_causality)


@pytest.mark.parametrize(
    ("rows", "blocks", "changes", "prefix"),
    [
        ([(17, 1), (30, 1)], 3, {}, 12),
        ([(17, 1), (30, 1)], 5, {}, 16),
        ([(3, 5), (30, 1)], 2, {}, 0),
        ([(17, 1), (30, 1)], 0, {}, 0),
        ([(17, 1), (30, 1)], 3, {"for_graph": True}, 0),
        ([(17, 1), (30, 1)], 3, {"seq_lens_is_exact": False}, 0),
        ([(17, 1), (30, 1)], 3, {"causal": False}, 0),
    ],
)
def test_a_common_prefix_is_whole_blocks_that_all_rows_have_cached(
    rows: list[tuple[int, int]], blocks: int, changes: dict[str, Any], prefix: int
) -> None:
    """R5.21, R5.35, R5.83."""
    problem = replace(make_problem(AttentionShape(), rows), num_common_prefix_blocks=blocks)
    metadata = builder().build(replace(problem.common(), **changes))
    assert metadata.common_prefix == prefix
    if prefix:
        assert metadata.prefix_starts is not None
        assert metadata.prefix_lens is not None
        assert metadata.prefix_starts.tolist() == [0, problem.num_tokens]
        assert metadata.prefix_lens.tolist() == [prefix]


def test_building_reads_the_host_side_only() -> None:
    """R5.36: device tensors that nobody may touch."""

    class Untouchable(torch.Tensor):
        @classmethod
        def __torch_function__(cls, func: object, types: object, args: object = (), kwargs: object = None) -> object:
            raise AssertionError(f"build called {func}")

    common = replace(with_ranges(((), ((0, 4),), ()), MIXED), num_common_prefix_blocks=1).common()
    hidden = {
        field.name: value.as_subclass(Untouchable)
        for field in fields(CommonAttentionMetadata)
        if isinstance(value := getattr(common, field.name), torch.Tensor)
    }
    builder().build(replace(common, **hidden))  # type: ignore[arg-type]
