"""Decode context parallelism: the cached tokens of each sequence dealt out among ranks.

Legend: N ranks, I tokens dealt to a rank at a time (the interleave), L tokens of a sequence, R rows. Position p belongs
to rank ``p // I % N``, as that rank's local position ``p // (N I) * I + p % I``. A rank's cache holds its own tokens
back to back, in the blocks of a row's table from the first one on. How ranks get from there to attention over
everything is told in :mod:`hardpoint_torch_runtime.layers.context_ranks`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeVar

import numpy as np
import torch

__all__ = ["ContextPlace", "ContextShards", "LocalLengths"]

_Lengths = TypeVar("_Lengths", np.ndarray, torch.Tensor)


@dataclass(frozen=True, slots=True)
class ContextShards:
    """How tokens are dealt out. Raises ``ValueError`` for less than one rank or token."""

    num_ranks: int
    interleave: int = 1

    def __post_init__(self) -> None:
        if self.num_ranks < 1 or self.interleave < 1:
            raise ValueError(f"{self} must have one rank or more, and deal out one token or more at a time")

    @property
    def round_tokens(self) -> int:
        """Tokens after which the dealing begins anew."""
        return self.num_ranks * self.interleave

    def bound(self, length: int) -> int:
        """No rank holds more of ``length`` tokens (R5.91)."""
        return -(-length // self.round_tokens) * self.interleave

    def local_lengths(self, lengths: _Lengths, rank: int) -> _Lengths:
        """How many of the first ``lengths`` tokens are ``rank``'s; of the same kind and dtype. Reads nothing back from
        a device. Raises ``ValueError`` for a rank there is not."""
        self._check(rank)
        rounds = lengths // self.round_tokens
        rest = lengths - rounds * self.round_tokens - rank * self.interleave
        if isinstance(rest, torch.Tensor):
            return rounds * self.interleave + rest.clamp(0, self.interleave)
        return rounds * self.interleave + np.clip(rest, 0, self.interleave).astype(rest.dtype)

    def owners(self, positions: np.ndarray) -> np.ndarray:
        """The rank of each position."""
        return positions // self.interleave % self.num_ranks

    def local_positions(self, positions: np.ndarray) -> np.ndarray:
        """Where each position is among its owner's."""
        return positions // self.round_tokens * self.interleave + positions % self.interleave

    def global_positions(self, local: np.ndarray, rank: int) -> np.ndarray:
        """The way back: positions in the sequence of ``rank``'s ``local`` ones."""
        self._check(rank)
        return local // self.interleave * self.round_tokens + rank * self.interleave + local % self.interleave

    def _check(self, rank: int) -> None:
        if not 0 <= rank < self.num_ranks:
            raise ValueError(f"rank {rank} is not one of the {self.num_ranks} that share contexts")


@dataclass(frozen=True, slots=True)
class ContextPlace:
    """One of the ranks that contexts are dealt out among."""

    shards: ContextShards
    rank: int

    def local_offsets(self, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Of tokens at ``offsets`` in one position of a block table, which stands for a block on each rank: where they
        are in this rank's block, and whether they are in it at all.

        Blocks begin with a new round, since they hold as many tokens as are dealt out at a time, or a multiple.
        """
        return self.shards.local_positions(offsets), self.shards.owners(offsets) == self.rank


class LocalLengths:
    """One rank's lengths in a buffer that stays where it is, so that captured kernels find them (R5.38)."""

    def __init__(self, shards: ContextShards, rank: int, max_rows: int, device: torch.device) -> None:
        self.shards = shards
        self.rank = rank
        self.buffer = torch.zeros(max_rows, dtype=torch.int32, device=device)

    def fill(self, lengths: torch.Tensor) -> torch.Tensor:
        """The share in each of ``lengths`` int32 [R], as a view [R] of the buffer, whose rest becomes 0 (R5.91).

        Raises ``ValueError`` for more rows than the buffer was made for.
        """
        rows = lengths.shape[0]
        if rows > self.buffer.shape[0]:
            raise ValueError(f"{rows} rows do not fit a buffer of {self.buffer.shape[0]}; raise --max-num-seqs")
        self.buffer[:rows].copy_(self.shards.local_lengths(lengths, self.rank))
        # A padded row of a replayed graph would otherwise attend to what an earlier batch had.
        self.buffer[rows:].zero_()
        return self.buffer[:rows]
