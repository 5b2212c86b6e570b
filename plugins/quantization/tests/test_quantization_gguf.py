"""Rows of GGUF blocks as weights: what they mean, how ranks share them, and what is no block."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from gguf.constants import GGMLQuantizationType
from gguf.quants import dequantize
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError, ModelFormatError
from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearShape
from hardpoint_quantization.gguf_blocks import BLOCK_TYPES, decode_rows
from hardpoint_quantization.gguf_linear import GGUFLinear
from hardpoint_torch_runtime.layers import DenseWeight, GGUFWeight, Placement

CPU = torch.device("cpu")
HALVES: Mapping[str, tuple[int, ...]] = {**dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2)), "Q6_K": (208,)}
"""Where a block's floats lie; at its beginning unless said otherwise."""


def blocks(name: str, rows: int, inputs: int, seed: int = 0) -> np.ndarray:
    """Random bytes whose floats are ordinary numbers."""
    kind, generator = BLOCK_TYPES[name], np.random.default_rng(seed)
    raw = generator.integers(0, 256, (rows, kind.row_bytes(inputs)), dtype=np.uint8)
    each = raw.reshape(-1, kind.num_bytes)
    for at in HALVES.get(name, (0,)):
        each[:, at : at + 2] = generator.standard_normal((len(each), 1)).astype(np.float16).view(np.uint8)
    return raw


def packed(name: str, rows: int, inputs: int, seed: int = 0) -> WeightTensor:
    raw = blocks(name, rows, inputs, seed)
    kind = GGMLQuantizationType[name]
    return WeightTensor("w", f"gguf.{name.lower()}", (rows, inputs), raw, lambda: dequantize(raw, kind))


def floats(tensor: WeightTensor) -> torch.Tensor:
    assert tensor.dequantize is not None
    return torch.from_numpy(tensor.dequantize())


class Layer:
    """A module with its method, and what it was told about being dense."""

    def __init__(self, inputs: int, outputs: int, *, int8_activations: bool = False) -> None:
        self.reasons: list[str] = []
        self.module = torch.nn.Module()
        self.method = GGUFLinear(CPU, self.reasons.append, int8_activations=int8_activations)
        self.method.create_weights(self.module, LinearShape(inputs, (outputs,), "float32"))

    def load(self, tensor: WeightTensor, placement: Placement | None = None) -> None:
        self.method.load_packed(self.module, "weight", placement or Placement.whole(tensor.shape), tensor)

    def finish(self) -> None:
        self.method.process_after_loading(self.module)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.method.apply(self.module, x, None)


@pytest.mark.parametrize("name", BLOCK_TYPES)
@given(seed=st.integers(0, 1 << 16))
@settings(max_examples=10)
def test_blocks_mean_what_other_readers_make_of_them(name: str, seed: int) -> None:
    raw = blocks(name, 3, 512, seed)
    expected = torch.from_numpy(dequantize(raw, GGMLQuantizationType[name]))
    assert torch.equal(decode_rows(BLOCK_TYPES[name], torch.from_numpy(raw)), expected)


@pytest.mark.parametrize("int8_activations", [False, True])
def test_a_fused_layer_may_mix_types(int8_activations: bool) -> None:
    """Parts arrive in any order and lie in that of the outputs."""
    layer = Layer(256, 13, int8_activations=int8_activations)
    query, key, value = packed("Q4_K", 6, 256), packed("Q8_0", 4, 256), packed("Q5_0", 3, 256)
    layer.load(value, Placement((3, 256), 0, 0, 10, 3))
    layer.load(query, Placement((6, 256), 0, 0, 0, 6))
    layer.load(key, Placement((4, 256), 0, 0, 6, 4))
    layer.finish()
    dense = torch.cat([floats(query), floats(key), floats(value)])
    x = torch.randn(5, 256, generator=torch.Generator().manual_seed(0))
    expected = x.double() @ dense.double().T
    error = float((layer(x) - expected).norm() / expected.norm())
    assert error < (0.02 if int8_activations else 1e-5)
    stored = layer.method.stored(layer.module)
    assert isinstance(stored, GGUFWeight)
    assert [(part.type_name, len(part.data)) for part in stored.parts] == [("Q4_K", 6), ("Q8_0", 4), ("Q5_0", 3)]
    assert (stored.input_size, stored.int8_activations) == (256, int8_activations)


def test_blocks_are_not_copied() -> None:
    """What is mapped from a file stays there."""
    tensor, layer = packed("Q4_1", 8, 64), Layer(64, 4)
    layer.load(tensor, Placement((8, 64), 0, 4, 0, 4))
    layer.finish()
    (part,) = layer.method.parts(layer.module)
    assert part.data.data_ptr() == tensor.data[4:].ctypes.data


