"""Top-k and top-p as one cut-off value per row, found without sorting. Legend: S rows, V vocabulary.

Floats in order of value are whole numbers in order: the cut is searched for bit by bit among those numbers, two bits in
each pass over the row. What is looked for is the largest number that enough of the row (by count, or by probability)
is not below; everything below it is excluded, ties stay in. No row depends on another, and none on an order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import next_power_of_two

__all__ = ["top_k_top_p", "truncation_kernel"]

_WIDEST = 4096
_WARPS = 8


@triton.jit
def _ordered(x: tl.tensor) -> tl.tensor:
    """int32 whose order is that of float32 ``x``; both zeros are one number."""
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def _three_masses(
    row: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    first: tl.tensor,
    step: tl.tensor,
    peak: tl.tensor,
    WIDTH: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """How much of the row is at or above ``first``, ``first + step`` and ``first + 2 step``, of what is at or above
    ``low``: entries, or their probabilities times a constant."""
    lanes = tl.arange(0, WIDTH)
    one = tl.zeros((WIDTH,), dtype=tl.float32)
    two = tl.zeros((WIDTH,), dtype=tl.float32)
    three = tl.zeros((WIDTH,), dtype=tl.float32)
    for begin in range(0, size, WIDTH):
        inside = begin + lanes < size
        x = tl.load(row + begin + lanes, mask=inside, other=float("-inf"))
        key = _ordered(x)
        weight = tl.where(inside & (key >= low), 1.0, 0.0)
        if BY_MASS:
            # Infinity less itself would be no number.
            weight = weight * tl.where(x == peak, 1.0, tl.exp(x - peak))
        one += tl.where(key >= first, weight, 0.0)
        two += tl.where(key >= first + step, weight, 0.0)
        three += tl.where(key >= first + step + step, weight, 0.0)
    return tl.sum(one), tl.sum(two), tl.sum(three)


@triton.jit
def _search(
    row: tl.tensor,
    size: tl.tensor,
    low: tl.tensor,
    wanted: tl.tensor,
    peak: tl.tensor,
    WIDTH: tl.constexpr,
    BY_MASS: tl.constexpr,
) -> tl.tensor:
    """The largest number at or above which at least ``wanted`` of the row is; the least of all if never so much."""
    found = tl.full((), -2147483648, dtype=tl.int32)
    step = tl.full((), 1073741824, dtype=tl.int32)
    for _ in range(16):
        one, two, three = _three_masses(row, size, low, found + step, step, peak, WIDTH, BY_MASS)
        # Step by step, since three of the first are more than fits.
        found = tl.where(one >= wanted, found + step, found)
        found = tl.where(two >= wanted, found + step, found)
        found = tl.where(three >= wanted, found + step, found)
        step = step // 4
    return found


@triton.jit
def truncation_kernel(
    logits: tl.tensor, top_k: tl.tensor, top_p: tl.tensor, size: tl.tensor, row_stride: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """One row of float32 ``logits``, in place; ``top_k`` int64 [S] or None, ``top_p`` float32 [S] or None."""
    number = tl.program_id(0)
    row = logits + number.to(tl.int64) * row_stride
    lanes = tl.arange(0, WIDTH)
    highest = tl.full((WIDTH,), float("-inf"), dtype=tl.float32)
    for begin in range(0, size, WIDTH):
        highest = tl.maximum(highest, tl.load(row + begin + lanes, mask=begin + lanes < size, other=float("-inf")))
    peak = tl.max(highest)
    cut = tl.full((), -2147483648, dtype=tl.int32)
    if top_k is not None:
        rank = tl.load(top_k + number)
        if (rank > 0) & (rank < size):
            cut = _search(row, size, cut, rank.to(tl.float32), peak, WIDTH, False)
    if top_p is not None:
        share = tl.load(top_p + number)
        if share < 1.0:
            mass, _, _ = _three_masses(row, size, cut, cut, 0, peak, WIDTH, True)
            found = _search(row, size, cut, share * mass, peak, WIDTH, True)
            # The best stays, however small the share.
            cut = tl.minimum(tl.maximum(found, cut), _ordered(peak))
    if cut > -2147483648:
        for begin in range(0, size, WIDTH):
            inside = begin + lanes < size
            x = tl.load(row + begin + lanes, mask=inside, other=float("-inf"))
            tl.store(row + begin + lanes, float("-inf"), mask=inside & (_ordered(x) < cut))


def top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """The seam ``top_k_top_p``. Raises ``ValueError`` for rows that are not contiguous."""
    if logits.stride(-1) != 1:
        raise ValueError(f"rows of logits must be contiguous, but the strides are {logits.stride()}")
    num_rows, size = logits.shape
    if num_rows and (top_k is not None or top_p is not None):
        width = min(_WIDEST, next_power_of_two(size))
        truncation_kernel[(num_rows,)](logits, top_k, top_p, size, logits.stride(0), WIDTH=width, num_warps=_WARPS)
    return logits
