"""Linear layers of weights that stay packed in groups of few bits: those of GGUF files, and int4 groups.

O: outputs; I: inputs; T: rows.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Literal

import torch

from hardpoint_cpu.native.library import INT64, POINTER, NativeLibrary, NativeLinear, address

__all__ = ["GGUF_TYPES", "Activations", "linear_concat", "linear_gguf"]

Activations = Literal["int8", "float"]
GGUFParts = Sequence[tuple[str, torch.Tensor]]

GGUF_TYPES: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q6_K": (256, 210),
}
"""Types that have kernels: weights in a block and bytes of a block."""


def linear_gguf(
    library: NativeLibrary,
    parts: GGUFParts,
    bias: torch.Tensor | None = None,
    *,
    activations: Activations = "int8",
    invariant: bool = False,
) -> NativeLinear:
    """A layer of GGUF weights, packed anew; the given tensors are not needed afterwards.

    Args:
        parts: type and rows as they lie in the file (uint8 [O of the part, bytes of a row], rows contiguous), one part
            after the other along the outputs.
        bias: float32 [O], or None.
        activations: ``int8`` rounds rows to eight bits per 32 inputs with a scale each; ``float`` keeps float32.
        invariant: take no path that gives a row other bits when more rows come with it.

    Raises:
        ValueError: a type without kernels, rows that are not whole blocks, or parts of different numbers of inputs.
    """
    inputs = _inputs_of(parts)
    outputs = sum(rows.shape[0] for _, rows in parts)
    bias = _bias(bias, outputs)
    quantizes = _quantizes(activations)
    made: list[NativeLinear] = []
    first = 0
    for name, run in groupby(parts, key=lambda part: part[0]):
        rows = [part for _, part in run]
        last = first + sum(part.shape[0] for part in rows)
        part_bias = None if bias is None else bias[first:last]
        made.append(_one_type(library, name, rows, inputs, part_bias, quantizes, invariant))
        first = last
    return made[0] if len(made) == 1 else linear_concat(library, made)


def linear_concat(library: NativeLibrary, parts: Sequence[NativeLinear]) -> NativeLinear:
    """One layer of ``parts``, whose outputs lie behind one another. Takes them over: they cannot be used afterwards.

    Raises ``ValueError`` when there is none or when they have different numbers of inputs.
    """
    taken = [part for part in parts if part.handle]
    if len(taken) != len(parts) or len({part.handle.value for part in taken}) != len(parts):
        raise ValueError("a part of a layer can be taken over once only")
    handles = (POINTER * len(taken))(*(part.handle for part in taken))
    outputs, inputs = sum(part.outputs for part in taken), taken[0].inputs if taken else 0
    for part in taken:
        part.handle = POINTER()
    handle = POINTER()
    make = library.function("hp_linear_concat", POINTER, INT64, POINTER)
    library.check(make(handles, len(taken), ctypes.byref(handle)))
    return NativeLinear(library, handle, outputs, inputs)


def _one_type(
    library: NativeLibrary,
    name: str,
    rows: Sequence[torch.Tensor],
    inputs: int,
    bias: torch.Tensor | None,
    quantizes: bool,
    invariant: bool,
) -> NativeLinear:
    make = library.function(
        "hp_linear_gguf",
        *(POINTER, ctypes.c_char_p, POINTER, POINTER, POINTER, INT64),
        *(INT64, POINTER, ctypes.c_int, ctypes.c_int, POINTER),
    )
    count = len(rows)
    places = (POINTER * count)(*(part.data_ptr() for part in rows))
    heights = (INT64 * count)(*(part.shape[0] for part in rows))
    strides = (INT64 * count)(*(_stride(part) for part in rows))
    handle = POINTER()
    shape = (places, heights, strides, count, inputs)
    options = (address(bias), quantizes, invariant)
    library.check(make(library.runtime, name.encode(), *shape, *options, ctypes.byref(handle)))
    return NativeLinear(library, handle, sum(heights), inputs)


def _inputs_of(parts: GGUFParts) -> int:
    if not parts:
        raise ValueError("a layer of GGUF weights needs at least one part")
    found = list(_widths(parts))
    if len(set(found)) > 1:
        raise ValueError(f"parts of a layer must have as many inputs each, not {found}")
    return found[0]


def _widths(parts: GGUFParts) -> Iterator[int]:
    for name, rows in parts:
        if name not in GGUF_TYPES:
            raise ValueError(f"weights of the GGUF type {name!r} have no kernel; allowed: {', '.join(GGUF_TYPES)}")
        elements, size = GGUF_TYPES[name]
        if rows.dtype is not torch.uint8 or rows.dim() != 2 or rows.device.type != "cpu":
            shape = list(rows.shape)
            raise ValueError(f"rows of {name} must be a uint8 CPU tensor [O, bytes], not {rows.dtype} {shape}")
        if rows.shape[1] > 1 and rows.stride(1) != 1:
            raise ValueError(f"rows of {name} must be contiguous, not of strides {rows.stride()}")
        if rows.shape[1] == 0 or rows.shape[1] % size:
            raise ValueError(f"rows of {name} must be whole blocks of {size} bytes, not {rows.shape[1]} bytes")
        yield rows.shape[1] // size * elements


def _stride(rows: torch.Tensor) -> int:
    # The stride of a dimension of size one means nothing.
    return rows.stride(0) if rows.shape[0] > 1 else rows.shape[1]


def _bias(bias: torch.Tensor | None, outputs: int) -> torch.Tensor | None:
    if bias is None:
        return None
    if bias.dtype is not torch.float32 or tuple(bias.shape) != (outputs,) or bias.device.type != "cpu":
        raise ValueError(f"bias must be a float32 CPU tensor [{outputs}], not {bias.dtype} {list(bias.shape)}")
    return bias.contiguous()


def _quantizes(activations: str) -> bool:
    if activations not in ("int8", "float"):
        raise ValueError(f"activations {activations!r} are unknown; allowed: int8, float")
    return activations == "int8"
