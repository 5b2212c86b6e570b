"""Linear layers of weights that stay packed: against the file format's own decoder, in float64."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import gguf
import numpy as np
import pytest
import torch
from gguf import quants

from hardpoint_cpu.native.grouped import GGUF_TYPES, Activations, linear_concat, linear_gguf
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


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_parts_of_several_types_are_one_layer(native: NativeLibrary, activations: Activations) -> None:
    parts = [(name, packed(name, 10 + 9 * index, 256, index)) for index, name in enumerate((*GGUF_TYPES, *GGUF_TYPES))]
    parts.insert(3, parts[2])  # one after the other of one type
    bias, x = normal(sum(rows.shape[0] for _, rows in parts)), normal(3, 256)
    layer = linear_gguf(native, parts, bias, activations=activations)
    given = layer(x)
    assert relative_error(given, x.double() @ decoded(parts).T + bias.double()) < TOLERANCE[activations]
    assert layer.is_batch_invariant
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
    with pytest.raises(ValueError, match="can be taken over once only"):
        linear_concat(best_native, parts)
    with pytest.raises(ValueError, match="needs at least one"):
        linear_concat(best_native, [])
    with pytest.raises(ValueError, match="a part of 8 inputs does not fit one of 64"):
        linear_concat(best_native, [makers[0](), best_native.linear_f32(normal(2, 8))])
