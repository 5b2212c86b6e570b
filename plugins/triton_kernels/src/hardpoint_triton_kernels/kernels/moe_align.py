"""Deals (token, expert) pairs out to blocks of rows that share an expert, without sorting or asking the host.

Legend: T tokens, K experts per token, E experts, M rows of a block, B blocks at most. Pair p belongs to token p // K.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, next_power_of_two

__all__ = ["ExpertBlocks", "align_experts", "count_pairs_kernel", "deal_pairs_kernel"]

_WIDEST = 1024


@dataclass(frozen=True, slots=True)
class ExpertBlocks:
    """``pairs`` int32 [B M], T K or more where a row is empty; ``experts`` int32 [B], -1 behind the last block."""

    pairs: torch.Tensor
    experts: torch.Tensor
    block_rows: int


@triton.jit
def count_pairs_kernel(chosen: tl.tensor, counts: tl.tensor, num_pairs: tl.tensor, WIDTH: tl.constexpr) -> None:
    """``counts`` int32 [E] of ``chosen`` int64 [T K]; a program counts one expert."""
    expert = tl.program_id(0)
    lanes = tl.arange(0, WIDTH)
    found = tl.zeros((WIDTH,), dtype=tl.int32)
    for begin in range(0, num_pairs, WIDTH):
        place = begin + lanes
        found += (tl.load(chosen + place, mask=place < num_pairs, other=-1) == expert).to(tl.int32)
    tl.store(counts + expert, tl.sum(found))


@triton.jit
def deal_pairs_kernel(
    chosen: tl.tensor,
    counts: tl.tensor,
    pairs: tl.tensor,
    experts: tl.tensor,
    num_pairs: tl.tensor,
    num_experts: tl.tensor,
    ROWS: tl.constexpr,
    EXPERTS: tl.constexpr,
    WIDTH: tl.constexpr,
) -> None:
    """A program writes the blocks of one expert: its pairs in order, behind those of the experts before it."""
    expert = tl.program_id(0)
    every = tl.arange(0, EXPERTS)
    numbers = tl.load(counts + every, mask=every < num_experts, other=0)
    blocks = (numbers + ROWS - 1) // ROWS
    first_block = tl.sum(tl.where(every < expert, blocks, 0))
    num_blocks = tl.sum(tl.where(every == expert, blocks, 0))
    for block in range(0, num_blocks):
        tl.store(experts + first_block + block, expert)
    lanes = tl.arange(0, WIDTH)
    done = tl.full((), 0, dtype=tl.int32)
    for begin in range(0, num_pairs, WIDTH):
        place = begin + lanes
        mine = (tl.load(chosen + place, mask=place < num_pairs, other=-1) == expert).to(tl.int32)
        rank = done + tl.cumsum(mine, axis=0) - 1
        tl.store(pairs + first_block * ROWS + rank, place, mask=mine != 0)
        done += tl.sum(mine)


def align_experts(chosen: torch.Tensor, num_experts: int, block_rows: int) -> ExpertBlocks:
    """Of ``chosen`` int64 [T, K]. Pairs of experts outside [0, E) are in no block. Sizes follow from shapes alone."""
    num_pairs = chosen.numel()
    # Every expert that is chosen leaves at most one block partly empty.
    most = ceil_div(num_pairs, block_rows) + min(num_experts, num_pairs)
    pairs = torch.full((most * block_rows,), num_pairs, dtype=torch.int32, device=chosen.device)
    experts = torch.full((most,), -1, dtype=torch.int32, device=chosen.device)
    counts = torch.empty(num_experts, dtype=torch.int32, device=chosen.device)
    flat = chosen.contiguous()
    width = min(_WIDEST, next_power_of_two(num_pairs))
    count_pairs_kernel[(num_experts,)](flat, counts, num_pairs, WIDTH=width)
    deal_pairs_kernel[(num_experts,)](
        flat,
        counts,
        pairs,
        experts,
        num_pairs,
        num_experts,
        ROWS=block_rows,
        EXPERTS=next_power_of_two(num_experts),
        WIDTH=width,
    )
    return ExpertBlocks(pairs, experts, block_rows)
