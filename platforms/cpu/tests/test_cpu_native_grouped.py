"""Linear layers of weights that stay packed: against the file format's own decoder, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint_cpu.native.grouped import GGUF_TYPES, Activations, gguf_rows, linear_concat, linear_gguf, linear_int4
from hardpoint_cpu.native.library import NativeLibrary

SEED = 20
TOLERANCE: dict[Activations, float] = {"int8": 1e-2, "float": 1e-4}


def packed(name: str, outputs: int, inputs: int, seed: int = SEED) -> torch.Tensor:
    """Rows of a GGUF type [outputs, bytes]: normal weights, or random blocks where there is no encoder."""
    generator = np.random.default_rng(seed)
    kind = gguf.GGMLQuantizationType[name]
    elements, size = GGUF_TYPES[name]
    if elements == 32:
        return torch.from_numpy(quants.quantize(generator.standard_normal((outputs, inputs)).astype(np.float32), kind))
    blocks = generator.integers(0, 256, (outputs, inputs // elements, size), dtype=np.uint8)
    whole = (generator.uniform(0.5, 1.0, (2, outputs, inputs // elements)) / 64).astype(np.float16)
    for half, place in zip(whole, (208, 206) if name == "Q6_K" else (0, 2), strict=True):
        blocks[..., place : place + 2] = half[..., None].view(np.uint8)
    return torch.from_numpy(blocks.reshape(outputs, -1))


def decoded(parts: list[tuple[str, torch.Tensor]]) -> torch.Tensor:
    rows = [quants.dequantize(part.numpy(), gguf.GGMLQuantizationType[name]) for name, part in parts]
    return torch.from_numpy(np.concatenate(rows)).double()


def normal(*shape: int, seed: int = SEED) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def relative_error(given: torch.Tensor, expected: torch.Tensor) -> float:
    return ((given.double() - expected).norm() / expected.norm()).item()


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("name", GGUF_TYPES)
def test_products_are_those_of_the_decoded_weights(native: NativeLibrary, name: str, activations: Activations) -> None:
    outputs, inputs = 41, 512
    rows, bias, x = packed(name, outputs, inputs), normal(outputs, seed=1), normal(45, inputs, seed=2)
    layer = linear_gguf(native, [(name, rows)], bias, activations=activations)
    expected = x.double() @ decoded([(name, rows)]).T + bias.double()
    given = layer(x)
    assert relative_error(given, expected) < TOLERANCE[activations]
    assert torch.allclose(layer(x, out=given.clone(), adds=True), 2 * given)
    for first, last in ((0, 1), (3, 5), (7, 10), (11, 27), (20, 45)):
        assert torch.equal(layer(x[first:last]), given[first:last])


@pytest.mark.parametrize("name", ["Q4_1", "Q6_K", "Q8_0"])
def test_many_rows_keep_their_bits_where_that_is_declared(native: NativeLibrary, name: str) -> None:
    parts = [(name, packed(name, 41, 512)), ("Q5_0", packed("Q5_0", 23, 512)), (name, packed(name, 17, 512))]
    bias, x = normal(81), normal(150, 512)
    expected = x.double() @ decoded(parts).T + bias.double()
    for invariant in (False, True):
        layer = linear_gguf(native, parts, bias, invariant=invariant)
        given = layer(x)
        assert relative_error(given, expected) < TOLERANCE["int8"]
        assert layer.is_batch_invariant or not invariant
        if layer.is_batch_invariant:
            for first, last in ((0, 1), (3, 19), (7, 39), (0, 64), (149, 150)):
                assert torch.equal(layer(x[first:last]), given[first:last])
    assert linear_gguf(native, parts, bias, activations="float").is_batch_invariant


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_parts_of_several_types_are_one_layer(native: NativeLibrary, activations: Activations) -> None:
    parts = [(name, packed(name, 10 + 9 * index, 256, index)) for index, name in enumerate((*GGUF_TYPES, *GGUF_TYPES))]
    parts.insert(3, parts[2])  # one after the other of one type
    bias, x = normal(sum(rows.shape[0] for _, rows in parts)), normal(3, 256)
    layer = linear_gguf(native, parts, bias, activations=activations)
    given = layer(x)
    assert relative_error(given, x.double() @ decoded(parts).T + bias.double()) < TOLERANCE[activations]
    first = 0
    for name, rows in parts:
        last = first + rows.shape[0]
        alone = linear_gguf(native, [(name, rows)], bias[first:last], activations=activations)
        assert torch.equal(alone(x), given[:, first:last])
        first = last


def test_parts_of_any_kind_can_be_joined(best_native: NativeLibrary) -> None:
    weight, x = normal(7, 64), normal(5, 64)
    rows = packed("Q4_1", 20, 64)
    makers: tuple[Callable[[], Any], ...] = (
        lambda: best_native.linear_f32(weight),
        lambda: linear_gguf(best_native, [("Q4_1", rows)]),
        lambda: linear_gguf(best_native, [("Q4_1", rows)], activations="float"),
    )
    expected = torch.cat([make()(x) for make in makers], dim=1)
    parts = [make() for make in makers]
    sizes = [part.num_bytes for part in parts]
    layer = linear_concat(best_native, parts)
    assert torch.equal(layer(x), expected)
    assert layer.num_bytes == sum(sizes)
    with pytest.raises(ValueError, match="part of another one"):
        parts[0](x)
    with pytest.raises(ValueError, match="can be taken over once only"):
        linear_concat(best_native, parts)
    with pytest.raises(ValueError, match="needs at least one"):
        linear_concat(best_native, [])
    with pytest.raises(ValueError, match="a part of 8 inputs does not fit one of 64"):
        linear_concat(best_native, [makers[0](), best_native.linear_f32(normal(2, 8))])


def nibbles(q: torch.Tensor) -> torch.Tensor:
    """Values [O, I] below 16 as ``linear_int4`` takes them."""
    runs = q.view(q.shape[0], -1, 2, 16)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).reshape(q.shape[0], -1)


@pytest.mark.parametrize("heads", ["floats", "halves", "zeros"])
@pytest.mark.parametrize("group", [32, 64, 96, 128])
def test_int4_groups_keep_heads_in_as_few_bytes_as_give_them_back(
    native: NativeLibrary, group: int, heads: str
) -> None:
    outputs, inputs = 33, 384
    generator = torch.Generator().manual_seed(group)
    q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, generator=generator)
    scales = torch.rand((outputs, inputs // group), generator=generator) + 0.1
    mins = -torch.rand((outputs, inputs // group), generator=generator)
    if heads != "floats":
        scales, mins = scales.half().float(), mins.half().float()
    if heads == "zeros":
        mins = -scales * torch.randint(0, 17, scales.shape, generator=generator)
    weight = q.double().view(outputs, -1, group) * scales[..., None].double() + mins[..., None].double()
    x, bias = normal(14, inputs), normal(outputs)
    expected = x.double() @ weight.view(outputs, inputs).T + bias.double()
    for activations, tolerance in TOLERANCE.items():
        layer = linear_int4(native, nibbles(q), scales, mins, group, bias, activations=activations)
        assert relative_error(layer(x), expected) < tolerance
        assert torch.equal(layer(x[5:6]), layer(x)[5:6])
        head_bytes = {"floats": 8, "halves": 4, "zeros": 3}[heads] * inputs // group
        assert layer.num_bytes <= 48 * (inputs // 2 + head_bytes + 4) + 3 * 64


@pytest.mark.parametrize("name", GGUF_TYPES)
def test_rows_of_a_table_are_exact(native: NativeLibrary, name: str) -> None:
    table = packed(name, 20, 512)
    ids = torch.tensor([19, 0, 7, 7, 3] * 5)
    assert torch.equal(gguf_rows(native, name, table, ids).double(), decoded([(name, table)])[ids])
    assert gguf_rows(native, name, table, ids[:0]).shape == (0, 512)


def test_memory_stays_near_that_of_the_file(best_native: NativeLibrary) -> None:
    for name in GGUF_TYPES:
        rows = packed(name, 64, 1024)
        assert linear_gguf(best_native, [(name, rows)]).num_bytes < 1.06 * rows.numel()


def test_layers_that_do_not_fit_are_refused(best_native: NativeLibrary) -> None:
    rows = packed("Q4_K", 4, 512)
    for parts, message in (
        ([], "at least one part"),
        ([("IQ2_XS", rows)], "'IQ2_XS' have no kernel; allowed: Q4_0, "),
        ([("Q4_K", rows[:, :200])], "whole blocks of 144 bytes, not 200"),
        ([("Q4_K", rows[:, :0])], "whole blocks of 144 bytes, not 0"),
        ([("Q4_K", rows.int())], "must be a uint8 CPU tensor"),
        ([("Q4_K", rows[0])], "must be a uint8 CPU tensor"),
        ([("Q4_K", rows.t())], "must be contiguous"),
        ([("Q4_K", rows), ("Q4_1", packed("Q4_1", 4, 256))], r"as many inputs each, not \[512, 256\]"),
        ([("Q4_K", rows[:0])], "a linear layer of 512 inputs and 0 outputs is empty"),
    ):
        with pytest.raises(ValueError, match=message):
            linear_gguf(best_native, parts)
    with pytest.raises(ValueError, match=r"bias must be a float32 CPU tensor \[4\], not torch.float32 \[5\]"):
        linear_gguf(best_native, [("Q4_K", rows)], torch.zeros(5))
    with pytest.raises(ValueError, match="activations 'bf16' are unknown; allowed: int8, float"):
        linear_gguf(best_native, [("Q4_K", rows)], activations="bf16")  # type: ignore[arg-type]

    values, heads = torch.zeros((4, 64), dtype=torch.uint8), torch.zeros(4, 4)
    for group in (0, 16, 48, 256):
        with pytest.raises(ValueError, match=f"groups of {group} inputs do not fit 128 inputs"):
            linear_int4(best_native, values, heads, heads, group)
    with pytest.raises(ValueError, match=r"mins must be a float32 CPU tensor \[4, 4\], not torch.float64 \[4, 4\]"):
        linear_int4(best_native, values, heads, heads.double(), 32)
    with pytest.raises(ValueError, match=r"scales must be a float32 CPU tensor \[4, 2\]"):
        linear_int4(best_native, values, heads, heads, 64)
    with pytest.raises(ValueError, match="values must be a uint8 CPU tensor"):
        linear_int4(best_native, values.int(), heads, heads, 32)

    for ids in (torch.tensor([0, 4]), torch.tensor([-1])):
        with pytest.raises(ValueError, match="row (4|-1) of 4 rows"):
            gguf_rows(best_native, "Q4_K", rows, ids)
    with pytest.raises(ValueError, match="ids must be an int64 CPU tensor"):
        gguf_rows(best_native, "Q4_K", rows, torch.zeros(2))


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_what_is_not_finite_or_tiny_stays_in_its_row(native: NativeLibrary, activations: Activations) -> None:
    layer = linear_gguf(native, [("Q4_1", packed("Q4_1", 17, 64))], activations=activations)
    x = normal(20, 64)
    x[3, 5], x[7, 40] = float("nan"), float("inf")
    x[8], x[9] = 0.0, x[9] * 1e-42
    given, untouched = layer(x), [row for row in range(20) if row not in (3, 7)]
    assert not given[[3, 7]].isfinite().any()
    assert given[untouched].isfinite().all()
    assert torch.equal(given[8], torch.zeros(17))
    assert given[9].abs().max() < 1e-38


@settings(deadline=None, max_examples=30, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    name=st.sampled_from(list(GGUF_TYPES)),
    outputs=st.integers(1, 40),
    blocks=st.integers(1, 3),
    rows=st.integers(1, 40),
    quantizes=st.booleans(),
    seed=st.integers(0, 2**32 - 1),
)
def test_random_bytes_are_weights_like_any(
    best_native: NativeLibrary, name: str, outputs: int, blocks: int, rows: int, quantizes: bool, seed: int
) -> None:
    elements, size = GGUF_TYPES[name]
    generator = np.random.default_rng(seed)
    table = torch.from_numpy(generator.integers(0, 256, (outputs, blocks * size), dtype=np.uint8))
    layer = linear_gguf(best_native, [(name, table)], activations="int8" if quantizes else "float")
    x = normal(rows, blocks * elements, seed=seed)
    given = layer(x)
    weight = gguf_rows(best_native, name, table, torch.arange(outputs))
    with np.errstate(all="ignore"):
        expected = decoded([(name, table)])
    finite = expected.isfinite().all(dim=1)
    assert torch.equal(weight[finite].double(), expected[finite])
    assert torch.equal(layer(x[rows // 2 : rows // 2 + 1])[:, finite], given[rows // 2 : rows // 2 + 1][:, finite])
    exact = x.double() @ expected[finite].T
    # Scales of all sizes meet in one sum, so errors are measured against the sum of magnitudes.
    bound = x.abs().double() @ expected[finite].abs().T
    assert ((given[:, finite].double() - exact).abs() <= 0.05 * bound + 1e-30).all()
