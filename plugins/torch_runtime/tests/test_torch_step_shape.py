"""The shape of a step, decided by its sizes alone."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces.attention import GraphSupport
from hardpoint_torch_runtime.forward_context import BatchDescriptor, GraphMode
from hardpoint_torch_runtime.runner.step_shape import AS_IT_IS, AdapterShapes, StepShape, StepShapes, default_sizes

FULL, PIECEWISE = GraphMode.FULL, GraphMode.PIECEWISE


def shapes(support: GraphSupport = GraphSupport.DECODE_ONLY, **fields: Any) -> StepShapes:
    given: dict[str, Any] = {"sizes": (1, 2, 4, 8), "support": support, "max_rows": 6}
    return StepShapes(**(given | fields))


def decide(made: StepShapes, *num_scheduled: int, **fields: Any) -> StepShape:
    return made.decide(np.array(num_scheduled, dtype=np.int32), **fields)


def test_decodes_are_padded_to_the_next_captured_size() -> None:
    """R4.61, R4.68: the key says how many tokens and requests, and that all have equally many."""
    made = shapes()
    assert decide(made, 1) == StepShape(FULL, BatchDescriptor(1, 1, is_uniform=True), 1, 1)
    for rows in (3, 4):
        assert decide(made, *[1] * rows) == StepShape(FULL, BatchDescriptor(4, 4, is_uniform=True), 4, 4)


def test_steps_beyond_rows_or_sizes_run_as_they_are() -> None:
    """Eight rows would be captured, but there are buffers for six."""
    assert decide(shapes(), *[1] * 5) is AS_IT_IS
    assert decide(shapes(max_rows=9), *[1] * 9) is AS_IT_IS
    assert decide(shapes(sizes=()), 1) is AS_IT_IS
    assert decide(shapes()) is AS_IT_IS


@pytest.mark.parametrize("num_scheduled", [(2,), (1, 1, 3), (2, 2)], ids=str)
def test_what_is_no_plain_decode_needs_more_support(num_scheduled: tuple[int, ...]) -> None:
    assert decide(shapes(GraphSupport.NEVER), 1) is AS_IT_IS
    for support in (GraphSupport.DECODE_ONLY, GraphSupport.UNIFORM_BATCH):
        assert decide(shapes(support), *num_scheduled) is AS_IT_IS
    size = next(size for size in (2, 4, 8) if size >= sum(num_scheduled))
    expected = StepShape(FULL, BatchDescriptor(size, min(size, 6)), size, min(size, 6))
    assert decide(shapes(GraphSupport.ALWAYS), *num_scheduled) == expected


def test_rows_with_drafts_are_uniform_where_all_have_as_many() -> None:
    """One token and its draft each: sizes are whole rows, and single tokens are no longer what is captured."""
    made = shapes(GraphSupport.UNIFORM_BATCH, query_len=2)
    assert decide(made, 2, 2, 2) == StepShape(FULL, BatchDescriptor(8, 4, is_uniform=True), 8, 4)
    assert decide(made, 2, 1) is AS_IT_IS
    assert made.uniform_rows == (1, 2, 4)
    assert decide(shapes(GraphSupport.DECODE_ONLY, query_len=2), 2, 2) is AS_IT_IS
    odd = shapes(GraphSupport.UNIFORM_BATCH, query_len=3, sizes=(1, 3, 8, 12))
    assert decide(odd, 3, 3) == StepShape(FULL, BatchDescriptor(12, 4, is_uniform=True), 12, 4)


def test_pieces_know_no_requests() -> None:
    """R4.61: their count is no part of the key, and rows are not padded."""
    made = shapes(is_piecewise=True)
    assert decide(made, 3, 2) == StepShape(PIECEWISE, BatchDescriptor(8, None), 8, None)
    assert decide(made, 1, 1).graph_mode is FULL
    assert decide(made, 9) is AS_IT_IS


def test_each_count_of_adapters_has_a_graph_where_kernels_depend_on_it() -> None:
    """R4.61."""
    for specializes, counts in ((True, (0, 1, 2)), (False, (0, 0, 0))):
        made = shapes(adapters=AdapterShapes(specializes))
        keys = [decide(made, 1, 1, num_adapters=number).descriptor for number in range(3)]
        assert [key.has_adapter for key in keys if key is not None] == [False, True, True]
        assert tuple(key.num_adapters for key in keys if key is not None) == counts


def test_inputs_without_a_buffer_are_never_captured() -> None:
    """R4.65."""
    assert decide(shapes(GraphSupport.ALWAYS, is_piecewise=True), 1, is_plain=False) is AS_IT_IS


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.integers(1, 5), min_size=1, max_size=6),
    st.sampled_from(list(GraphSupport)),
    st.integers(1, 3),
    st.booleans(),
    st.sets(st.integers(1, 20), max_size=5),
)
def test_a_shape_holds_the_step_and_is_one_of_those_listed(
    num_scheduled: list[int], support: GraphSupport, query_len: int, is_piecewise: bool, sizes: set[int]
) -> None:
    made = shapes(support, query_len=query_len, is_piecewise=is_piecewise, sizes=tuple(sorted(sizes)))
    shape = decide(made, *num_scheduled)
    if shape.descriptor is None:
        assert shape is AS_IT_IS
        return
    key = shape.descriptor
    assert key.num_tokens == shape.pad_tokens
    assert key.num_rows == shape.pad_rows
    assert key.num_tokens in sizes
    assert key.num_tokens >= sum(num_scheduled)
    if shape.graph_mode is FULL:
        assert key.num_rows is not None
        assert len(num_scheduled) <= key.num_rows <= 6
    if key.is_uniform:
        assert key.num_tokens == (key.num_rows or 0) * query_len
        assert key.num_rows in made.uniform_rows
        assert set(num_scheduled) == {query_len}


def test_sizes_that_make_no_sense_are_refused() -> None:
    for sizes in ((2, 1), (1, 1), (0, 1)):
        with pytest.raises(ConfigError, match="must be positive and ascending"):
            shapes(sizes=sizes)
    with pytest.raises(ConfigError, match="said to have 0 tokens"):
        shapes(query_len=0)


def test_sizes_by_default() -> None:
    assert default_sizes(20) == (1, 2, 4, 8, 16)
    assert default_sizes(1000)[-2:] == (504, 512)
    assert default_sizes(20, (32, 5, 5)) == (5,)
    assert shapes(sizes=()).largest == 0
