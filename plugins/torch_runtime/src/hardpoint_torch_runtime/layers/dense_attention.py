"""Attention within whole sequences, without a cache: what encoders beside a decoder need.

Legend: E tokens of all sequences, one after another, H heads, D head size, S tokens of one sequence.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

__all__ = ["ScoreBias", "dense_attention"]

ScoreBias = Callable[[int], torch.Tensor]
"""The length S of a sequence to what is added to its scores, [H, S, S] by query and key."""


def dense_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float,
    bias: ScoreBias | None = None,
) -> torch.Tensor:
    """[E, H, D] each to [E, H * D]; every token sees all of its sequence, whose ``lengths`` sum to E."""
    attended = []
    for parts in zip(*(states.split(list(lengths)) for states in (query, key, value)), strict=True):
        queries, keys, values = (part.transpose(0, 1).unsqueeze(0) for part in parts)
        added = None if bias is None else bias(parts[0].shape[0]).unsqueeze(0).to(query.dtype)
        result = F.scaled_dot_product_attention(queries, keys, values, attn_mask=added, scale=scale)
        attended.append(result[0].transpose(0, 1).flatten(1))
    return torch.cat(attended)
