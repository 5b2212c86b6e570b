"""Mixture of experts as two grouped products. Legend: T tokens, C hidden size, M intermediate size, E experts, K
experts per token; pair p belongs to token p // K.

Tokens are grouped by expert, every group padded to blocks of rows; a program computes one tile of one block with its
expert's weights. Between the products the gated activation runs over all pairs; at the end a token's K results are
summed in their own order, in float32 and with its weights.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.availability import is_interpreted
from hardpoint_triton_kernels.kernels.activation import act_and_mul
from hardpoint_triton_kernels.kernels.common import ceil_div, next_power_of_two
from hardpoint_triton_kernels.kernels.moe_align import ExpertBlocks, align_experts

__all__ = ["TILES", "GroupedTile", "fused_moe", "grouped_product_kernel", "sum_choices_kernel"]

_WIDEST = 1024


@dataclass(frozen=True, slots=True)
class GroupedTile:
    """``rows`` x ``columns`` of the result by steps of ``depth``; for up to ``most_rows`` pairs per expert."""

    rows: int
    columns: int
    depth: int
    warps: int
    stages: int
    most_rows: int | None = None


TILES = {
    2: (
        GroupedTile(16, 64, 128, 4, 3, most_rows=16),
        GroupedTile(32, 64, 64, 4, 3, most_rows=48),
        GroupedTile(64, 128, 32, 4, 3),
    ),
    4: (GroupedTile(16, 32, 64, 4, 2, most_rows=16), GroupedTile(32, 64, 32, 4, 2)),
}
"""By bytes of an entry, in order of size."""


@triton.jit
def grouped_product_kernel(
    source: tl.tensor,
    weights: tl.tensor,
    target: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    num_pairs: tl.tensor,
    size: tl.tensor,
    depth: tl.tensor,
    pairs_per_row: tl.tensor,
    source_stride: tl.tensor,
    expert_stride: tl.tensor,
    output_stride: tl.tensor,
    ROWS: tl.constexpr,
    COLUMNS: tl.constexpr,
    DEPTH: tl.constexpr,
    UPCAST: tl.constexpr,
) -> None:
    """``target`` [pairs, size] contiguous: row p is row ``p // pairs_per_row`` of ``source`` times its expert's
    ``weights`` [size, depth]. UPCAST: multiply in float32."""
    expert = tl.load(experts + tl.program_id(0)).to(tl.int64)
    if expert < 0:
        return
    pair = tl.load(pairs + tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)
    column = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    step = tl.arange(0, DEPTH)
    is_pair = pair < num_pairs
    left = source + (pair // pairs_per_row)[:, None] * source_stride + step[None, :]
    right = weights + expert * expert_stride + column[None, :].to(tl.int64) * output_stride + step[:, None]
    total = tl.zeros((ROWS, COLUMNS), dtype=tl.float32)
    for begin in range(0, depth, DEPTH):
        a = tl.load(left + begin, mask=is_pair[:, None] & (begin + step[None, :] < depth), other=0.0)
        b = tl.load(right + begin, mask=(column[None, :] < size) & (begin + step[:, None] < depth), other=0.0)
        if UPCAST:
            a, b = a.to(tl.float32), b.to(tl.float32)
        total = tl.dot(a, b, total, input_precision="ieee")
    place = target + pair[:, None] * size + column[None, :]
    tl.store(place, total.to(target.dtype.element_ty), mask=is_pair[:, None] & (column[None, :] < size))


@triton.jit
def sum_choices_kernel(
    source: tl.tensor,
    weights: tl.tensor,
    chosen: tl.tensor,
    target: tl.tensor,
    size: tl.tensor,
    num_experts: tl.tensor,
    CHOICES: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """``target`` [T, C] from ``source`` [T K, C] and ``weights`` float32 [T, K]; others' choices count nothing."""
    token = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    total = tl.zeros((WIDTH,), dtype=tl.float32)
    for choice in range(CHOICES):
        pair = token * CHOICES + choice
        expert = tl.load(chosen + pair)
        # A limit rather than a mask of one entry, which the interpreter does not spread.
        inside = column < tl.where((expert >= 0) & (expert < num_experts), size, 0)
        x = tl.load(source + pair * size + column, mask=inside, other=0.0).to(tl.float32)
        total += tl.where(inside, tl.load(weights + pair), 0.0) * x
    tl.store(target + token * size + column, total.to(target.dtype.element_ty), mask=column < size)


