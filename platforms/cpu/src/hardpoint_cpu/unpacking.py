"""Packed tensors of files as float32, by kernels: what layers without a packed form are loaded with."""

from __future__ import annotations

import torch

from hardpoint.interfaces.model_source import WeightTensor
from hardpoint_cpu.native.grouped import GGUF_TYPES, gguf_rows
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_torch_runtime.weights import shared_tensor

__all__ = ["unpack_rows"]

_PREFIX = "gguf."


def unpack_rows(library: NativeLibrary, tensor: WeightTensor) -> torch.Tensor | None:
    """float32 [R, I] of a matrix of GGUF blocks; None for other formats, and types that have no kernel."""
    name = tensor.dtype.removeprefix(_PREFIX).upper()
    if not tensor.dtype.startswith(_PREFIX) or name not in GGUF_TYPES or len(tensor.shape) != 2:
        return None
    rows = tensor.shape[0]
    return gguf_rows(library, name, shared_tensor(tensor.data).reshape(rows, -1), torch.arange(rows))
