"""Paged attention in plain torch, row by row: correct and slow, for the steps before kernels are compiled.

Legend: T tokens of the step, H query heads, K KV heads, D head size, B blocks, S tokens per block, N tokens of a row.
"""

from __future__ import annotations

import torch

from hardpoint.interfaces.attention import AttentionLayerParams
from hardpoint_cpu.native.attention import RowFacts

__all__ = ["attend_plainly", "write_plainly"]


def attend_plainly(
    params: AttentionLayerParams,
    rows: RowFacts,
    kv_cache: torch.Tensor | None,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    output: torch.Tensor,
    lse: torch.Tensor | None = None,
) -> None:
    """Attention of ``query`` [T, H, D] into ``output``, and its log-sum-exp into ``lse`` [T, H].

    Keys and values are those of ``kv_cache`` [B, K, S, 2 * D], or ``key`` and ``value`` [T, K, D] without one.
    """
    starts, lengths = rows.query_start.tolist(), rows.seq_lens.tolist()
    for row in range(rows.struct.rows):
        step, length = slice(starts[row], starts[row + 1]), lengths[row]
        if step.start == step.stop:
            continue
        if kv_cache is None or rows.block_table is None:
            keys, values = key[step], value[step]
        else:
            keys, values = _gather(kv_cache, rows.block_table[row], length).float().chunk(2, dim=-1)
        attended, row_lse = _attend_row(params, query[step], keys, values, bool(rows.struct.causal))
        output[step] = attended
        if lse is not None:
            lse[step] = row_lse


def write_plainly(key: torch.Tensor, value: torch.Tensor, kv_cache: torch.Tensor, slots: torch.Tensor) -> None:
    """Put the first tokens of ``key`` and ``value`` [T, K, D] into ``slots`` int64; negative ones are skipped."""
    is_real = slots >= 0
    states = torch.cat((key[: len(slots)], value[: len(slots)]), dim=-1)[is_real].to(kv_cache.dtype)
    places = slots[is_real]
    size = kv_cache.shape[2]
    kv_cache.transpose(1, 2).index_put_((places // size, places % size), states)


def _gather(kv_cache: torch.Tensor, table: torch.Tensor, length: int) -> torch.Tensor:
    """[N, K, 2 * D]."""
    blocks = table[: -(-length // kv_cache.shape[2])].long()
    return kv_cache[blocks].transpose(1, 2).flatten(0, 1)[:length]


def _attend_row(
    params: AttentionLayerParams, query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, causal: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """[n, H, D] over [N, K, D] to [n, H, D] and [n, H]."""
    group = params.num_heads // params.num_kv_heads
    keys, values = keys.repeat_interleave(group, dim=1), values.repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", query, keys) * params.scale
    if params.logits_soft_cap is not None:
        scores = params.logits_soft_cap * torch.tanh(scores / params.logits_soft_cap)
    places = torch.arange(len(keys) - len(query), len(keys))
    distance = places[:, None] - torch.arange(len(keys))
    if params.alibi_slopes is not None:
        scores = scores - torch.tensor(list(params.alibi_slopes))[:, None, None] * distance
    hidden = distance < 0 if causal else torch.zeros_like(distance, dtype=torch.bool)
    if params.sliding_window is not None:
        hidden = hidden | (distance.abs() >= params.sliding_window)
        # A block that no query sees may be another's by now, and hold anything.
        unseen = hidden.all(dim=0)
        values = values.masked_fill(unseen[:, None, None], 0.0)
    scores = scores.masked_fill(hidden, -torch.inf)
    lse = torch.logsumexp(scores, dim=-1)
    if params.sinks is not None:
        lse = torch.logaddexp(lse, params.sinks.float()[:, None].expand_as(lse))
    weights = (scores - lse[..., None]).exp()
    return torch.einsum("hqk,khd->qhd", weights, values), lse.transpose(0, 1)
