"""Rounding to eight bits and back, and the product of what was rounded. The arithmetic that kernels are held to.

Legend: T tokens, I input size, O output size.
"""

from __future__ import annotations

import torch

__all__ = ["CHUNK_WEIGHTS", "EXACT_INPUTS", "LARGEST_INT8", "int8_rows", "integer_product"]

LARGEST_INT8 = 127
"""-128 is never used, so that a value and its negative round alike."""

CHUNK_WEIGHTS = 1 << 18
"""Weights that are converted at once: temporaries take a few times four bytes of each, and should fit into a cache."""

EXACT_INPUTS = 1024
"""So many products of int8 values sum to less than 2 ** 24: float32 holds every partial sum exactly."""


def int8_rows(values: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., I] and float32 scales [...] of ``values`` [..., I], each row by itself.

    A row's scale is its largest magnitude over 127; values over it are rounded half to even. Rows of zeros, and rows
    too small to have a scale, become zeros with the scale 0.
    """
    floats = values.float()
    scales = floats.abs().amax(dim=-1) / LARGEST_INT8
    divisors = torch.where(scales > 0, scales, 1.0)
    return (floats / divisors.unsqueeze(-1)).round_().clamp_(-LARGEST_INT8, LARGEST_INT8).to(torch.int8), scales


def integer_product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """float32 [T, O] of int8 ``x`` [T, I] and ``weight`` [O, I]: the whole numbers, rounded to float32 once.

    Products of floats that are whole numbers are exact as long as the sums fit, in whatever order they are added.
    """
    output = torch.empty(len(x), len(weight), device=x.device)
    step = max(1, CHUNK_WEIGHTS // max(1, weight.shape[1]))
    for first in range(0, len(weight), step):
        output[:, first : first + step] = _product_of_few(x, weight[first : first + step])
    return output


def _product_of_few(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    num_inputs = x.shape[1]
    if num_inputs <= EXACT_INPUTS:
        return torch.nn.functional.linear(x.float(), weight.float())
    total = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for begin in range(0, num_inputs, EXACT_INPUTS):
        end = begin + EXACT_INPUTS
        total += torch.nn.functional.linear(x[:, begin:end].float(), weight[:, begin:end].float())
    return total.float()