def choose_tile(num_pairs: int, num_experts: int, itemsize: int) -> GroupedTile:
    """By how many pairs an expert has if all are chosen alike."""
    share = ceil_div(num_pairs, num_experts)
    return next(tile for tile in TILES[itemsize] if tile.most_rows is None or share <= tile.most_rows)


def _product(
    source: torch.Tensor, weights: torch.Tensor, blocks: ExpertBlocks, num_pairs: int, tile: GroupedTile, per_row: int
) -> torch.Tensor:
    size, depth = weights.shape[1:]
    target = torch.empty(num_pairs, size, dtype=source.dtype, device=source.device)
    grouped_product_kernel[len(blocks.experts), ceil_div(size, tile.columns)](
        source,
        weights,
        target,
        blocks.pairs,
        blocks.experts,
        num_pairs,
        size,
        depth,
        per_row,
        source.stride(0),
        weights.stride(0),
        weights.stride(1),
        ROWS=tile.rows,
        COLUMNS=tile.columns,
        DEPTH=tile.depth,
        # The interpreter's products of bfloat16 are wrong.
        UPCAST=is_interpreted(grouped_product_kernel),
        num_warps=tile.warps,
        num_stages=tile.stages,
    )
    return target


def fused_moe(
    hidden: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    activation: str,
) -> torch.Tensor:
    """[T, C], the weighted sum of K experts' gated blocks for ``hidden`` [T, C].

    ``gate_up`` [E, 2 M, C] (gate first) and ``down`` [E, C, M] of the dtype of ``hidden``, ``weights`` float32 [T, K],
    ``chosen`` int64 [T, K]; choices outside [0, E), such as other ranks' experts, count nothing. Raises ``ValueError``
    for weights whose rows are not contiguous, for other dtypes and for an unknown activation.
    """
    if hidden.element_size() not in TILES or {gate_up.dtype, down.dtype} != {hidden.dtype}:
        raise ValueError(
            f"tokens of {hidden.dtype} cannot be multiplied with experts of {gate_up.dtype} and {down.dtype}; give "
            "all of them one dtype of 16 or 32 bits"
        )
    if gate_up.stride(-1) != 1 or down.stride(-1) != 1:
        raise ValueError(f"rows of experts must be contiguous, but strides are {gate_up.stride()} and {down.stride()}")
    output = torch.empty(hidden.shape, dtype=hidden.dtype, device=hidden.device)
    num_tokens, num_chosen = chosen.shape
    if not output.numel():
        return output
    source = hidden if hidden.stride(-1) == 1 else hidden.contiguous()
    num_pairs, num_experts = chosen.numel(), len(gate_up)
    tile = choose_tile(num_pairs, num_experts, hidden.element_size())
    blocks = align_experts(chosen, num_experts, tile.rows)
    inner = act_and_mul(_product(source, gate_up, blocks, num_pairs, tile, num_chosen), activation)
    outer = _product(inner, down, blocks, num_pairs, tile, 1)
    width = min(_WIDEST, next_power_of_two(output.shape[1]))
    sum_choices_kernel[num_tokens, ceil_div(output.shape[1], width)](
        outer,
        weights.contiguous(),
        chosen.contiguous(),
        output,
        output.shape[1],
        num_experts,
        CHOICES=num_chosen,
        WIDTH=width,
    )
    return output
