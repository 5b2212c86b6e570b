"""Dense linears of the kernels: against torch, and a row's bits whatever is computed with it."""

from __future__ import annotations

import pytest
import torch

from hardpoint_cpu.native.library import NativeLibrary, NativeLinear

ROWS = (1, 2, 3, 5, 6, 7, 8, 9, 10, 12, 13, 17, 18, 19, 27, 40)
SHAPES = [(1, 1), (3, 5), (48, 8), (47, 16), (49, 9), (96, 33), (130, 64), (200, 71)]
SLOW_SHAPES = [(576, 576), (960, 576), (1000, 1024), (33, 2048)]


def values(*sizes: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*sizes, generator=torch.Generator().manual_seed(seed + sum(sizes)))


def make(
    library: NativeLibrary, kind: str, weight: torch.Tensor, bias: torch.Tensor | None, *, invariant: bool = True
) -> NativeLinear:
    if kind == "bf16":
        return library.linear_bf16(weight.bfloat16(), bias, invariant=invariant)
    return library.linear_f32(weight, bias, invariant=invariant)


def reference(kind: str, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    kept = weight.bfloat16() if kind == "bf16" else weight
    return torch.nn.functional.linear(x.double(), kept.double(), None if bias is None else bias.double())


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize(
    "shape", [*SHAPES, *(pytest.param(shape, marks=pytest.mark.slow) for shape in SLOW_SHAPES)], ids=str
)
def test_products_are_right_and_a_row_never_depends_on_its_neighbors(
    native: NativeLibrary, kind: str, shape: tuple[int, int]
) -> None:
    outputs, inputs = shape
    weight, bias = values(outputs, inputs), values(outputs, seed=1)
    layer = make(native, kind, weight, bias)
    assert layer.is_batch_invariant
    x = values(max(ROWS), inputs, seed=2)
    alone = torch.cat([layer(row[None]) for row in x])
    # Rounding grows with the root of the number of additions.
    expected = reference(kind, x, weight, bias)
    torch.testing.assert_close(alone.double(), expected, rtol=1e-5, atol=3e-6 * inputs**0.5)
    for rows in ROWS:
        assert torch.equal(layer(x[:rows]), alone[:rows]), f"{rows} rows"
        assert torch.equal(layer(x[-rows:]), alone[-rows:]), f"the last {rows} rows"


def test_bfloat16_gives_the_bits_of_its_widened_weights(native: NativeLibrary) -> None:
    for outputs, inputs in SHAPES:
        weight, x = values(outputs, inputs).bfloat16(), values(11, inputs, seed=3)
        assert torch.equal(native.linear_bf16(weight)(x), native.linear_f32(weight.float())(x)), (outputs, inputs)


@pytest.mark.parametrize("kind", ["f32", "bf16"])
def test_adding_to_what_lies_there_and_writing_into_a_part(native: NativeLibrary, kind: str) -> None:
    weight, x, bias = values(70, 20), values(23, 20), values(70)
    layer = make(native, kind, weight, bias)
    product = layer(x)
    there = values(23, 70, seed=4)
    out = there.clone()
    assert layer(x, out, adds=True) is out
    assert torch.equal(out, there + product)

    wide = torch.full((23, 100), 7.0)
    inputs = torch.full((23, 30), float("nan"))
    inputs[:, 5:25] = x
    layer(inputs[:, 5:25], wide[:, 10:80])
    assert torch.equal(wide[:, 10:80], product)
    assert (wide[:, :10] == 7).all()
    assert (wide[:, 80:] == 7).all()


def test_many_rows_in_groups_keep_their_bits(native: NativeLibrary) -> None:
    layer = native.linear_f32(values(100, 40), invariant=True)
    x = values(701, 40, seed=5)
    assert torch.equal(layer(x), torch.cat([layer(part) for part in x.split(23)]))


# Rows: one more tile, an odd one, two groups of what stays in the cache. Inputs: blocks that are not whole, two steps.
MANY = [(161, 40, 33), (192, 97, 64), (577, 48, 576), (160, 50, 1000)]


@pytest.mark.parametrize("kind", ["f32", "bf16"])
@pytest.mark.parametrize("size", MANY, ids=str)
def test_many_rows_are_as_exact_as_additions_in_float32(
    native: NativeLibrary, kind: str, size: tuple[int, int, int]
) -> None:
    """Where a matrix unit knows bfloat16 only, nothing of a float32 may be lost in its parts."""
    rows, outputs, inputs = size
    # Sizes from 2^-20 to 2^20, so that no part can stand in for another.
    scale = torch.linspace(-20, 20, inputs).exp2()
    weight, bias = values(outputs, inputs) * scale, values(outputs, seed=1)
    x = values(rows, inputs, seed=2) / scale
    expected = reference(kind, x, weight, bias)
    for invariant in (False, True):
        found = make(native, kind, weight, bias, invariant=invariant)(x)
        error = (found.double() - expected).norm() / expected.norm()
        assert error < 1e-7 * inputs**0.5, f"{error:.2e}, invariant: {invariant}"


def test_many_rows_add_write_into_parts_and_keep_bits_among_themselves(native: NativeLibrary) -> None:
    layer = native.linear_f32(values(70, 40), values(70, seed=1))
    x = values(400, 40, seed=5)
    product = layer(x)
    there = values(400, 70, seed=4)
    assert torch.equal(layer(x, there.clone(), adds=True), there + product)
    wide = torch.full((400, 100), 7.0)
    layer(torch.nn.functional.pad(x, (5, 5), value=float("nan"))[:, 5:45], wide[:, 10:80])
    assert torch.equal(wide[:, 10:80], product)
    assert (wide[:, :10] == 7).all()
    assert (wide[:, 80:] == 7).all()
    assert torch.equal(layer(x[100:300]), product[100:300])


def test_bfloat16_gives_the_bits_of_its_widened_weights_for_many_rows_too(native: NativeLibrary) -> None:
    weight, x = values(100, 70).bfloat16(), values(200, 70, seed=3)
    assert torch.equal(native.linear_bf16(weight)(x), native.linear_f32(weight.float())(x))


def test_only_what_is_asked_to_be_invariant_promises_it_on_every_level(native: NativeLibrary) -> None:
    layer = native.linear_f32(values(100, 40))
    x = values(300, 40, seed=5)
    alone = torch.cat([layer(part) for part in x.split(23)])
    assert not layer.is_batch_invariant or torch.equal(layer(x), alone)


def test_a_weight_that_is_a_part_of_another_is_copied(native: NativeLibrary) -> None:
    whole = values(40, 50)
    layer = native.linear_f32(whole[5:25, 10:40])
    x = values(3, 30)
    before = layer(x)
    torch.testing.assert_close(before, x @ whole[5:25, 10:40].t(), rtol=1e-5, atol=2e-5)
    whole.zero_()
    assert torch.equal(layer(x), before)


def test_padding_costs_less_than_a_panel(best_native: NativeLibrary) -> None:
    assert best_native.linear_f32(values(480, 100)).num_bytes <= (480 + 48) * 101 * 4
    assert best_native.linear_bf16(values(480, 101).bfloat16()).num_bytes <= (480 + 48) * (102 * 2 + 4)


def test_levels_agree_on_sums_of_small_integers(native: NativeLibrary) -> None:
    """Such sums are exact in any order, so that every level must give the same."""
    weight, x = values(90, 64).mul(4).round(), values(10, 64, seed=6).mul(4).round()
    assert torch.equal(native.linear_f32(weight)(x), x @ weight.t())
