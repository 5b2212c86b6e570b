"""The answer to an attention problem in float64: one row and one mask at a time, no paging, nothing shared.

Legend: T tokens of the step, H query heads, K KV heads, D head size, V size of a head's values; q query tokens of a
row, k its keys.
"""

from __future__ import annotations

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint_testing_torch.attention_problems import AttentionProblem

__all__ = ["dense_attention", "visible_keys"]


def dense_attention(problem: AttentionProblem) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [T, H, V] and log-sum-exp [T, H], on the CPU. Keys and values are what the cache makes of them."""
    problem = problem.to("cpu")
    outputs, lses = [], []
    begin = first_key = 0
    for row, (_, length) in enumerate(problem.rows):
        fresh = problem.key_rows[row][1]
        keys, values = problem.visible_states(row, slice(first_key, first_key + fresh))
        output, lse = _dense_row(problem, row, problem.query[begin : begin + length].double(), keys, values)
        begin, first_key = begin + length, first_key + fresh
        outputs.append(output)
        lses.append(lse)
    return torch.cat(outputs), torch.cat(lses)


def visible_keys(problem: AttentionProblem, row: int) -> torch.Tensor:
    """Bool [q, k]: which keys each query of ``row`` sees, as ``CommonAttentionMetadata`` words it, and of these those
    that are selected, where some are."""
    seen = _plainly_visible(problem, row)
    if problem.selected is None:
        return seen
    first = sum(query for _, query in problem.rows[:row])
    chosen = torch.zeros_like(seen)
    for query, positions in enumerate(problem.selected[first : first + len(seen)].tolist()):
        chosen[query, [position for position in positions if 0 <= position < seen.shape[1]]] = True
    return seen & chosen


def _plainly_visible(problem: AttentionProblem, row: int) -> torch.Tensor:
    shape = problem.shape
    context, length = problem.rows[row]
    keys = torch.arange(sum(problem.key_rows[row]))
    if shape.kind is AttentionKind.ENCODER_DECODER:
        return torch.ones(length, len(keys), dtype=torch.bool)
    queries = torch.arange(context, context + length)[:, None]
    distance = queries - keys
    if problem.row_causality[row] or shape.keeps_prompt:
        seen = distance >= 0
    else:
        seen, distance = torch.ones_like(distance, dtype=torch.bool), distance.abs()
    if shape.sliding_window is not None:
        is_near = distance < shape.sliding_window
        if shape.keeps_prompt and problem.prompt_lens is not None:
            is_near |= keys < problem.prompt_lens[row]
        seen &= is_near
    if shape.chunk_size is not None:
        seen &= queries // shape.chunk_size == keys // shape.chunk_size
    for begin, end in problem.mm_ranges[row] if problem.mm_ranges is not None else ():
        seen |= (queries >= begin) & (queries < end) & (keys >= begin) & (keys < end)
    return seen


def _dense_row(
    problem: AttentionProblem, row: int, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    shape = problem.shape
    group = shape.num_heads // shape.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * shape.head_size**-0.5
    if shape.logits_soft_cap is not None:
        scores = shape.logits_soft_cap * torch.tanh(scores / shape.logits_soft_cap)
    if problem.alibi_slopes is not None:
        context = problem.rows[row][0]
        distance = torch.arange(context, context + len(query))[:, None] - torch.arange(len(keys))
        scores = scores - torch.tensor(problem.alibi_slopes, dtype=torch.float64)[:, None, None] * distance
    if problem.relative_bias is not None:
        context = problem.rows[row][0]
        distance = torch.arange(context, context + len(query))[:, None] - torch.arange(len(keys))
        bias = problem.relative_bias.double()
        scores = scores + bias[:, distance.clamp(0, bias.shape[1] - 1)]
    scores = scores.masked_fill(~visible_keys(problem, row), -torch.inf)
    if problem.sinks is not None:
        sink = problem.sinks.double()[:, None, None].expand(-1, len(query), 1)
        scores = torch.cat((scores, sink), dim=-1)
        values = torch.cat((values, values.new_zeros(1, *values.shape[1:])))
    lse = torch.logsumexp(scores, dim=-1)
    # A query that sees nothing has weights 0/0; its answer is zero.
    weights = torch.exp(scores - lse[..., None]).nan_to_num(0.0)
    return torch.einsum("hqk,khd->qhd", weights, values), lse.transpose(0, 1)
