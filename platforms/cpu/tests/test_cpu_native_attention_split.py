"""Attention of prompts on matrix units, where floats are sums of bfloat16: against the dense answer in float64."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from cpu_attention_cases import LAYOUTS, run, shape_of, shapes
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_testing_torch import AttentionShape, dense_attention, make_problem

TOLERANCE = {0: 2e-5, 1: 5e-2, 3: 2e-5}
PROMPTS = [(0, 300), (17, 1), (100, 150), (0, 64), (130, 65), (300, 1), (3, 0)]
"""Rows of several tiles, later chunks, decodes beside them, and one without tokens."""

layers = shapes([1, 3, 8], [8, 24, 40, 64, 80, 128, 256], [1, 16, 48])
batches = st.lists(
    st.tuples(st.sampled_from([0, 1, 127, 128, 200]), st.sampled_from([0, 1, 63, 64, 70, 190])), min_size=2, max_size=5
)


@pytest.mark.slow
@pytest.mark.parametrize("parts", [1, 3])
def test_any_prompts_equal_the_dense_answer(best_native: NativeLibrary, parts: int) -> None:
    """R5.47, R5.41, R5.44: any shape, block table and layout, over NaN in every cache entry that no row owns."""

    @settings(max_examples=40, deadline=None, database=None)
    @given(shape=layers, batch=batches, seed=st.integers(0, 1000), layout=st.sampled_from(LAYOUTS))
    def check(shape: AttentionShape, batch: list[tuple[int, int]], seed: int, layout: str) -> None:
        problem = make_problem(shape, batch, seed)
        found = run(best_native, problem, layout=layout, parts=parts)
        for ours, theirs in zip(found, dense_attention(problem), strict=True):
            torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[parts], atol=TOLERANCE[parts])

    check()


@pytest.mark.parametrize("parts", [0, 1, 3])
def test_prompts_beside_decodes_equal_the_dense_answer(native: NativeLibrary, parts: int) -> None:
    """R5.47 on every level; those without such a unit compute as ever."""
    problem = make_problem(shape_of(head_size=40), PROMPTS)
    for ours, theirs in zip(run(native, problem, parts=parts), dense_attention(problem), strict=True):
        torch.testing.assert_close(ours.double(), theirs, rtol=TOLERANCE[parts], atol=TOLERANCE[parts])


def test_all_of_a_float_is_kept_by_three_parts(best_native: NativeLibrary) -> None:
    """As near to the exact answer as float32 is, and an only part is not."""
    problem = make_problem(shape_of(head_size=64), [(0, 400), (200, 200)])
    expected, _ = dense_attention(problem)
    errors = {
        parts: float((run(best_native, problem, parts=parts)[0].double() - expected).norm() / expected.norm())
        for parts in (0, 1, 3)
    }
    assert errors[3] < max(2 * errors[0], 1e-6), errors
    assert errors[1] < 1e-2, errors


def test_decodes_have_the_bits_of_vectors(load_native: Callable[..., NativeLibrary]) -> None:
    """I5.1: only rows of prompts take another way, whatever lies beside them."""
    problem = make_problem(shape_of(), PROMPTS)
    rows = [0, *torch.tensor([length for _, length in PROMPTS]).cumsum(0).tolist()]
    plain, split = (run(load_native(threads=2), problem, parts=parts)[0] for parts in (0, 3))
    for row, (_, length) in enumerate(PROMPTS):
        if length == 1:
            assert torch.equal(plain[rows[row] : rows[row + 1]], split[rows[row] : rows[row + 1]])