def test_rows_are_shared_between_ranks_at_blocks() -> None:
    tensor = packed("Q4_0", 3, 128)
    for rank in range(2):
        layer = Layer(64, 3)
        layer.load(tensor, Placement((3, 128), 1, 64 * rank, 0, 64))
        layer.finish()
        (part,) = layer.method.parts(layer.module)
        wanted = floats(tensor)[:, 64 * rank : 64 * rank + 64]
        assert torch.equal(decode_rows(BLOCK_TYPES["Q4_0"], part.data), wanted)


def test_ranks_that_would_cut_blocks_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"blocks of 256 \(Q4_K\).*shares of 128.*--tensor-parallel-size"):
        Layer(128, 3).load(packed("Q4_K", 3, 256), Placement((3, 256), 1, 128, 0, 128))


@pytest.mark.parametrize("damage", ["a row short", "a block short", "other numbers", "one dimension"])
def test_blocks_that_are_not_as_many_as_the_shape_says_are_refused(damage: str) -> None:
    tensor = packed("Q4_1", 4, 64)
    damaged = {
        "a row short": replace(tensor, data=tensor.data[:3]),
        "a block short": replace(tensor, data=np.ascontiguousarray(tensor.data[:, :20])),
        "other numbers": replace(tensor, data=tensor.data.view(np.int8)),
        "one dimension": replace(tensor, data=tensor.data.reshape(-1)),
    }[damage]
    with pytest.raises(ModelFormatError, match=r"'w' of shape \[4, 64\] in Q4_1.*bytes \[4, 40\].*download"):
        Layer(64, 4).load(damaged)


def test_what_is_no_known_block_makes_the_layer_dense_and_says_so() -> None:
    """Its other parts are unpacked with it."""
    values = torch.arange(128.0).view(2, 64)
    unknown = WeightTensor("w", "gguf.q2_9", (2, 64), np.zeros((2, 48), np.uint8), lambda: values.numpy())
    known, layer = packed("Q8_0", 2, 64), Layer(64, 4)
    layer.load(unknown, Placement((2, 64), 0, 0, 0, 2))
    layer.load(known, Placement((2, 64), 0, 0, 2, 2))
    layer.finish()
    assert layer.reasons == ["stored as Q2_9, which no packed form is kept of"]
    stored = layer.method.stored(layer.module)
    assert isinstance(stored, DenseWeight)
    assert torch.equal(stored.weight, torch.cat([values, floats(known)]))
    x = torch.ones(1, 64)
    torch.testing.assert_close(layer(x), x @ stored.weight.T)
    assert torch.equal(layer.method.look_up(layer.module, torch.tensor([1])), values[1:])


def test_a_dense_tensor_of_the_file_stays_dense() -> None:
    layer, values = Layer(64, 2), torch.ones(2, 64, dtype=torch.float16)
    layer.method.load_dense(layer.module, Placement.whole((2, 64)), values)
    layer.finish()
    assert layer.reasons == ["stored as float16, which no packed form is kept of"]
    assert layer(torch.ones(1, 64)).tolist() == [[64.0, 64.0]]


def test_a_format_that_nothing_unpacks_is_refused() -> None:
    strange = WeightTensor("w", "gguf.q9_9", (2, 64), np.zeros((2, 64), np.uint8))
    with pytest.raises(ModelFormatError, match="nothing unpacks"):
        Layer(64, 2).load(strange)


@pytest.mark.parametrize("name", BLOCK_TYPES)
def test_rows_are_looked_up_and_those_never_loaded_are_zeros(name: str) -> None:
    """The last rank's share of a vocabulary may end in rows that only fill it up."""
    tensor, layer = packed(name, 3, 256), Layer(256, 5)
    layer.load(tensor, Placement((8, 256), 0, 0, 0, 3))
    layer.finish()
    found = layer.method.look_up(layer.module, torch.tensor([2, 4, 0]))
    expected = floats(tensor)
    assert torch.equal(found, torch.stack([expected[2], torch.zeros(256), expected[0]]))
    assert layer(torch.ones(1, 256)).shape == (1, 5)


def test_what_is_kept_can_be_handed_over() -> None:
    layer: Any = Layer(64, 2)
    with pytest.raises(RuntimeError, match="not loaded yet"):
        layer.method.stored(layer.module)
    layer.load(packed("Q4_0", 2, 64))
    layer.finish()
    layer.method.release(layer.module)
    assert sum(tensor.nbytes for tensor in (*layer.module.parameters(), *layer.module.buffers())) == 0
    with pytest.raises(RuntimeError, match="released"):
        layer.method.stored(layer.module)
