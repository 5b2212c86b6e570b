"""Log-probabilities of given tokens and of the best alternatives. Legend: N rows, V vocabulary, K alternatives."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint.interfaces.step import LogprobArrays

__all__ = ["WHOLE_VOCABULARY", "gather_logprobs", "join_logprobs"]

WHOLE_VOCABULARY = -1
"""The request's way to ask for every token (unsorted)."""
_PADDING_TOKEN = -1


def gather_logprobs(
    logprobs: torch.Tensor, token_ids: torch.Tensor, counts: np.ndarray, rows: np.ndarray
) -> LogprobArrays:
    """``logprobs`` float32 [N, V], the chosen ``token_ids`` int64 [N], alternatives wanted per row ``counts`` [N].

    ``rows`` int [N] are the step's rows the entries belong to. Entries a row did not ask for are padding.
    """
    num_rows, vocabulary = logprobs.shape
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    ranks = (logprobs > chosen).sum(dim=1) + 1
    wanted = np.where(counts == WHOLE_VOCABULARY, vocabulary, np.minimum(counts, vocabulary))
    width = int(wanted.max(initial=0))
    ids = np.full((num_rows, width + 1), _PADDING_TOKEN, dtype=np.int32)
    values = np.full((num_rows, width + 1), -np.inf, dtype=np.float32)
    ids[:, 0] = token_ids.cpu().numpy()
    values[:, 0] = chosen.squeeze(1).cpu().numpy()
    _fill_best(logprobs, counts, wanted, ids, values)
    for row in np.flatnonzero(counts == WHOLE_VOCABULARY):
        ids[row, 1:] = np.arange(vocabulary, dtype=np.int32)
        values[row, 1:] = logprobs[row].cpu().numpy()
    return LogprobArrays(rows.astype(np.int32), ids, values, ranks.cpu().numpy().astype(np.int32))


def _fill_best(
    logprobs: torch.Tensor, counts: np.ndarray, wanted: np.ndarray, ids: np.ndarray, values: np.ndarray
) -> None:
    ranked = np.flatnonzero((counts != WHOLE_VOCABULARY) & (wanted > 0))
    if len(ranked) == 0:
        return
    width = int(wanted[ranked].max())
    best = logprobs[torch.from_numpy(ranked)].topk(width, dim=1)
    shown = np.arange(width) < wanted[ranked, None]
    ids[ranked, 1 : width + 1] = np.where(shown, best.indices.cpu().numpy(), _PADDING_TOKEN)
    values[ranked, 1 : width + 1] = np.where(shown, best.values.cpu().numpy(), -np.inf)


def join_logprobs(parts: list[LogprobArrays]) -> LogprobArrays | None:
    """One record from several, padded to the widest; None when there are none."""
    if not parts:
        return None
    width = max(part.token_ids.shape[1] for part in parts)

    def widen(array: np.ndarray, fill: float) -> np.ndarray:
        return np.pad(array, ((0, 0), (0, width - array.shape[1])), constant_values=fill)

    return LogprobArrays(
        np.concatenate([part.rows for part in parts]),
        np.concatenate([widen(part.token_ids, _PADDING_TOKEN) for part in parts]),
        np.concatenate([widen(part.logprobs, -np.inf) for part in parts]),
        np.concatenate([part.ranks for part in parts]),
    )
