"""The product with weights that are unpacked a few rows at a time, and the rounding of activations in groups.

Legend: T tokens, I input size, O output size.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from hardpoint_quantization.rounding import int8_rows

__all__ = ["ACTIVATION_GROUP", "product_of_pieces", "rounded_in_groups"]

ACTIVATION_GROUP = 32
"""Inputs of a row of activations that are rounded with one scale."""


def rounded_in_groups(x: torch.Tensor) -> torch.Tensor:
    """float32 [..., I]: every 32 inputs of a row rounded to int8 with a scale of their own, and turned back."""
    rounded, scales = int8_rows(x.unflatten(-1, (-1, ACTIVATION_GROUP)))
    return (rounded * scales.unsqueeze(-1)).flatten(-2)


def product_of_pieces(
    x: torch.Tensor,
    pieces: Iterable[torch.Tensor],
    bias: torch.Tensor | None,
    output_size: int,
    *,
    int8_activations: bool,
) -> torch.Tensor:
    """[..., O] in the dtype of ``x`` [..., I]; ``pieces`` are float32 rows [some of O, I] in order."""
    flat = x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float()
    if int8_activations:
        flat = rounded_in_groups(flat)
    output = torch.empty(len(flat), output_size, device=x.device)
    first = 0
    for piece in pieces:
        output[:, first : first + len(piece)] = torch.nn.functional.linear(flat, piece)
        first += len(piece)
    if bias is not None:
        output += bias
    return output.view(*x.shape[:-1], output_size).to(x.dtype)
