"""A grammar's bit masks, given by the rows of a step, as rows of the sampler."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.step import GrammarMask
from hardpoint_torch_runtime.runner.draft_verification import DraftLayout
from hardpoint_torch_runtime.sampling.constraints import unpack_grammar_bits

__all__ = ["PlacedMask", "place_mask"]


@dataclass(frozen=True, slots=True)
class PlacedMask:
    """``places`` int64 [N] among those sampled, ``bits`` int32 [N, ceil(V / 32)]."""

    places: np.ndarray
    bits: np.ndarray

    def at(self, places: np.ndarray | None, vocabulary: int) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Sampler rows int64 [M] and bool [M, V] of what is legal, where the sampler's rows are ``places``, ascending
        (None: all). Nothing where no mask applies."""
        rows, bits = self.places, self.bits
        if places is not None:
            kept = np.isin(rows, places)
            rows, bits = np.searchsorted(places, rows[kept]), bits[kept]
        if len(rows) == 0:
            return None, None
        return torch.from_numpy(rows), unpack_grammar_bits(bits, vocabulary)


def place_mask(
    mask: GrammarMask | None, sampled_rows: np.ndarray, num_rows: int, layout: DraftLayout | None
) -> PlacedMask | None:
    """``sampled_rows`` int [S] are the step's rows that sample, of ``num_rows``; masks of other rows drop out.

    Raises ``RuntimeError`` where a row with drafts has not one mask per place.
    """
    if mask is None or len(mask.rows) == 0:
        return None
    order = np.full(num_rows, len(sampled_rows), dtype=np.int64)
    order[sampled_rows] = np.arange(len(sampled_rows))
    rows = order[mask.rows]
    used = rows < len(sampled_rows)
    rows, bits = rows[used], mask.bits[used]
    if layout is None or len(rows) == 0:
        return PlacedMask(rows, bits)
    is_first = np.append(True, rows[1:] != rows[:-1])
    ranks = np.arange(len(rows)) - np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
    given, wanted = np.bincount(rows, minlength=layout.num_rows), layout.num_drafts + 1
    wrong = np.flatnonzero((given > 0) & (given != wanted))
    if len(wrong):
        row = int(wrong[0])
        raise RuntimeError(
            f"row {sampled_rows[row]} of the step has {given[row]} grammar masks for its {wanted[row]} places; give "
            "one per draft, and one for the token after them"
        )
    return PlacedMask(layout.first_places[rows] + ranks, bits)
