"""Which keys a query sees, and which tiles of keys nobody in a block of queries sees.

Positions are absolute in a row: a query's is its row's number of cached tokens plus its place in the step, so chunks of
a prompt need no care of their own.
"""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["CAUSAL_ALL", "CAUSAL_NONE", "CAUSAL_ROWS", "find_row", "is_visible", "key_bounds"]

CAUSAL_NONE = tl.constexpr(0)
CAUSAL_ALL = tl.constexpr(1)
CAUSAL_ROWS = tl.constexpr(2)
"""Whether a row is causal is read from memory."""


@triton.jit
def find_row(starts: tl.tensor, block: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> tl.tensor:
    """The row that ``block`` belongs to.

    A row's blocks begin at ``starts[row] // BLOCK_Q + row``: room for all its queries however they are aligned, from
    the running sums of lengths alone. No schedule has to be made, and none can be stale.
    """
    left = 0
    right = num_rows
    while left < right:
        middle = (left + right) // 2
        is_before = tl.load(starts + middle) // BLOCK_Q + middle <= block
        left = tl.where(is_before, middle + 1, left)
        right = tl.where(is_before, right, middle)
    return left - 1


@triton.jit
def key_bounds(
    first: tl.tensor,
    last: tl.tensor,
    seq_len: tl.tensor,
    row: tl.tensor,
    masks: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    HAS_RANGES: tl.constexpr,
) -> tl.tensor:
    """Half-open range of keys outside of which no query position from ``first`` to ``last`` sees any.

    ``masks``: pointers to bool [R] causality, int32 [R] prompt lengths, int32 [R + 1] sums of range counts, and
    int32 [ranges, 2] of half-open ranges. What keeps of a prompt is visible in addition.
    """
    low = first * 0
    high = seq_len
    if CAUSAL == 1:
        high = tl.minimum(high, last + 1)
    if CAUSAL == 2:
        is_causal = tl.load(masks[0] + row).to(tl.int1)
        high = tl.where(is_causal, tl.minimum(high, last + 1), high)
    if WINDOW > 0:
        low = tl.maximum(low, first - WINDOW + 1)
        high = tl.minimum(high, last + WINDOW)
    if CHUNK > 0:
        low = tl.maximum(low, first // CHUNK * CHUNK)
        high = tl.minimum(high, (last // CHUNK + 1) * CHUNK)
    if HAS_RANGES:
        for index in range(tl.load(masks[2] + row), tl.load(masks[2] + row + 1)):
            begin = tl.load(masks[3] + 2 * index)
            end = tl.minimum(tl.load(masks[3] + 2 * index + 1), seq_len)
            touches = (begin <= last) & (end > first)
            low = tl.where(touches, tl.minimum(low, begin), low)
            high = tl.where(touches, tl.maximum(high, end), high)
    return low, high


@triton.jit
def is_visible(
    query: tl.tensor,
    key: tl.tensor,
    prompt_len: tl.tensor,
    row: tl.tensor,
    masks: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEPS_PROMPT: tl.constexpr,
    HAS_RANGES: tl.constexpr,
) -> tl.tensor:
    """[M, N] for positions ``query`` [M] and ``key`` [N]; ``masks`` as for ``key_bounds``."""
    distance = query[:, None] - key[None, :]
    shown = distance == distance
    if WINDOW > 0:
        # Where attention is causal the far side is hidden below; where it is not the window counts on both sides.
        shown = (distance < WINDOW) & (distance > -WINDOW)
    if KEEPS_PROMPT:
        shown = shown | (key < prompt_len)[None, :]
    if CHUNK > 0:
        shown = shown & (query[:, None] // CHUNK == key[None, :] // CHUNK)
    if CAUSAL == 1:
        shown = shown & (distance >= 0)
    if CAUSAL == 2:
        is_causal = tl.load(masks[0] + row).to(tl.int1)
        shown = shown & ((distance >= 0) | (is_causal == 0))
    if HAS_RANGES:
        for index in range(tl.load(masks[2] + row), tl.load(masks[2] + row + 1)):
            begin = tl.load(masks[3] + 2 * index)
            end = tl.load(masks[3] + 2 * index + 1)
            has_query = (query >= begin) & (query < end)
            has_key = (key >= begin) & (key < end)
            shown = shown | (has_query[:, None] & has_key[None, :])
    return shown
