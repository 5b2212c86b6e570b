"""Rotary positions, in place. Legend: T tokens, H heads, D head size, R rotated part of D."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, next_power_of_two

__all__ = ["rotary_embedding", "rotary_kernel", "rotate_neighbors"]

_TILE_PAIRS = 1024


@triton.jit
def rotary_kernel(
    heads: tl.tensor,
    cos: tl.tensor,
    sin: tl.tensor,
    num_heads: tl.tensor,
    token_stride: tl.tensor,
    head_stride: tl.tensor,
    value_stride: tl.tensor,
    half: tl.tensor,
    HEADS: tl.constexpr,
    PAIRS: tl.constexpr,
    NEIGHBORS: tl.constexpr,
) -> None:
    """Turn the pairs of HEADS heads of one token. ``cos``, ``sin`` float32 [T, R] contiguous, full width."""
    token = tl.program_id(0).to(tl.int64)
    head = (tl.program_id(1) * HEADS + tl.arange(0, HEADS))[:, None]
    pair = tl.arange(0, PAIRS)[None, :]
    if NEIGHBORS:
        first, second = 2 * pair, 2 * pair + 1
    else:
        first, second = pair, pair + half
    angle = token * 2 * half
    there = pair < half
    cos_first, cos_second = tl.load(cos + angle + first, mask=there), tl.load(cos + angle + second, mask=there)
    sin_first, sin_second = tl.load(sin + angle + first, mask=there), tl.load(sin + angle + second, mask=there)
    inside = there & (head < num_heads)
    begin = heads + token * token_stride + head * head_stride
    place_first, place_second = begin + first * value_stride, begin + second * value_stride
    x = tl.load(place_first, mask=inside, other=0.0).to(tl.float32)
    y = tl.load(place_second, mask=inside, other=0.0).to(tl.float32)
    kind = heads.dtype.element_ty
    tl.store(place_first, (x * cos_first + y * sin_first).to(kind), mask=inside)
    tl.store(place_second, (y * cos_second + x * sin_second).to(kind), mask=inside)


def _rotate(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int, neighbors: bool) -> None:
    num_tokens, num_heads, _ = heads.shape
    half = rotary_size // 2
    if not (num_tokens and num_heads and half):
        return
    pairs = next_power_of_two(half)
    together = min(next_power_of_two(num_heads), max(1, _TILE_PAIRS // pairs))
    rotary_kernel[(num_tokens, ceil_div(num_heads, together))](
        heads,
        cos.contiguous(),
        sin.contiguous(),
        num_heads,
        *heads.stride(),
        half,
        HEADS=together,
        PAIRS=pairs,
        NEIGHBORS=neighbors,
        num_warps=max(1, min(4, together * pairs // 256)),
    )


def rotary_embedding(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> torch.Tensor:
    """The seam ``rotary_embedding``: pairs (i, i + R/2)."""
    _rotate(heads, cos, sin, rotary_size, neighbors=False)
    return heads


def rotate_neighbors(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> None:
    """Pairs (2 i, 2 i + 1) of ``heads`` [T, H, D], in place; ``cos``, ``sin`` float32 [T, 1, R] as the seam's, but in
    the order of neighbors."""
    _rotate(heads, cos, sin, rotary_size, neighbors=True)
