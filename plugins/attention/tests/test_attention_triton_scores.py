"""What products of queries and keys become in Triton's kernels: factors, caps and slopes, by interpreter."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

import triton
import triton.language as tl

from hardpoint_attention.triton import TritonBackend, launch
from hardpoint_attention.triton.kernels.scores import LOG2_E, hyperbolic_tangent, shape_scores
from hardpoint_testing_torch import AttentionShape, dense_attention, make_problem, run_backend

# The interpreter computes with numpy, which remarks on exponentials that overflow, as they may.
pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered:RuntimeWarning")

LN_2 = 1 / LOG2_E.value


@triton.jit
def tangent_kernel(source: tl.tensor, target: tl.tensor, N: tl.constexpr) -> None:
    place = tl.arange(0, N)
    tl.store(target + place, hyperbolic_tangent(tl.load(source + place)))


@triton.jit
def scores_kernel(products: tl.tensor, target: tl.tensor, shaping: tl.tensor, M: tl.constexpr, N: tl.constexpr) -> None:
    row, key = tl.arange(0, M), tl.arange(0, N)
    place = row[:, None] * N + key[None, :]
    tl.store(target + place, shape_scores(tl.load(products + place), row, key, row, row < M, shaping))


def capped(products: torch.Tensor, factor: float, cap: float | None) -> torch.Tensor:
    """Natural scores as the kernel computes them, float64 [M, N]."""
    found = torch.empty_like(products)
    scores_kernel[(1,)](products, found, (factor, cap, None, None), M=products.shape[0], N=products.shape[1])
    return found.double() * LN_2


def test_the_tangent_is_precise_at_every_magnitude() -> None:
    """Relative to itself: from the least float32 over both sides of where the series ends to where it is one."""
    magnitudes = torch.cat(
        (2.0 ** torch.arange(-126, 8), torch.linspace(0.2, 0.3, 1500), torch.tensor([0.25, 0.0, 1e9, 3e38]))
    )
    values = torch.cat((magnitudes, -magnitudes, torch.tensor([torch.inf, -torch.inf])))
    size = triton.next_power_of_2(len(values))
    values = torch.cat((values, torch.full((size - len(values),), 0.1)))
    found = torch.empty_like(values)
    tangent_kernel[(1,)](values, found, N=size)
    torch.testing.assert_close(found.double(), values.double().tanh(), rtol=6e-7, atol=0.0)


@pytest.mark.parametrize("cap", [0.5, 30.0, 1e3, 1e5, 1e8])
def test_a_cap_far_above_the_scores_costs_no_digits(cap: float) -> None:
    """With 1 - 2 / (e^(2 x) + 1) alone, a cap of 1e5 left scores of one with an error of 0.006."""
    products = 10 * torch.randn(16, 64, generator=torch.Generator().manual_seed(3))
    products[0, :3] = torch.tensor([0.0, 1e-20, 1e6])
    exact = cap * (0.125 * products.double() / cap).tanh()
    torch.testing.assert_close(capped(products, 0.125, cap), exact, rtol=1e-6, atol=0.0)
    if cap >= 1e8:
        plain = capped(products, 0.125, None)[1:]
        torch.testing.assert_close(capped(products, 0.125, cap)[1:], plain, rtol=1e-6, atol=0.0)


def test_a_layer_with_a_large_cap_answers_as_precisely_as_one_without() -> None:
    shape = AttentionShape(num_heads=2, num_kv_heads=1, head_size=16, logits_soft_cap=1e5)
    problem = make_problem(shape, [(17, 1), (3, 2)])
    found = run_backend(TritonBackend(), problem).double()
    torch.testing.assert_close(found, dense_attention(problem)[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("size", [1.0, 0.01, 1e-4])
def test_small_values_of_an_8_bit_cache_keep_their_digits(size: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """R5.47: multiplied in float16, as devices do, where a first key has nearly all the weight and a thousand others,
    with scales far below one, have the rest."""
    monkeypatch.setattr(launch, "_compute", lambda query: tl.float16)
    shape = AttentionShape(
        num_heads=2, num_kv_heads=1, head_size=16, dtype=torch.float16, kv_cache_dtype="int8_per_token_head"
    )
    problem = make_problem(shape, [(1000, 1)])
    keys, values = (states.float() for states in problem.history[0])
    keys, values = 0.05 * keys, size * (0.5 + 0.2 * values.abs())
    keys[0], values[0] = 2.0, 0.0
    history = ((keys.half(), values.half()),)
    problem = replace(problem, query=torch.ones_like(problem.query), history=history)
    expected = dense_attention(problem)[0]
    found = run_backend(TritonBackend(), problem).double()
    assert float((found - expected).abs().max() / expected.abs().max()) < 2e-3
