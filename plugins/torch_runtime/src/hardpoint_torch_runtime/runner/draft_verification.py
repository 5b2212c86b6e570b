"""Verification of drafts: every place is sampled from the model's own distribution, and drafts count while they equal
the samples.

A draw depends on the request's seed and the token's position only, so that a row's tokens are those of its run without
drafts. Legend: S rows that sample, P places whose logits are computed (the one before each draft of a row, and the one
of its last draft), D drafts, W places of the row with the most, V vocabulary.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import NewRow, TokenUpdate
from hardpoint_torch_runtime.runner.device_tokens import NO_DRAFT

__all__ = ["DraftLayout", "DraftProposer", "OwnDrafts", "Verified", "verify"]


class DraftProposer(Protocol):
    """Guesses what follows the tokens just sampled.

    ``num_drafts`` is K, the most guesses per row. Slots that :meth:`release` names forget what they held.
    """

    @property
    def num_drafts(self) -> int: ...

    def enter(self, row: NewRow) -> None: ...

    def release(self, slots: Int32Array) -> None: ...

    def propose(self, slots: Int32Array, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        """int64 [S, K] for ``slots`` int32 [S]; -1 from where a row has no more guesses.

        ``tokens`` int64 [S, W] joined the rows now, of row s the first ``counts[s]`` (int64 [S], at least 1). Both are
        on the device: asynchronous steps must not read them on the host.
        """


@dataclass(frozen=True, slots=True)
class DraftLayout:
    """Which row each of the P places belongs to (``rows`` int64), and how many drafts lie before it (``offsets``
    int32). ``num_drafts`` int32 [S]."""

    num_drafts: Int32Array
    rows: np.ndarray
    offsets: Int32Array

    @classmethod
    def of(cls, num_drafts: Int32Array) -> DraftLayout:
        widths = num_drafts + 1
        rows = np.repeat(np.arange(len(widths), dtype=np.int64), widths)
        first = np.cumsum(widths) - widths
        offsets = (np.arange(len(rows)) - np.repeat(first, widths)).astype(np.int32)
        return cls(num_drafts, rows, offsets)

    @property
    def num_rows(self) -> int:
        return len(self.num_drafts)

    @property
    def width(self) -> int:
        return int(self.num_drafts.max(initial=0)) + 1

    @property
    def first_places(self) -> np.ndarray:
        """int64 [S], each row's first place."""
        widths = self.num_drafts.astype(np.int64) + 1
        first: np.ndarray = np.cumsum(widths) - widths
        return first

    @property
    def before_drafts(self) -> np.ndarray:
        """bool [P], places that a draft follows."""
        return self.offsets < self.num_drafts[self.rows]

    def counted(self, counts: Int32Array) -> np.ndarray:
        """bool [P], places whose samples are tokens, when ``counts`` int32 [S] per row are."""
        return self.offsets < counts[self.rows]


@dataclass(frozen=True, slots=True)
class Verified:
    """``counts`` int64 [S], the accepted drafts and the token after them; ``tokens`` int64 [S, W], of row s the first
    ``counts[s]``; ``newest`` int64 [S], the last of them; ``refused`` int64 [S], drafts that were wrong."""

    counts: torch.Tensor
    tokens: torch.Tensor
    newest: torch.Tensor
    refused: torch.Tensor


def verify(sampled: torch.Tensor, drafts: torch.Tensor, layout: DraftLayout) -> Verified:
    """Compare ``sampled`` int64 [P] with ``drafts`` int64 [D] (-1 for missing ones), both on one device.

    Waits for nothing: sizes follow from the layout alone.
    """

    def there(array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array).to(sampled.device, non_blocking=True)

    rows, offsets = there(layout.rows), there(layout.offsets.astype(np.int64))
    before = there(np.flatnonzero(layout.before_drafts))
    shape = (layout.num_rows, layout.width)
    tokens = sampled.new_zeros(shape)
    tokens[rows, offsets] = sampled
    is_right = torch.zeros(shape, dtype=torch.bool, device=sampled.device)
    is_right[rows[before], offsets[before]] = sampled[before] == drafts
    accepted = is_right.to(torch.int64).cumprod(dim=1).sum(dim=1)
    newest = tokens.gather(1, accepted.unsqueeze(1)).squeeze(1)
    return Verified(accepted + 1, tokens, newest, there(layout.num_drafts.astype(np.int64)) - accepted)


class OwnDrafts:
    """This worker's guesses by slot, as far as the host knows them: int32 [N, K], -1 where there are none."""

    def __init__(self, num_slots: int, num_drafts: int) -> None:
        self._ids: Int32Array = np.full((num_slots, num_drafts), NO_DRAFT, dtype=np.int32)

    def enter(self, row: NewRow) -> None:
        self._ids[row.slot] = NO_DRAFT

    def release(self, slots: Int32Array) -> None:
        self._ids[slots] = NO_DRAFT

    def put(self, slots: Int32Array, ids: np.ndarray) -> None:
        """``ids`` [S, K] replace what the slots had."""
        self._ids[slots] = ids

    def resolve(self, slots: Int32Array, is_current: BoolArray, drafts: TokenUpdate) -> TokenUpdate:
        """``drafts`` of the rows ``slots`` with own guesses in the places of -1, which stays where there are none and
        in rows that are not ``is_current``: their guesses are still on the device."""
        ids = drafts.ids.copy()
        unnamed = np.flatnonzero(ids == NO_DRAFT)
        if len(unnamed) and self._ids.shape[1]:
            rows = np.repeat(np.arange(len(slots)), drafts.counts)[unnamed]
            ranks = unnamed - (np.cumsum(drafts.counts) - drafts.counts)[rows]
            known = (ranks < self._ids.shape[1]) & is_current[rows]
            ids[unnamed[known]] = self._ids[slots[rows[known]], ranks[known]]
        return TokenUpdate(drafts.counts, ids)
