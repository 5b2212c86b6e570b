"""Linear layers with eight-bit weights, against exact integers and float64."""

from __future__ import annotations

import platform
import subprocess
import sys
from typing import Literal

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint_cpu.host import Host
from hardpoint_cpu.native.build import KernelBuild, cache_folder, find_compiler
from hardpoint_cpu.native.int8 import MOST_INPUTS, linear_int8, quantize_rows
from hardpoint_cpu.native.levels import best_level
from hardpoint_cpu.native.library import NativeLibrary

Weights = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def make_weights(outputs: int, inputs: int, seed: int = 0) -> Weights:
    generator = torch.Generator().manual_seed(seed)
    values = torch.randint(-128, 128, (outputs, inputs), generator=generator, dtype=torch.int8)
    return values, torch.rand(outputs, generator=generator) + 0.1, torch.randn(outputs, generator=generator)


def make_rows(rows: int, inputs: int, seed: int = 1) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(rows, inputs, generator=generator) * torch.rand(rows, 1, generator=generator).exp2()


def expected_bits(x: torch.Tensor, values: torch.Tensor, scales: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """What the kernels promise, bit for bit: float64 holds the products and their sums exactly."""
    most, steps = x.abs().amax(1, keepdim=True), torch.tensor(127.0)  # a number would be divided by its inverse
    quantized = torch.where(most < 2.0**-119, 0, (x * (steps / most)).round())
    sums = quantized.double() @ values.double().T
    factors = torch.where(most < 2.0**-119, 0, most / steps) * scales
    return sums.float() * factors + bias


def assert_same_bits(left: torch.Tensor, right: torch.Tensor) -> None:
    torch.testing.assert_close(left, right, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("rows", "outputs", "inputs"),
    [(1, 1, 1), (3, 31, 63), (8, 576, 576), (17, 100, 65), (33, 48, 200), (75, 130, 1536)],
)
def test_sums_are_exact(native: NativeLibrary, rows: int, outputs: int, inputs: int) -> None:
    weights, x = make_weights(outputs, inputs), make_rows(rows, inputs)
    assert_same_bits(linear_int8(native, *weights)(x), expected_bits(x, *weights))


@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(rows=st.integers(1, 70), outputs=st.integers(1, 150), inputs=st.integers(1, 150), seed=st.integers(0, 1000))
def test_shapes_of_any_size_fit(native: NativeLibrary, rows: int, outputs: int, inputs: int, seed: int) -> None:
    values, scales, bias = make_weights(outputs, inputs, seed)
    x = make_rows(rows, inputs, seed)
    assert_same_bits(linear_int8(native, values, scales, bias)(x), expected_bits(x, values, scales, bias))
    expected = x.double() @ (values.double() * scales.double()[:, None]).T
    torch.testing.assert_close(
        linear_int8(native, values, scales, activations="float")(x).double(), expected, rtol=1e-5, atol=1e-3
    )


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_a_row_alone_has_the_bits_that_it_has_among_others(
    native: NativeLibrary, activations: Literal["int8", "float"]
) -> None:
    layer = linear_int8(native, *make_weights(70, 100), activations)
    x = make_rows(67, 100)
    together = layer(x)
    for rows in (1, 2, 5, 13, 16, 31, 32, 66):
        assert_same_bits(layer(x[-rows:]), together[-rows:])
    assert layer.is_batch_invariant


@pytest.mark.slow
def test_all_levels_have_the_same_bits(native: NativeLibrary, best_native: NativeLibrary) -> None:
    weights, x = make_weights(200, 333), make_rows(50, 333)
    x[3], x[7, 5] = 0, torch.nan
    assert_same_bits(linear_int8(native, *weights)(x), linear_int8(best_native, *weights)(x))


@pytest.mark.parametrize("rows", [1, 40])
@pytest.mark.parametrize("inputs", [66, MOST_INPUTS])
def test_extreme_values_do_not_saturate(native: NativeLibrary, inputs: int, rows: int) -> None:
    patterns = [(127, 127), (-128, -128), (-127, 127), (127, -128), (0, -128)]
    values = torch.tensor(patterns, dtype=torch.int8).repeat(1, inputs // 2)
    x = torch.tensor([(1.0, 1.0), (-1.0, -1.0), (1.0, -1.0), (-1.0, 1.0)]).repeat(rows // 4 + 1, inputs // 2)[:rows]
    weights = (values, torch.ones(len(patterns)), torch.zeros(len(patterns)))
    assert_same_bits(linear_int8(native, *weights)(x), expected_bits(x, *weights))


def test_rounding_takes_ties_to_even(native: NativeLibrary) -> None:
    x = torch.tensor([[127.0, 0.5, 1.5, 2.5, -0.5, -1.5, -2.5, 126.5]])
    identity = torch.eye(8, dtype=torch.int8)
    got = linear_int8(native, identity, torch.ones(8))(x)
    assert got.tolist() == [[127.0, 0.0, 2.0, 2.0, 0.0, -2.0, -2.0, 126.0]]


def test_only_the_row_that_is_not_finite_becomes_nan(native: NativeLibrary) -> None:
    weights = make_weights(40, 70)
    layer, plain = linear_int8(native, *weights), make_rows(36, 70)
    x = plain.clone()
    x[0, 69], x[9, 3], x[35, 64] = torch.nan, torch.inf, -torch.inf
    got = layer(x)
    broken = torch.tensor([0, 9, 35])
    assert got[broken].isnan().all()
    others = torch.ones(36, dtype=torch.bool).index_fill(0, broken, False)
    assert_same_bits(got[others], layer(plain)[others])


def test_rows_of_nothing_give_the_bias_and_the_largest_numbers_work(native: NativeLibrary) -> None:
    values, scales, bias = make_weights(20, 30)
    x = make_rows(4, 30)
    x[0] = 0
    x[1] = 1e-40  # of which 127 parts are no numbers any more
    x[2] *= 2.0**-100
    x[3] *= 2.0**120
    got = linear_int8(native, values, scales * 1e-3, bias)(x)
    assert_same_bits(got[:2], bias.expand(2, 20))
    assert_same_bits(got, expected_bits(x, values, scales * 1e-3, bias))


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("rows", [1, 40])
def test_sums_can_be_added_to_what_is_there(
    native: NativeLibrary, activations: Literal["int8", "float"], rows: int
) -> None:
    layer = linear_int8(native, *make_weights(45, 30), activations)
    x, there = make_rows(rows, 30), make_rows(rows, 45, seed=2)
    wide = torch.full((rows, 50), 7.0)
    wide[:, :45] = there
    layer(x, wide[:, :45], adds=True)
    assert_same_bits(wide[:, :45], there + layer(x))
    assert bool((wide[:, 45:] == 7).all())


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_strided_weights_and_rows_are_read_in_place(
    best_native: NativeLibrary, activations: Literal["int8", "float"]
) -> None:
    values, scales, bias = make_weights(33, 80)
    x = make_rows(20, 80)
    expected = linear_int8(best_native, values[:, 8:72].clone(), scales, bias, activations)(x[:, 5:69].clone())
    assert_same_bits(linear_int8(best_native, values[:, 8:72], scales, bias, activations)(x[:, 5:69]), expected)


def test_weights_that_do_not_fit_are_refused(best_native: NativeLibrary) -> None:
    values, scales, bias = make_weights(5, 7)
    for wrong in (values.float(), values[0], values.t(), values.to("meta")):
        with pytest.raises(ValueError, match=r"values must (be a torch.int8 CPU tensor|have contiguous rows)"):
            linear_int8(best_native, wrong, scales, bias)
    for vector in (scales[:4], scales.double(), scales[:, None], torch.zeros(10)[::2]):
        with pytest.raises(ValueError, match=r"scales must be a contiguous torch.float32 CPU tensor \[5\]"):
            linear_int8(best_native, values, vector, bias)
        with pytest.raises(ValueError, match=r"bias must be a contiguous torch.float32 CPU tensor \[5\]"):
            linear_int8(best_native, values, scales, vector)
    scales[2] = torch.inf
    with pytest.raises(ValueError, match="the scale of output 2 is inf, not a finite number"):
        linear_int8(best_native, values, scales)
    with pytest.raises(ValueError, match="131073 inputs with eight-bit weights; allowed: at most 131072"):
        linear_int8(best_native, torch.zeros(1, MOST_INPUTS + 1, dtype=torch.int8), torch.ones(1))
    with pytest.raises(ValueError, match="a linear layer of 7 inputs and 0 outputs is empty"):
        linear_int8(best_native, values[:0], scales[:0])
    with pytest.raises(ValueError, match="activations must be 'int8' or 'float', not 'bfloat16'"):
        linear_int8(best_native, values, scales, activations="bfloat16")  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_rounded_weights_are_within_half_a_step(dtype: torch.dtype) -> None:
    weight = make_rows(30, 50).to(dtype)
    weight[4] = 0
    values, scales = quantize_rows(weight)
    error = (weight.double() - values.double() * scales.double()[:, None]).abs()
    assert bool((error <= scales.double()[:, None] * (0.5 + 1e-5)).all())
    assert values.abs().amax(1).tolist() == [127] * 4 + [0] + [127] * 25
    assert scales[4] == 0


def test_weights_that_eight_bits_cannot_hold_are_refused() -> None:
    for wrong in (torch.ones(3), torch.ones(2, 2, dtype=torch.int32)):
        with pytest.raises(ValueError, match=r"weight must be a floating tensor \[O, I\]"):
            quantize_rows(wrong)
    with pytest.raises(ValueError, match="not finite"):
        quantize_rows(torch.tensor([[1.0, torch.inf]]))


WITHOUT_TILES = """
import ctypes, struct, sys
number_is, argument_is = [(0x20, 0, 0, 0), (0x15, 0, 3, 158)], [(0x20, 0, 0, 16), (0x15, 0, 1, 0x1023)]
refuse, allow = (0x06, 0, 0, 0x50001), (0x06, 0, 0, 0x7FFF0000)
rules = [*number_is, *argument_is, refuse, allow]
packed = ctypes.create_string_buffer(b"".join(struct.pack("HBBI", *rule) for rule in rules))
program = ctypes.create_string_buffer(struct.pack("HxxxxxxQ", len(rules), ctypes.addressof(packed)))
prctl = ctypes.CDLL(None, use_errno=True).prctl
if prctl(38, 1, 0, 0, 0) or prctl(22, 2, program, 0, 0):
    sys.exit(77)
from pathlib import Path
import torch
from hardpoint_cpu.native.int8 import linear_int8
from hardpoint_cpu.native.library import NativeLibrary
layer = linear_int8(NativeLibrary(Path(sys.argv[1]), threads=2), torch.ones(40, 70, dtype=torch.int8), torch.ones(40))
x = torch.ones(64, 70)
sys.exit(not torch.equal(layer(x), layer(x[:1]).expand(64, 40)))
"""


@pytest.mark.slow
def test_a_system_that_refuses_tiles_is_served_without_them() -> None:
    """A filter of system calls answers as an old or locked-down kernel does; using tiles then ends the process."""
    level = best_level(platform.machine(), Host().cpu_flags())
    if level.name != "amx":
        pytest.skip("this processor has no tiles")
    path = KernelBuild(level, cache_folder(), find_compiler()).compile()
    done = subprocess.run([sys.executable, "-c", WITHOUT_TILES, str(path)], timeout=300, check=False)
    if done.returncode == 77:
        pytest.skip("this system allows no filters")
    assert done.returncode == 0
