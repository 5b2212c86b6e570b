"""Putting partial attentions together by their log-sum-exps: parts of one split, and two results from elsewhere."""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_attention.triton.kernels.scores import LOG2_E

__all__ = ["LN_2", "combine_parts", "merge_pair"]

LN_2 = tl.constexpr(0.6931471805599453)


@triton.jit
def combine_parts(
    parts: tl.tensor,
    part_lse: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    SPLITS: tl.constexpr,
) -> None:
    """float32 parts [T, H, S, V] with base-2 log-sum-exps [T, H, S] to output [T, H, V], and natural log-sum-exp [T, H]
    where that is not None. One program per token and head; parts are added in one order."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    entry = tl.arange(0, PAD)
    part = tl.arange(0, SPLITS)
    logs = tl.load(part_lse[0] + token * part_lse[1] + head * part_lse[2] + part * part_lse[3])
    largest = tl.max(logs, 0)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    total = tl.sum(tl.exp2(logs - base), 0)
    place = token * parts[1] + head * parts[2] + part * parts[3]
    in_use = entry < SIZE
    values = tl.load(parts[0] + place[:, None] + (entry * parts[4])[None, :], mask=in_use[None, :], other=0.0)
    acc = tl.sum(tl.exp2(logs - base)[:, None] * values, 0)
    divisor = tl.where(total > 0, total, 1.0)
    result = (acc / divisor).to(output[0].dtype.element_ty)
    tl.store(output[0] + token * output[1] + head * output[2] + entry * output[3], result, mask=in_use)
    if lse is not None:
        value = tl.where(total > 0, (base + tl.log2(divisor)) * LN_2, float("-inf"))
        tl.store(lse[0] + token * lse[1] + head * lse[2], value)


@triton.jit
def merge_pair(
    left: tl.tensor,
    left_lse: tl.tensor,
    right: tl.tensor,
    right_lse: tl.tensor,
    output: tl.tensor,
    lse: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
) -> None:
    """Two outputs [T, H, V] with natural log-sum-exps [T, H] to one; ``lse`` [T, H] or None."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    entry = tl.arange(0, PAD)
    in_use = entry < SIZE
    first = tl.load(left_lse[0] + token * left_lse[1] + head * left_lse[2]) * LOG2_E
    second = tl.load(right_lse[0] + token * right_lse[1] + head * right_lse[2]) * LOG2_E
    largest = tl.maximum(first, second)
    base = tl.where(largest > float("-inf"), largest, 0.0)
    first_weight = tl.exp2(first - base)
    second_weight = tl.exp2(second - base)
    total = first_weight + second_weight
    divisor = tl.where(total > 0, total, 1.0)
    one = tl.load(left[0] + token * left[1] + head * left[2] + entry * left[3], mask=in_use, other=0.0)
    other = tl.load(right[0] + token * right[1] + head * right[2] + entry * right[3], mask=in_use, other=0.0)
    # A part without keys has the weight zero, but may hold anything.
    acc = tl.where(first_weight > 0, one.to(tl.float32) * first_weight, 0.0)
    acc += tl.where(second_weight > 0, other.to(tl.float32) * second_weight, 0.0)
    result = (acc / divisor).to(output[0].dtype.element_ty)
    tl.store(output[0] + token * output[1] + head * output[2] + entry * output[3], result, mask=in_use)
    if lse is not None:
        value = tl.where(total > 0, (base + tl.log2(divisor)) * LN_2, float("-inf"))
        tl.store(lse[0] + token * lse[1] + head * lse[2], value)
