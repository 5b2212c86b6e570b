"""How a linear's weight is kept, for whoever has a kernel that works on what is kept instead of on floats.

Legend: I input size, O output size (both of this rank), G inputs per group. All tensors are contiguous and must not be
written to; those of a model file may be mapped from it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol, TypeAlias, runtime_checkable

import torch

__all__ = [
    "NIBBLE_RUN",
    "ChannelInt8Weight",
    "DenseWeight",
    "GGUFPart",
    "GGUFWeight",
    "GroupedInt4Weight",
    "StoredLinearMethod",
    "StoredWeight",
]

NIBBLE_RUN = 32
"""Inputs whose four-bit values lie together in ``GroupedInt4Weight``: sixteen bytes."""


@dataclass(frozen=True, slots=True)
class DenseWeight:
    """``weight`` [O, I] in a floating dtype."""

    weight: torch.Tensor


@dataclass(frozen=True, slots=True)
class ChannelInt8Weight:
    """``values`` int8 [O, I] in [-127, 127] and ``scales`` float32 [O], not negative:
    w[o, i] = scales[o] * values[o, i].

    ``int8_activations``: the product is meant to be taken over whole numbers. Each row x of the activations is then
    rounded to int8 by itself, half to even, with the scale max |x| / 127 (a row of zeros stays one).
    """

    values: torch.Tensor
    scales: torch.Tensor
    int8_activations: bool = True


@dataclass(frozen=True, slots=True)
class GroupedInt4Weight:
    """w[o, i] = scales[o, i // G] * q[o, i] + mins[o, i // G], with q in [0, 15].

    ``values`` uint8 [O, I / 2]: every ``NIBBLE_RUN`` = 32 inputs take 16 bytes, whatever G is; byte j of them has
    input j in its low four bits and input j + 16 in its high ones. ``scales`` (not negative) and ``mins`` are float32
    [O, I / G]; G is a multiple of 32 and divides I. ``int8_activations``: activations are rounded as those of
    ``ChannelInt8Weight`` are, but every 32 inputs of a row by themselves.
    """

    values: torch.Tensor
    scales: torch.Tensor
    mins: torch.Tensor
    group_size: int
    int8_activations: bool = False


@dataclass(frozen=True, slots=True)
class GGUFPart:
    """``data`` uint8 [O of the part, bytes of a row]: blocks of the GGUF type ``type_name`` (``Q4_1``) as in files."""

    type_name: str
    data: torch.Tensor


@dataclass(frozen=True, slots=True)
class GGUFWeight:
    """Rows of ``parts`` behind one another make up O; a fused layer may have parts of different types.

    ``int8_activations`` as in ``GroupedInt4Weight``.
    """

    parts: tuple[GGUFPart, ...]
    input_size: int
    int8_activations: bool = False


StoredWeight: TypeAlias = DenseWeight | ChannelInt8Weight | GroupedInt4Weight | GGUFWeight


@runtime_checkable
class StoredLinearMethod(Protocol):
    """What a linear method adds when other code may compute with the weight it keeps.

    ``layer`` is the module that the method belongs to: a linear, or a vocabulary table whose tied head applies it.
    """

    def stored(self, layer: torch.nn.Module) -> StoredWeight:
        """What is kept, without a copy. Raises ``RuntimeError`` before loading has ended and after ``release``."""

    def release(self, layer: torch.nn.Module) -> None:
        """Drop the tensors, once a kernel has a copy of its own; ``apply`` must not be called any more."""
