"""Attention of one group of rows from its queries, keys and values.

Legend: n tokens of a group (R rows x Q queries), H query heads, K KV heads, G = H / K, D head size of queries and keys,
V of values and outputs, S key positions.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from hardpoint_attention.reference.groups import RowGroup

__all__ = ["ScoreRules", "attend", "attend_explicitly"]


@dataclass(frozen=True, slots=True)
class ScoreRules:
    """What becomes of query-key products. ``slopes`` and ``sinks``: float32 [H]; ``bias``: float32 [H, N] by distance,
    the last entry for all that are larger."""

    scale: float
    cap: float | None = None
    slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    bias: torch.Tensor | None = None


def attend(
    group: RowGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, scale: float
) -> torch.Tensor:
    """Torch's fused attention: [n, H, D], keys [R, K, S, D] and values [R, K, S, D] to [R, Q, H, D]."""
    rows, queries, kv_heads = group.num_rows, group.num_queries, keys.shape[1]
    heads, size = query.shape[1:]
    if queries == 1:
        # The G heads of a KV head act as G queries of one head: nothing is repeated.
        grouped = query.view(rows, kv_heads, heads // kv_heads, size)
        mask = None if group.mask is None else group.mask.expand(-1, -1, heads // kv_heads, -1)
        attended = F.scaled_dot_product_attention(grouped, keys, values, attn_mask=mask, scale=scale)
        return attended.reshape(rows, 1, heads, size)
    attended = F.scaled_dot_product_attention(
        query.view(rows, queries, heads, size).transpose(1, 2),
        keys,
        values,
        attn_mask=group.mask,
        is_causal=group.is_causal,
        scale=scale,
        enable_gqa=heads != kv_heads,
    )
    return attended.transpose(1, 2)


def attend_explicitly(
    group: RowGroup, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, rules: ScoreRules
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H, D], keys [R, K, S, D] and values [R, K, S, V] to ([R, Q, H, V] and log-sum-exp [R, Q, H]), both float32.

    Sinks are in the log-sum-exp. A query that sees no key has zeros, and -inf unless there are sinks.
    """
    rows, queries, kv_heads = group.num_rows, group.num_queries, keys.shape[1]
    heads, size = query.shape[1:]
    grouped = query.float().view(rows, queries, kv_heads, heads // kv_heads, size).permute(0, 2, 3, 1, 4)
    # The G heads of a KV head act as more queries of one head: its keys and values are not repeated.
    merged = grouped.reshape(rows, kv_heads, -1, size)
    scores = torch.matmul(merged, keys.float().transpose(-1, -2)).mul_(rules.scale)
    scores = scores.unflatten(2, (-1, queries))
    if rules.cap is not None:
        scores = scores.div_(rules.cap).tanh_().mul_(rules.cap)
    if rules.slopes is not None and group.distance is not None:
        slopes = rules.slopes.to(scores.device).view(1, kv_heads, -1, 1, 1)
        scores -= slopes * group.distance[:, None, None]
    if rules.bias is not None and group.distance is not None:
        # Negative distances are masked, and only have to be a valid place.
        places = group.distance.long().clamp_(0, rules.bias.shape[1] - 1)
        by_head = rules.bias.float().to(scores.device)[:, places].transpose(0, 1)
        scores += by_head.unflatten(1, (kv_heads, -1))
    if group.mask is not None:
        scores += group.mask.unsqueeze(1)
    lse = torch.logsumexp(scores, dim=-1)
    if rules.sinks is not None:
        sinks = rules.sinks.float().view(1, kv_heads, -1, 1)
        lse = torch.logaddexp(lse, sinks.expand_as(lse))
    # -inf less -inf would be NaN where nothing is seen.
    weights = (scores - lse.masked_fill(lse == -torch.inf, 0.0).unsqueeze(-1)).exp_()
    attended = torch.matmul(weights.flatten(2, 3), values.float()).unflatten(2, (-1, queries))
    output = attended.permute(0, 3, 1, 2, 4).reshape(rows, queries, heads, -1)
    return output, lse.permute(0, 3, 1, 2).reshape(rows, queries, heads)
