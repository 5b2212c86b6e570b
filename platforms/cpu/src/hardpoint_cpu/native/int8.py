"""Linear layers with eight-bit weights: the kernels' bindings, and rounding weights to eight bits."""

from __future__ import annotations

import ctypes
from typing import Literal

import torch

from hardpoint_cpu.native.library import INT64, POINTER, NativeLibrary, NativeLinear, address

__all__ = ["MOST_INPUTS", "linear_int8", "quantize_rows"]

MOST_INPUTS = 1 << 17
"""Longer rows could overflow the kernels' sums of 32 bits."""


def linear_int8(
    library: NativeLibrary,
    values: torch.Tensor,
    scales: torch.Tensor,
    bias: torch.Tensor | None = None,
    activations: Literal["int8", "float"] = "int8",
) -> NativeLinear:
    """Packed copy of the weight ``values[o, i] * scales[o]``.

    With ``int8`` activations each row of a call is quantized on its own, symmetrically, its largest magnitude to 127;
    sums are exact, so a row's bits depend on nothing but the row. A row with a value that is not finite comes out as
    NaN, one whose magnitudes are all below 2**-119 as the bias. With ``float`` activations only weights are rounded.

    Args:
        values: int8 [O, I], rows contiguous, I at most ``MOST_INPUTS``.
        scales: float32 [O], finite.
        bias: float32 [O].

    Raises:
        ValueError: for any other shape, dtype, device or stride, for a scale that is not finite, and for unknown
            ``activations``.
    """
    if activations not in ("int8", "float"):
        raise ValueError(f"activations must be 'int8' or 'float', not {activations!r}")
    outputs, inputs = _shape_of_values(values)
    for name, vector in (("scales", scales), ("bias", bias)):
        if vector is not None:
            _demand_vector(name, vector, outputs)
    make = library.function(
        "hp_linear_i8", *([POINTER] * 2), INT64, POINTER, POINTER, INT64, INT64, ctypes.c_int, POINTER
    )
    handle = POINTER()
    stride = values.stride(0) if outputs > 1 else inputs
    arguments = (values.data_ptr(), stride, scales.data_ptr(), address(bias), outputs, inputs)
    library.check(make(library.runtime, *arguments, int(activations == "float"), ctypes.byref(handle)))
    return NativeLinear(library, handle, outputs, inputs)


def quantize_rows(weight: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """``weight`` [O, I] of any floating dtype as int8 [O, I] and scales float32 [O], a row's largest magnitude at 127.

    Ties round to even. Rows of zeros get the scale 0. Raises ``ValueError`` for another rank, for integers and for
    weights that are not finite.
    """
    if weight.dim() != 2 or not weight.is_floating_point():
        raise ValueError(f"weight must be a floating tensor [O, I], not {weight.dtype} {list(weight.shape)}")
    wide = weight.to(torch.float64)
    if not bool(torch.isfinite(wide).all()):
        raise ValueError("weight has values that are not finite, which eight bits cannot hold")
    scales = (wide.abs().amax(dim=1) / 127).to(torch.float32)
    # By the scale as it is kept, whose own rounding may carry a value past 127.
    divisors = torch.where(scales > 0, scales, 1).to(torch.float64)
    values = (wide / divisors[:, None]).round().clamp(-127, 127).to(torch.int8)
    return values, scales


def _shape_of_values(values: torch.Tensor) -> tuple[int, int]:
    if values.dtype is not torch.int8 or values.dim() != 2 or values.device.type != "cpu":
        raise ValueError(f"values must be a torch.int8 CPU tensor [O, I], not {values.dtype} {list(values.shape)}")
    if values.shape[1] > 1 and values.stride(1) != 1:
        raise ValueError(f"values must have contiguous rows, not strides {values.stride()}")
    return values.shape[0], values.shape[1]


def _demand_vector(name: str, vector: torch.Tensor, size: int) -> None:
    fits = vector.dtype is torch.float32 and vector.shape == (size,) and vector.device.type == "cpu"
    if not fits or not vector.is_contiguous():
        given = f"{vector.dtype} {list(vector.shape)} with strides {vector.stride()}"
        raise ValueError(f"{name} must be a contiguous torch.float32 CPU tensor [{size}], not {given}")
