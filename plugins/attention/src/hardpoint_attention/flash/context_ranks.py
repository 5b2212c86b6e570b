"""What layers need from the ranks that share contexts (decode context parallelism).

Legend: N ranks, T query tokens, H query heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hardpoint.interfaces.communicator import Communicator
from hardpoint_attention.merge import Partial, rank_share, total_lse

__all__ = ["CommunicatorRanks", "ContextRanks"]


class ContextRanks(Protocol):
    """Collectives among the ranks of one context group; all ranks call them in the same order."""

    @property
    def num_ranks(self) -> int: ...

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        """[T, H, D] of every rank as [T, N * H, D], in rank order."""

    def merge_heads(self, partial: Partial) -> Partial:
        """Merge all ranks' partial results over [T, N * H, D] by log-sum-exp, and keep this rank's H heads."""


class CommunicatorRanks:
    """Context ranks over a communicator of the same group. Exchanged are the queries, a log-sum-exp per token, head and
    rank, and the sum of the outputs."""

    def __init__(self, communicator: Communicator, num_ranks: int, rank: int) -> None:
        self.num_ranks = num_ranks
        self.rank = rank
        self._communicator = communicator

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        return self._communicator.all_gather(query, 1)

    def merge_heads(self, partial: Partial) -> Partial:
        lses = list(self._communicator.all_gather(partial.known_lse.unsqueeze(0), 0).unbind(0))
        merged = self._communicator.all_reduce(rank_share(partial, lses))
        heads = merged.shape[1] // self.num_ranks
        own = slice(self.rank * heads, (self.rank + 1) * heads)
        return Partial(merged[:, own], total_lse(lses)[:, own])
