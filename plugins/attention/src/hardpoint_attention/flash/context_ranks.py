"""What layers need from the ranks that share contexts (decode context parallelism).

Legend: N ranks, T query tokens, H query heads of this rank, D head size.
"""

from __future__ import annotations

from typing import Protocol

import torch

from hardpoint_attention.merge import Partial

__all__ = ["ContextRanks"]


class ContextRanks(Protocol):
    """Collectives among the ranks of one context group; all ranks call them in the same order."""

    @property
    def num_ranks(self) -> int: ...

    def gather_heads(self, query: torch.Tensor) -> torch.Tensor:
        """[T, H, D] of every rank as [T, N * H, D], in rank order."""

    def merge_heads(self, partial: Partial) -> Partial:
        """Merge all ranks' partial results over [T, N * H, D] by log-sum-exp, and keep this rank's H heads."""
