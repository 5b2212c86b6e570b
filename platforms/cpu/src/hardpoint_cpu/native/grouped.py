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

__all__ = ["GGUF_TYPES", "Activations", "gguf_rows", "linear_concat", "linear_gguf", "linear_int4"]

Activations = Literal["int8", "float"]
GGUFParts = Sequence[tuple[str, torch.Tensor]]

GROUP = 32
GGUF_TYPES: dict[str, tuple[int, int]] = {
    "Q4_0": (32, 18),
    "Q4_1": (32, 20),
    "Q5_0": (32, 22),
    "Q5_1": (32, 24),
    "Q8_0": (32, 34),
    "Q4_K": (256, 144),
    "Q5_K": (256, 176),
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


def linear_int4(
    library: NativeLibrary,
    values: torch.Tensor,
    scales: torch.Tensor,
    mins: torch.Tensor,
    group_size: int,
    bias: torch.Tensor | None = None,
    *,
    activations: Activations = "int8",
    invariant: bool = False,
) -> NativeLinear:
    """A layer of int4 groups, w = scale * q + min, packed anew; the other arguments are those of ``linear_gguf``.

    Args:
        values: uint8 [O, I / 2]; every 32 inputs take 16 bytes, with input j in the low four bits of byte j and input
            j + 16 in its high ones.
        scales, mins: float32 [O, I / group_size]. Kept in fewer bytes where those give the same numbers back: scales
            that are float16 with mins that are float16, or that are a multiple of the scale.
        group_size: a multiple of 32 that divides I.

    Raises:
        ValueError: shapes or dtypes that do not fit one another.
    """
    if values.dtype is not torch.uint8 or values.dim() != 2 or values.device.type != "cpu":
        raise ValueError(f"values must be a uint8 CPU tensor [O, I / 2], not {values.dtype} {list(values.shape)}")
    outputs, inputs = values.shape[0], values.shape[1] * 2
    if group_size <= 0 or group_size % GROUP or inputs % group_size:
        raise ValueError(
            f"groups of {group_size} inputs do not fit {inputs} inputs; use a multiple of {GROUP} that divides them"
        )
    for name, given in (("scales", scales), ("mins", mins)):
        shape = [outputs, inputs // group_size]
        if given.dtype is not torch.float32 or list(given.shape) != shape or given.device.type != "cpu":
            raise ValueError(f"{name} must be a float32 CPU tensor {shape}, not {given.dtype} {list(given.shape)}")
    values, scales, mins = values.contiguous(), scales.contiguous(), mins.contiguous()
    bias = _bias(bias, outputs)
    make = library.function(
        "hp_linear_int4",
        *(POINTER, POINTER, POINTER, POINTER, INT64, INT64, INT64),
        *(POINTER, ctypes.c_int, ctypes.c_int, POINTER),
    )
    handle = POINTER()
    weight = (values.data_ptr(), scales.data_ptr(), mins.data_ptr(), outputs, inputs, group_size)
    options = (address(bias), _quantizes(activations), invariant)
    library.check(make(library.runtime, *weight, *options, ctypes.byref(handle)))
    return NativeLinear(library, handle, outputs, inputs)


def gguf_rows(library: NativeLibrary, name: str, table: torch.Tensor, ids: torch.Tensor) -> torch.Tensor:
    """Rows ``ids`` int64 [T] of ``table`` (uint8 [O, bytes of a row], of the GGUF type ``name``) as float32 [T, I].

    Raises ``ValueError`` for a type without kernels, a table that is not of whole blocks, or ids that it has no row of.
    """
    inputs = _inputs_of([(name, table)])
    if ids.dtype is not torch.int64 or ids.dim() != 1 or ids.device.type != "cpu":
        raise ValueError(f"ids must be an int64 CPU tensor [T], not {ids.dtype} {list(ids.shape)}")
    ids = ids.contiguous()
    out = torch.empty((ids.shape[0], inputs), dtype=torch.float32)
    decode = library.function(
        "hp_gguf_rows", *(POINTER, ctypes.c_char_p, POINTER, INT64, INT64, INT64), POINTER, INT64, POINTER
    )
    rows = (table.data_ptr(), table.shape[0], _stride(table), inputs)
    library.check(decode(library.runtime, name.encode(), *rows, ids.data_ptr(), ids.shape[0], out.data_ptr()))
    return out


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
        part.handle.value = None  # of the object that is freed with the part, too
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
