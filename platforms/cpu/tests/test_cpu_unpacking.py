"""Packed tensors of files as floats, by kernels."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from hardpoint.interfaces.model_source import WeightTensor
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.platform import CpuOptions, CpuPlatform
from hardpoint_cpu.unpacking import unpack_rows
from hardpoint_torch_runtime.weights import UnpackingPlatform

SHAPE = (9, 64)


def halves() -> tuple[WeightTensor, torch.Tensor]:
    """Q8_0 rows, in each block of 34 bytes a scale of one half and 32 signed bytes; and their values."""
    blocks = np.random.default_rng(0).integers(0, 256, (SHAPE[0], 2, 34), dtype=np.uint8)
    blocks[..., :2] = np.asarray([0.5], dtype=np.float16).view(np.uint8)
    values = blocks[..., 2:].copy().view(np.int8).reshape(SHAPE).astype(np.float32) / 2
    raw = blocks.reshape(SHAPE[0], -1)
    return WeightTensor("w", "gguf.q8_0", SHAPE, raw, lambda: values), torch.from_numpy(values)


def test_rows_of_blocks_have_the_values_that_they_unpack_to_themselves(best_native: NativeLibrary) -> None:
    tensor, values = halves()
    tensor.data.flags.writeable = False
    found = unpack_rows(best_native, tensor)
    assert found is not None
    assert torch.equal(found, values)


@pytest.mark.parametrize(
    "tensor",
    [
        WeightTensor("w", "float32", SHAPE, np.zeros(SHAPE, dtype=np.float32)),
        WeightTensor("w", "gguf.iq2_xs", SHAPE, np.zeros((9, 18), dtype=np.uint8), lambda: np.zeros(SHAPE)),
        WeightTensor("w", "gguf.q8_0", (3, 3, 64), np.zeros((3, 3, 68), dtype=np.uint8), lambda: np.zeros(SHAPE)),
    ],
    ids=["plain", "no kernel", "a stack"],
)
def test_other_tensors_unpack_themselves(tensor: WeightTensor, best_native: NativeLibrary) -> None:
    assert unpack_rows(best_native, tensor) is None


def test_without_kernels_tensors_unpack_themselves() -> None:
    platform = CpuPlatform(CpuOptions(kernels="off"))
    assert isinstance(platform, UnpackingPlatform)
    assert platform.unpack(halves()[0]) is None
