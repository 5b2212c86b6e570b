"""Partial results of attention and their merge, against float64 arithmetic over all keys at once."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_torch_runtime.layers import Partial, merge_partials, rank_share, total_lse

TOKENS, HEADS, SIZE = 3, 2, 4


def attend(scores: torch.Tensor, values: torch.Tensor, sinks: torch.Tensor | None = None) -> Partial:
    """Attention from ``scores`` [T, H, S] and ``values`` [S, H, V]; ``sinks`` [H] are scores without a value."""
    everything = scores if sinks is None else torch.cat((scores, sinks.expand(scores.shape[0], -1)[..., None]), dim=-1)
    lse = torch.logsumexp(everything, dim=-1)
    weights = (scores - lse[..., None]).exp().nan_to_num(0.0)
    return Partial(torch.einsum("ths,shv->thv", weights, values), lse)


def case(keys: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    scores = 4 * torch.randn(TOKENS, HEADS, keys, generator=generator, dtype=torch.float64)
    return scores, torch.randn(keys, HEADS, SIZE, generator=generator, dtype=torch.float64)


def assert_equal(actual: Partial, expected: Partial, tolerance: float = 1e-12) -> None:
    for got, wanted in ((actual.output, expected.output), (actual.lse, expected.lse)):
        torch.testing.assert_close(got.double(), wanted.double(), rtol=tolerance, atol=tolerance)


@settings(max_examples=25, deadline=None)
@given(cuts=st.lists(st.integers(0, 20), max_size=5), seed=st.integers(0, 999), uses_sinks=st.booleans())
def test_any_cut_of_the_keys_gives_the_whole(cuts: list[int], seed: int, uses_sinks: bool) -> None:
    """R5.83: in float64, empty parts included; sinks enter the first part only."""
    scores, values = case(20, seed)
    sinks = torch.tensor([0.5, -2.0], dtype=torch.float64) if uses_sinks else None
    bounds = [0, *sorted(cuts), 20]
    parts = [
        attend(scores[..., begin:end], values[begin:end], sinks if number == 0 else None)
        for number, (begin, end) in enumerate(itertools.pairwise(bounds))
    ]
    assert_equal(merge_partials(parts), attend(scores, values, sinks))


@settings(max_examples=20, deadline=None)
@given(owners=st.lists(st.integers(0, 3), min_size=12, max_size=12), seed=st.integers(0, 999))
def test_keys_dealt_out_in_any_way_give_the_whole(owners: list[int], seed: int) -> None:
    """I5.2: ranks hold any of the keys, and some may hold none."""
    scores, values = case(12, seed)
    chosen = [np.flatnonzero(np.array(owners) == rank) for rank in range(4)]
    parts = [attend(scores[..., keys], values[keys]) for keys in chosen]
    whole = attend(scores, values)
    assert_equal(merge_partials(parts), whole)
    shares = [rank_share(part, [other.lse for other in parts]) for part in parts]
    torch.testing.assert_close(torch.stack(shares).sum(0), whole.output, rtol=1e-12, atol=1e-12)


def test_sinks_in_both_parts_would_be_counted_twice() -> None:
    """R5.83: why only the prefix has them."""
    scores, values = case(8, 0)
    sinks = torch.tensor([1.0, 2.0], dtype=torch.float64)
    halves = [(scores[..., :4], values[:4]), (scores[..., 4:], values[4:])]
    right = merge_partials([attend(*halves[0], sinks), attend(*halves[1])])
    wrong = merge_partials([attend(*half, sinks) for half in halves])
    assert_equal(right, attend(scores, values, sinks))
    assert (wrong.lse - right.lse).min() > 1e-3


@pytest.mark.parametrize("empty", [-torch.inf, torch.inf])
def test_a_part_without_keys_adds_nothing_whatever_it_holds(empty: float) -> None:
    scores, values = case(5, 3)
    whole = attend(scores, values)
    nothing = Partial(torch.full_like(whole.output, torch.nan), torch.full_like(whole.lse, empty))
    assert_equal(merge_partials([nothing, whole]), whole)
    assert_equal(merge_partials([whole, nothing, nothing]), whole)
    assert not rank_share(nothing, [nothing.lse, whole.lse]).any()


def test_nothing_and_nothing_is_zero() -> None:
    nothing = Partial(torch.full((2, 1, 3), torch.nan), torch.full((2, 1), -torch.inf))
    merged = merge_partials([nothing, nothing])
    assert not merged.output.any()
    assert bool((merged.lse == -torch.inf).all())


def test_a_part_may_be_empty_for_some_queries_only() -> None:
    scores, values = case(6, 4)
    hidden = scores.clone()
    hidden[0, :, 3:] = -torch.inf
    parts = [attend(hidden[..., :3], values[:3]), attend(hidden[..., 3:], values[3:])]
    assert_equal(merge_partials(parts), attend(hidden, values))


def test_narrow_parts_merge_in_float32() -> None:
    """Outputs keep their dtype, log-sum-exps stay float32, and large scores overflow nothing."""
    scores, values = case(10, 5)
    parts = [attend(scores[..., part] + 500, values[part]) for part in (slice(4), slice(4, 10))]
    narrow = [Partial(part.output.bfloat16(), part.lse.float()) for part in parts]
    merged = merge_partials(narrow)
    assert (merged.output.dtype, merged.lse.dtype) == (torch.bfloat16, torch.float32)
    assert_equal(merged, attend(scores + 500, values), 2e-2)


def test_a_real_nan_is_not_hidden() -> None:
    scores, values = case(5, 6)
    broken = Partial(torch.full((TOKENS, HEADS, SIZE), torch.nan), torch.zeros(TOKENS, HEADS))
    assert merge_partials([attend(scores, values), broken]).output.isnan().all()


def test_the_output_may_go_where_the_caller_wants_it() -> None:
    scores, values = case(5, 7)
    whole = attend(scores, values)
    target = torch.zeros(TOKENS, HEADS, SIZE)
    merged = merge_partials([whole], target)
    assert merged.output is target
    assert_equal(merged, whole, 1e-6)


def test_what_cannot_be_merged() -> None:
    part = Partial(torch.zeros(2, 3, 4), torch.zeros(2, 3))
    with pytest.raises(ValueError, match="nothing to merge"):
        merge_partials([])
    with pytest.raises(ValueError, match="one shape"):
        merge_partials([part, Partial(torch.zeros(1, 3, 4), torch.zeros(1, 3))])
    with pytest.raises(ValueError, match=r"\(2, 3\), not \(3, 2\)"):
        Partial(torch.zeros(2, 3, 4), torch.zeros(3, 2))
    assert total_lse([part.lse, part.lse]).tolist() == pytest.approx(np.full((2, 3), np.log(2)))
