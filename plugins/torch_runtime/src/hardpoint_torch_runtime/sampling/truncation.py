"""Min-p, top-k and top-p as one cut-off value per row: everything below it is excluded, ties stay in.

Cutting by value makes the result independent of how equal logits happen to be sorted, hence of the batch (R6.16).
"""

from __future__ import annotations

import torch

__all__ = ["apply_min_p", "apply_top_k_top_p"]

_PREFIX, _WIDER_PREFIX = 256, 4096
"""Largest logits looked at for top-p, first and second; rows whose mass lies further out are sorted completely."""


def apply_min_p(logits: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Exclude tokens less probable than ``min_p`` [S] times the most probable one. In place on [S, V]."""
    peak = logits.amax(dim=-1, keepdim=True)
    return logits.masked_fill_(logits < peak + min_p.log().unsqueeze(1), -torch.inf)


def apply_top_k_top_p(logits: torch.Tensor, top_k: torch.Tensor | None, top_p: torch.Tensor | None) -> torch.Tensor:
    """Keep the ``top_k`` [S] largest logits (0: all), then the smallest set of probability ``top_p`` [S] (1: all).

    In place on float32 [S, V]. At least one token of a row always stays (R6.19).
    """
    if top_k is None and top_p is None:
        return logits
    vocabulary = logits.shape[-1]
    cuts_rank = None if top_k is None else (top_k > 0) & (top_k < vocabulary)
    width = _PREFIX if top_p is not None else 1
    if top_k is not None and cuts_rank is not None:
        width = max(width, int(torch.where(cuts_rank, top_k, 0).max()))
    # [S, width], descending
    largest = logits.topk(min(width, vocabulary), dim=-1).values
    if top_k is not None and cuts_rank is not None:
        last = torch.where(cuts_rank, top_k, 1) - 1
        cut = torch.where(cuts_rank.unsqueeze(1), largest.gather(1, last.unsqueeze(1)), -torch.inf)
        logits.masked_fill_(logits < cut, -torch.inf)
        largest.masked_fill_(largest < cut, -torch.inf)
    if top_p is not None:
        _cut_mass(logits, largest, top_p)
    return logits


def _cut_mass(logits: torch.Tensor, largest: torch.Tensor, top_p: torch.Tensor) -> None:
    """Cut every row, looking further down only in rows whose mass is not reached yet."""
    total = logits.logsumexp(dim=-1, keepdim=True)
    open_rows = torch.nonzero(~_apply_mass_cut(logits, largest, total, top_p)).squeeze(1)
    for width in (_WIDER_PREFIX, logits.shape[-1]):
        if len(open_rows) == 0:
            return
        rows = logits[open_rows]
        ordered = rows.topk(min(width, rows.shape[-1]), dim=-1).values
        is_cut = _apply_mass_cut(rows, ordered, total[open_rows], top_p[open_rows])
        logits[open_rows] = rows
        open_rows = open_rows[~is_cut]


def _apply_mass_cut(
    logits: torch.Tensor, ordered: torch.Tensor, total: torch.Tensor, top_p: torch.Tensor
) -> torch.Tensor:
    """Cut rows whose mass ``top_p`` lies within ``ordered`` [S, W] (descending); returns bool [S], True where it did.

    A token stays while the mass before it is below ``top_p``; the first always does.
    """
    probabilities = (ordered - total).exp().to(torch.float64)
    after = probabilities.cumsum(dim=-1)
    stays = (after - probabilities) < top_p.unsqueeze(1)
    stays[:, 0] = True
    cut = ordered.gather(1, stays.sum(dim=-1, keepdim=True) - 1)
    is_whole = ordered.shape[-1] == logits.shape[-1]
    # Excluded entries (-inf) in the prefix mean that nothing but excluded entries follows.
    covered = (after[:, -1] >= top_p) | (ordered[:, -1] == -torch.inf) | (top_p >= 1) | is_whole
    cut = torch.where((covered & (top_p < 1)).unsqueeze(1), cut, -torch.inf)
    logits.masked_fill_(logits < cut, -torch.inf)
    return covered
