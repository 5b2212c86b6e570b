"""Log-probabilities of given tokens and of the best alternatives. Legend: N rows, V vocabulary, K alternatives."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.step import LogprobArrays

__all__ = ["WHOLE_VOCABULARY", "RankedLogprobs", "gather_logprobs", "index_tensor", "join_logprobs", "rank_logprobs"]

WHOLE_VOCABULARY = -1
"""The request's way to ask for every token (unsorted)."""
_PADDING_TOKEN = -1


@dataclass(frozen=True, slots=True)
class RankedLogprobs:
    """What :func:`rank_logprobs` found, still on the device; :meth:`to_arrays` needs the ``tensors`` on the host.

    ``counts`` int [N] alternatives wanted per row, ``ranked`` the rows with some of the best, ``tensors`` by name:
    ``logprob_ids`` int64 [N], ``logprob_chosen`` float32 [N], ``logprob_ranks`` int64 [N]; ``logprob_best_ids`` and
    ``logprob_best`` [len(ranked), W] where there are such rows; ``logprob_all`` [M, V] for those that want everything.
    """

    counts: np.ndarray
    ranked: np.ndarray
    vocabulary: int
    tensors: dict[str, torch.Tensor]

    def to_arrays(self, host: Mapping[str, np.ndarray], rows: np.ndarray) -> LogprobArrays:
        """``rows`` int [N] are the step's rows the entries belong to. Entries a row did not ask for are padding."""
        counts, num_rows = self.counts, len(self.counts)
        wanted = np.where(counts == WHOLE_VOCABULARY, self.vocabulary, np.minimum(counts, self.vocabulary))
        width = int(wanted.max(initial=0))
        ids = np.full((num_rows, width + 1), _PADDING_TOKEN, dtype=np.int32)
        values = np.full((num_rows, width + 1), -np.inf, dtype=np.float32)
        ids[:, 0], values[:, 0] = host["logprob_ids"], host["logprob_chosen"]
        if len(self.ranked):
            best_ids, best = host["logprob_best_ids"], host["logprob_best"]
            columns = best_ids.shape[1]
            shown = np.arange(columns) < wanted[self.ranked, None]
            ids[self.ranked, 1 : columns + 1] = np.where(shown, best_ids, _PADDING_TOKEN)
            values[self.ranked, 1 : columns + 1] = np.where(shown, best, -np.inf)
        whole = np.flatnonzero(counts == WHOLE_VOCABULARY)
        if len(whole):
            ids[whole, 1:] = np.arange(self.vocabulary, dtype=np.int32)
            values[whole, 1:] = host["logprob_all"]
        return LogprobArrays(rows.astype(np.int32), ids, values, host["logprob_ranks"].astype(np.int32))


def index_tensor(rows: np.ndarray, like: torch.Tensor) -> torch.Tensor:
    """``rows`` int64 [N] where ``like`` is, without waiting for what the device is doing."""
    return torch.from_numpy(rows).to(like.device, non_blocking=True)


def rank_logprobs(logprobs: torch.Tensor, token_ids: torch.Tensor, counts: np.ndarray) -> RankedLogprobs:
    """``logprobs`` float32 [N, V], the chosen ``token_ids`` int64 [N], alternatives wanted per row ``counts`` [N].

    Waits for nothing.
    """
    chosen = logprobs.gather(1, token_ids.unsqueeze(1))
    tensors = {
        "logprob_ids": token_ids,
        "logprob_chosen": chosen.squeeze(1),
        "logprob_ranks": (logprobs > chosen).sum(dim=1) + 1,
    }
    vocabulary = logprobs.shape[1]
    ranked = np.flatnonzero((counts != WHOLE_VOCABULARY) & (counts > 0))
    if len(ranked):
        width = min(int(counts[ranked].max()), vocabulary)
        best = logprobs[index_tensor(ranked, logprobs)].topk(width, dim=1)
        tensors |= {"logprob_best_ids": best.indices, "logprob_best": best.values}
    whole = np.flatnonzero(counts == WHOLE_VOCABULARY)
    if len(whole):
        tensors["logprob_all"] = logprobs[index_tensor(whole, logprobs)]
    return RankedLogprobs(counts, ranked, vocabulary, tensors)


def gather_logprobs(
    logprobs: torch.Tensor, token_ids: torch.Tensor, counts: np.ndarray, rows: np.ndarray
) -> LogprobArrays:
    """:func:`rank_logprobs` and :meth:`RankedLogprobs.to_arrays` in one."""
    ranked = rank_logprobs(logprobs, token_ids, counts)
    return ranked.to_arrays({name: tensor.cpu().numpy() for name, tensor in ranked.tensors.items()}, rows)


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
