"""8-bit caches by their codes, as kernels take them on devices without the type, and interpreted always."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from hardpoint_attention.triton import TritonBackend
from hardpoint_attention.triton.states import paged_states
from hardpoint_testing_torch import AttentionProblem, AttentionShape, dense_attention, make_problem, run_backend

DTYPES = {"fp8": torch.float8_e4m3fn, "fp8_e5m2": torch.float8_e5m2}
ROWS = [(17, 1), (3, 7), (0, 5)]


def rounded(values: torch.Tensor, scale: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Codes [T, K, D] by torch, of what fits and what does not."""
    largest = torch.finfo(dtype).max
    return (values.float() / scale.view(1, -1, 1)).clamp(-largest, largest).to(dtype).view(torch.uint8)


def written(problem: AttentionProblem, cache: torch.Tensor, states: torch.Tensor) -> torch.Tensor:
    """Codes [T, K, D] of the step's tokens in a part [blocks, K, B, D] of the cache."""
    slots = problem.slot_mapping()
    return states[slots // cache.shape[2], :, slots % cache.shape[2]].view(torch.uint8)


@pytest.mark.parametrize("by_head", [False, True])
@pytest.mark.parametrize("name", DTYPES)
def test_what_is_written_is_torchs_rounding_bit_for_bit(name: str, by_head: bool) -> None:
    """Values far beyond the format, below its least one, and halfway between two among the usual ones."""
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=16, kv_cache_dtype=name, per_head_scales=by_head)
    problem = make_problem(shape, ROWS)
    generator = torch.Generator().manual_seed(1)
    factors = 2.0 ** torch.randint(-24, 24, problem.key.shape, generator=generator)
    problem = replace(problem, key=problem.key * factors, value=problem.value * factors)
    problem.key[0, :, :4] = torch.tensor([0.0, -0.0, 1e9, -1e9])
    params = problem.params()
    assert params.key_scale is not None
    assert params.value_scale is not None
    problem.value[0, :, :4] = torch.tensor([17.0, 19.0, 2.0**-10, -(2.0**-17)]) * params.value_scale.view(-1, 1)
    cache = torch.zeros_like(problem.kv_cache().view(torch.uint8)).view(DTYPES[name])
    TritonBackend().create_impl(params).write_kv(problem.key, problem.value, cache, problem.slot_mapping())
    keys, values = cache[..., :16], cache[..., 16:]
    assert torch.equal(written(problem, cache, keys), rounded(problem.key, params.key_scale, DTYPES[name]))
    assert torch.equal(written(problem, cache, values), rounded(problem.value, params.value_scale, DTYPES[name]))


def test_codes_are_a_view_of_the_cache_and_only_where_they_are_needed() -> None:
    cache = torch.zeros(3, 2, 4, 16, dtype=torch.uint8).view(torch.float8_e4m3fn)
    for states in (paged_states(cache, 8, converts_e4m3=False), paged_states(cache, 16, 8, converts_e4m3=False)):
        assert states.keys.dtype is torch.uint8
        assert states.keys.data_ptr() == cache.data_ptr()
        assert states.is_quantized
        assert states.limit == 448
    assert paged_states(cache, 8).keys.dtype is torch.float8_e4m3fn
    other = cache.view(torch.float8_e5m2)
    assert paged_states(other, 8, converts_e4m3=False).keys.dtype is torch.float8_e5m2, "which all devices have"
    integers = torch.zeros(3, 2, 4, 24, dtype=torch.int8)
    assert paged_states(integers, 8, converts_e4m3=False).keys.dtype is torch.int8


@pytest.mark.parametrize("latent_values", [pytest.param(None, marks=pytest.mark.slow), 24])
def test_codes_are_read_as_what_they_stand_for(latent_values: int | None) -> None:
    shape = AttentionShape(num_heads=4, num_kv_heads=2, head_size=16, kv_cache_dtype="fp8")
    if latent_values is not None:
        shape = replace(shape, num_kv_heads=1, head_size=40, latent_values=latent_values)
    problem = make_problem(shape, ROWS)
    output = run_backend(TritonBackend(), problem).double()
    torch.testing.assert_close(output, dense_attention(problem)[0], rtol=2e-5, atol=2e-5)
