"""Scores in units of the base-2 logarithm, and the online softmax over tiles of them."""

from __future__ import annotations

import triton
import triton.language as tl

__all__ = ["LOG2_E", "finish", "hyperbolic_tangent", "shape_scores", "start_softmax", "update_softmax"]

LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def hyperbolic_tangent(x: tl.tensor) -> tl.tensor:
    """tanh with the relative precision of float32, so that a cap far above the scores leaves them as they are.

    Away from zero 1 - 2 / (e^(2 x) + 1), which holds at both ends: e^(2 x) may overflow to infinity or vanish. Near
    zero that would cancel; there the first terms of the Taylor series do, the next of which is below 1e-8 of the whole.
    """
    far = 1 - 2 / (tl.exp2(x * (2 * LOG2_E)) + 1)
    square = x * x
    series = -17.0 / 315.0 + square * (62.0 / 2835.0)
    series = -1.0 / 3.0 + square * (2.0 / 15.0 + square * series)
    return tl.where(tl.abs(x) < 0.25, x + x * square * series, far)


@triton.jit
def shape_scores(
    products: tl.tensor, query: tl.tensor, key: tl.tensor, head: tl.tensor, is_head: tl.tensor, shaping: tl.tensor
) -> tl.tensor:
    """Products of queries and keys [M, N] to scores times log2(e).

    ``shaping``: the factor of products, the soft cap or None, the pointer to ALiBi slopes [H] or None, and sinks.
    """
    if shaping[1] is not None:
        scores = shaping[1] * hyperbolic_tangent(products * (shaping[0] / shaping[1]))
    else:
        scores = products * shaping[0]
    if shaping[2] is not None:
        slopes = tl.load(shaping[2] + head, mask=is_head, other=0.0)
        scores += slopes[:, None] * (key[None, :] - query[:, None]).to(tl.float32)
    return scores * LOG2_E


@triton.jit
def start_softmax(
    head: tl.tensor, is_head: tl.tensor, has_sink: tl.tensor, shaping: tl.tensor, BLOCK_M: tl.constexpr
) -> tl.tensor:
    """Running maximum and sum [M] before the first key; a sink, of the first part only, is a key without a value."""
    largest = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    if shaping[3] is not None:
        sinks = tl.load(shaping[3] + head, mask=is_head, other=float("-inf")).to(tl.float32)
        largest = tl.where(has_sink, sinks * LOG2_E, float("-inf"))
        total = tl.where(largest > float("-inf"), 1.0, 0.0)
    return largest, total


@triton.jit
def update_softmax(scores: tl.tensor, largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Weights [M, N] of a further tile, the factor [M] of everything before, and the new maximum and sum."""
    new_largest = tl.maximum(largest, tl.max(scores, 1))
    # Rows that have seen nothing yet stay at nothing: minus infinity less itself would be no number.
    base = tl.where(new_largest > float("-inf"), new_largest, 0.0)
    weights = tl.exp2(scores - base[:, None])
    factor = tl.exp2(largest - base)
    return weights, factor, new_largest, total * factor + tl.sum(weights, 1)


@triton.jit
def finish(acc: tl.tensor, largest: tl.tensor, total: tl.tensor) -> tl.tensor:
    """Normalized output [M, V], zero where nothing was seen, and the base-2 log-sum-exp [M]."""
    has_seen = total > 0
    divisor = tl.where(has_seen, total, 1.0)
    lse = tl.where(has_seen, largest + tl.log2(divisor), float("-inf"))
    return acc / divisor[:, None], lse
