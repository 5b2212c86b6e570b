"""Problems, what caches make of them, and their answers: held against plain loops."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_testing_torch import (
    AttentionProblem,
    AttentionShape,
    HostBlind,
    StepBuffers,
    StoredStates,
    dense_attention,
    make_problem,
    visible_keys,
)

KINDS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"sliding_window": 4},
    "chunks": {"chunk_size": 5},
    "prompt": {"sliding_window": 3, "keeps_prompt": True},
    "ranges": {"uses_mm_prefix": True, "sliding_window": 3},
    "ranges in chunks": {"uses_mm_prefix": True, "chunk_size": 4},
    "by row": {"uses_row_causality": True, "sliding_window": 4},
    "bidirectional": {"causal": False, "sliding_window": 4},
}
STORED = ("float32", "bfloat16", "fp8", "fp8_e5m2", "int8_per_token_head")


def sees(problem: AttentionProblem, row: int, query: int, key: int) -> bool:
    """The words of the interface, for one pair of positions."""
    shape, is_causal = problem.shape, problem.row_causality[row]
    ranges = problem.mm_ranges[row] if problem.mm_ranges is not None else ()
    if any(begin <= query < end and begin <= key < end for begin, end in ranges):
        return True
    if is_causal and key > query:
        return False
    distance = query - key if is_causal else abs(query - key)
    if shape.keeps_prompt and problem.prompt_lens is not None:
        assert shape.sliding_window is not None
        return key < problem.prompt_lens[row] or distance < shape.sliding_window
    if shape.sliding_window is not None and distance >= shape.sliding_window:
        return False
    return shape.chunk_size is None or query // shape.chunk_size == key // shape.chunk_size


@settings(max_examples=25, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=4),
)
def test_visible_keys_are_those_of_the_interface(kind: str, rows: list[tuple[int, int]]) -> None:
    """R5.56, R5.50, R5.52, R5.55: whole matrices against one pair at a time, over ranges, windows and contexts."""
    problem = make_problem(AttentionShape(num_heads=1, num_kv_heads=1, head_size=8, **KINDS[kind]), rows)
    for row, (context, length) in enumerate(rows):
        expected = [
            [sees(problem, row, query, key) for key in range(context + length)]
            for query in range(context, context + length)
        ]
        assert visible_keys(problem, row).tolist() == expected


def test_ranges_reach_beyond_the_step_on_both_sides() -> None:
    """R5.52: what a chunk in the middle of a range sees."""
    problem = make_problem(AttentionShape(uses_mm_prefix=True), [(9, 6), (0, 8)])
    assert problem.mm_ranges is not None
    (begin, end), *_, (_, last) = problem.mm_ranges[0]
    assert begin < 9 < end
    assert last > 15


@pytest.mark.parametrize("name", STORED)
def test_stored_states_are_as_near_as_their_dtype_allows(name: str) -> None:
    has_scales = name.startswith("fp8")
    scales = (torch.tensor([0.05]), torch.tensor([0.02, 0.5])) if has_scales else (None, None)
    stored = StoredStates(name, *scales)
    keys, values = torch.randn(2, 7, 2, 16, generator=torch.Generator().manual_seed(0)).unbind()
    states = stored.encode(keys, values)
    assert states.shape == (7, 2, stored.width(16))
    assert states.dtype is stored.dtype
    for found, real, scale in zip(
        stored.decode(states, 16), (keys, values), (stored.key_scale, stored.value_scale), strict=True
    ):
        error = (found - real).abs()
        assert bool((error <= stored.largest_error(real, scale)).all())
        assert name == "float32" or float(error.max()) > 0, "nothing was lost, so nothing was stored in fewer bits"


@pytest.mark.parametrize("name", ["fp8", "fp8_e5m2"])
def test_what_is_out_of_range_becomes_the_largest(name: str) -> None:
    keys = torch.tensor([[[1e9, -1e9, 0.0, 1.0]]])
    found, _ = StoredStates(name).round_trip(keys, keys)
    largest = torch.finfo(StoredStates(name).dtype).max
    assert found.flatten().tolist() == [largest, -largest, 0.0, 1.0]


def test_scales_of_heads_and_tokens_lie_behind_the_content() -> None:
    keys, values = torch.tensor([[[1.0, -2.0], [0.0, 0.0]]]), torch.tensor([[[4.0, 0.0], [0.5, 0.25]]])
    states = StoredStates("int8_per_token_head").encode(keys, values)
    assert states[..., :4].tolist() == [[[64, -127, 127, 0], [0, 0, 127, 64]]]
    scales = states[..., 4:].contiguous().view(torch.float32)
    torch.testing.assert_close(scales, torch.tensor([[[2.0, 4.0], [0.0, 0.5]]]) / 127)


@pytest.mark.parametrize("name", STORED)
def test_a_cache_has_the_size_that_its_spec_says(name: str) -> None:
    problem = make_problem(AttentionShape(kv_cache_dtype=name), [(5, 2), (0, 9)])
    cache = problem.kv_cache()
    assert cache[0].numel() * cache.element_size() == problem.spec().page_size_bytes
    keys, values = problem.stored.decode(cache.view(torch.uint8).view(cache.dtype)[0].transpose(0, 1), 16)
    assert bool(keys.isnan().all()), "what nobody owns cannot be read by chance"
    assert bool(values.isnan().all())


def test_rows_taken_alone_or_in_another_order_have_the_same_answers() -> None:
    shape = AttentionShape(uses_mm_prefix=True, sliding_window=5, keeps_prompt=True, uses_sinks=True)
    problem = make_problem(shape, [(5, 3), (0, 6), (9, 1)])
    parts = dense_attention(problem)[0].split([3, 6, 1])
    torch.testing.assert_close(dense_attention(problem.picked((2, 0, 1)))[0], torch.cat([parts[i] for i in (2, 0, 1)]))
    torch.testing.assert_close(dense_attention(problem.alone(1))[0], parts[1])
    torch.testing.assert_close(dense_attention(problem.padded(4, num_rows=2))[0], torch.cat(parts))


def test_cross_attention_sees_what_came_before_and_what_comes_now() -> None:
    shape = AttentionShape(num_heads=1, num_kv_heads=1, kind=AttentionKind.ENCODER_DECODER, causal=False)
    problem = make_problem(shape, [(4, 1), (0, 2)], encoder_rows=[(3, 0), (0, 5)])
    assert problem.common().seq_lens_cpu.tolist() == [3, 5]
    assert len(problem.slot_mapping()) == 5
    expected = torch.nn.functional.scaled_dot_product_attention(
        problem.query[1:].transpose(0, 1), problem.key.transpose(0, 1), problem.value.transpose(0, 1)
    )
    torch.testing.assert_close(dense_attention(problem)[0][1:].float(), expected.transpose(0, 1))


@pytest.mark.parametrize("name", ["item", "tolist", "numpy", "cpu", "nonzero", "__bool__", "__int__"])
def test_a_blind_tensor_lets_nobody_read_it(name: str) -> None:
    """R5.36."""
    blind = HostBlind.of(torch.ones(1))
    with pytest.raises(AssertionError, match="host's copy"):
        getattr(blind, name)()


def test_a_blind_tensor_can_be_computed_with() -> None:
    blind = HostBlind.of(torch.arange(4))
    mask = blind > 1
    assert isinstance(blind[:2] + 1, HostBlind)
    assert isinstance(torch.where(mask, blind, 0), HostBlind)
    for fault in (lambda: blind[mask], lambda: blind.to("cpu"), lambda: torch.arange(4).repeat_interleave(blind)):
        with pytest.raises(AssertionError):
            fault()


def test_steps_for_graphs_lie_where_the_last_one_lay() -> None:
    """I5.4."""
    buffers = StepBuffers(rows=3, columns=4, block_size=4)
    first = buffers.common(make_problem(AttentionShape(), [(5, 1), (2, 1), (9, 1)]))
    pointers = [first.seq_lens.data_ptr(), first.block_table.data_ptr()]
    second = buffers.common(make_problem(AttentionShape(), [(1, 1)]))
    assert [second.seq_lens.data_ptr(), second.block_table.data_ptr()] == pointers
    assert second.seq_lens.tolist() == [2, 0, 0]
    assert second.slot_mapping.tolist()[1:] == [-1, -1]
    assert not second.block_table[1:].any()
    with pytest.raises(ValueError, match="not up to 3 decodes"):
        buffers.common(make_problem(AttentionShape(), [(0, 2)]))
