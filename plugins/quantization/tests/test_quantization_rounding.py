"""Rounding to eight and four bits: bounds, packing, and the exactness of products over whole numbers."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces.quantization import LinearShape
from hardpoint_quantization.grouped import ACTIVATION_GROUP, rounded_in_groups
from hardpoint_quantization.int4 import int4_groups, int4_values
from hardpoint_quantization.int8 import Int8Linear
from hardpoint_quantization.rounding import EXACT_INPUTS, LARGEST_INT8, int8_rows, integer_product
from hardpoint_torch_runtime.layers import Placement

CPU = torch.device("cpu")


@st.composite
def matrices(draw: st.DrawFn, inputs: tuple[int, ...] = (1, 2, 33, 96)) -> torch.Tensor:
    """Rows of very different loudness, some of them zeros."""
    rows, columns = draw(st.integers(1, 5)), draw(st.sampled_from(inputs))
    generator = torch.Generator().manual_seed(draw(st.integers(0, 1 << 16)))
    loudness = torch.tensor(draw(st.lists(st.sampled_from([0.0, 1e-6, 0.3, 40.0]), min_size=rows, max_size=rows)))
    return torch.randn(rows, columns, generator=generator) * loudness.unsqueeze(1)


@settings(max_examples=20)
@given(matrices())
def test_a_value_is_at_most_half_a_step_off(values: torch.Tensor) -> None:
    """I10.5."""
    rounded, scales = int8_rows(values)
    assert rounded.dtype == torch.int8
    assert int(rounded.abs().max()) <= LARGEST_INT8
    deviation = (rounded * scales.unsqueeze(1) - values).abs()
    assert bool((deviation <= scales.unsqueeze(1) * 0.5001).all())
    assert torch.equal(int8_rows(-values)[0], -rounded)


@settings(max_examples=20)
@given(matrices())
def test_rounding_what_is_rounded_changes_nothing(values: torch.Tensor) -> None:
    rounded, scales = int8_rows(values)
    again, _ = int8_rows(rounded * scales.unsqueeze(1))
    assert torch.equal(again, rounded)


def test_ties_go_to_even_and_rows_without_a_scale_become_zeros() -> None:
    values = torch.tensor([[127.0, 0.5, 1.5, -2.5], [0.0, 0.0, 0.0, 0.0], [1e-45, 0.0, 0.0, 0.0]])
    rounded, scales = int8_rows(values)
    assert rounded.tolist() == [[127, 0, 2, -2], [0] * 4, [0] * 4]
    assert scales.tolist() == [1.0, 0.0, 0.0]


@pytest.mark.parametrize("num_inputs", [1, 576, EXACT_INPUTS, EXACT_INPUTS + 1, 3 * EXACT_INPUTS + 5])
@pytest.mark.parametrize("extreme", [True, False])
def test_products_of_whole_numbers_are_exact(num_inputs: int, extreme: bool) -> None:
    """Even where every factor has the largest magnitude, so that sums pass what float32 counts exactly."""
    generator = torch.Generator().manual_seed(num_inputs)
    low, high = (LARGEST_INT8, LARGEST_INT8 + 1) if extreme else (-LARGEST_INT8, LARGEST_INT8 + 1)
    x = torch.randint(low, high, (3, num_inputs), generator=generator).to(torch.int8)
    weight = torch.randint(low, high, (4, num_inputs), generator=generator).to(torch.int8)
    exact = x.long() @ weight.long().T
    assert torch.equal(integer_product(x, weight), exact.to(torch.float32))


def test_an_int8_layer_multiplies_whole_numbers() -> None:
    """Two scales times the integer product, and nothing else is rounded."""
    generator = torch.Generator().manual_seed(0)
    dense = torch.randn(7, 1500, generator=generator)
    method, layer = Int8Linear(CPU, int8_activations=True), torch.nn.Module()
    method.create_weights(layer, LinearShape(1500, (7,), "float32"))
    with torch.no_grad():
        method.load_dense(layer, Placement.whole((7, 1500)), dense)
    method.process_after_loading(layer)
    x, bias = torch.randn(5, 1500, generator=generator), torch.randn(7, generator=generator)
    stored = method.stored(layer)
    rounded, scales = int8_rows(x)
    product = (rounded.long() @ stored.values.long().T).double() * scales.unsqueeze(1).double() * stored.scales.double()
    torch.testing.assert_close(method.apply(layer, x, bias).double(), product + bias, rtol=1e-6, atol=1e-6)


@given(matrices(inputs=(128, 256)), st.sampled_from([32, 64, 128]))
@settings(max_examples=15)
def test_groups_of_four_bits_are_at_most_half_a_step_off(weight: torch.Tensor, group_size: int) -> None:
    """I10.5, and both ends of a group's range are kept."""
    values, scales, mins = int4_groups(weight, group_size)
    assert values.shape == (len(weight), weight.shape[1] // 2)
    assert scales.shape == mins.shape == (len(weight), weight.shape[1] // group_size)
    back, loudest = int4_values(values, scales, mins), float(weight.abs().max())
    # Two bytes for the minimum, and for a scale that is taken fifteen times.
    halves = loudest * 2.0**-9
    allowed = scales.repeat_interleave(group_size, 1) * 0.501 + halves
    assert bool(((back - weight).abs() <= allowed).all())
    groups, original = back.unflatten(1, (-1, group_size)), weight.unflatten(1, (-1, group_size))
    torch.testing.assert_close(groups.amin(2), original.amin(2), rtol=0, atol=halves)
    torch.testing.assert_close(groups.amax(2), original.amax(2), rtol=0, atol=halves)
    if loudest > 1:
        assert torch.equal(scales.half().float(), scales)
        assert torch.equal(mins.half().float(), mins)


@given(st.integers(0, 1 << 16), st.sampled_from([32, 64]))
@settings(max_examples=20)
def test_nibbles_lie_where_the_record_says(seed: int, group_size: int) -> None:
    """I10.4: byte j of 16 holds input j of a run of 32 in its low bits, and input j + 16 in its high ones."""
    numbers = torch.randint(0, 16, (3, 128), generator=torch.Generator().manual_seed(seed))
    numbers[:, ::group_size], numbers[:, 1::group_size] = 0, 15
    values, scales, mins = int4_groups(numbers.float(), group_size)
    assert torch.equal(int4_values(values, scales, mins), numbers.float())
    for run in range(4):
        taken = values[:, 16 * run : 16 * run + 16].long()
        assert torch.equal(taken & 15, numbers[:, 32 * run : 32 * run + 16])
        assert torch.equal(taken >> 4, numbers[:, 32 * run + 16 : 32 * run + 32])


@settings(max_examples=20)
@given(matrices(inputs=(32, 96)))
def test_activations_are_rounded_in_groups_of_their_own(x: torch.Tensor) -> None:
    rounded = rounded_in_groups(x)
    for first in range(0, x.shape[1], ACTIVATION_GROUP):
        group = x[:, first : first + ACTIVATION_GROUP]
        values, scales = int8_rows(group)
        assert torch.equal(rounded[:, first : first + ACTIVATION_GROUP], values * scales.unsqueeze(1))
