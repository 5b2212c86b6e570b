"""Sampled tokens and drafts that stay on the device, and how the next step's input ids are made of them.

The host plans a step before it knows what the one before it sampled. So the newest token of a row, and the worker's
own drafts behind it, are moved within the device; everything else comes from the host. Legend: N slots, K drafts per
row, R rows and T tokens of the step, S rows of the newest samples.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.buffers import StagedBuffer

__all__ = ["NO_DRAFT", "DeviceTokens", "RowSpans"]

NO_DRAFT = -1
"""In the place of a draft: the worker's own guess or, where it made none, one that no sample equals."""


@dataclass(frozen=True, slots=True)
class RowSpans:
    """Where the rows of a step lie among its tokens, in batch order.

    Attributes:
        slots: int32 [R].
        ends: int32 [R], cumulative numbers of tokens.
        samples: bool [R], rows that reach their last known token.
        num_drafts: int32 [R] and ``draft_ids`` int32 [D], row after row; None where no row has any.
        num_tokens: T.
        num_padded: T and the padding behind, which gets the id 0.
    """

    slots: Int32Array
    ends: Int32Array
    samples: BoolArray
    num_tokens: int
    num_padded: int
    num_drafts: Int32Array | None = None
    draft_ids: Int32Array | None = None


class DeviceTokens:
    """The newest sample of each slot, as long as the slot keeps its owner, and the drafts made after it.

    Samples lie in the order of the rows that drew them; rows that were not scheduled since lie behind.
    """

    def __init__(self, num_slots: int, max_tokens: int, device: torch.device, *, num_drafts: int = 0) -> None:
        self.num_drafts = num_drafts
        self._place = np.zeros(num_slots, dtype=np.int64)
        self._is_here = np.zeros(num_slots, dtype=np.bool_)
        self._owners: Int32Array = np.zeros(0, dtype=np.int32)
        self._samples = [torch.zeros(num_slots, dtype=torch.int64, device=device) for _ in range(2)]
        self._drafts = [torch.zeros((num_slots, num_drafts), dtype=torch.int64, device=device) for _ in range(2)]

        def staged(length: int) -> StagedBuffer:
            return StagedBuffer((length,), torch.int64, device, waits=False)

        self._sources, self._targets = staged(num_slots), staged(num_slots)
        self._draft_places, self._draft_sources = staged(max_tokens), staged(max_tokens)
        self._draft_owned, self._draft_ids = staged(max_tokens), staged(max_tokens)
        # Written behind a forward, when the last upload may still be under way; the one before it is not.
        self._kept = [staged(num_slots) for _ in range(2)]

    def enter(self, row: NewRow) -> None:
        """All tokens of a new row come from the host."""
        self._is_here[row.slot] = False

    def release(self, slots: Int32Array) -> None:
        self._is_here[slots] = False

    def is_here(self, slots: Int32Array) -> BoolArray:
        """Whether the newest token of each slot is on the device."""
        here: BoolArray = self._is_here[slots]
        return here

    def keep(self, slots: Int32Array, tokens: torch.Tensor, drafts: torch.Tensor | None = None) -> None:
        """``tokens`` int64 [S] are the newest ones of ``slots``, ``drafts`` [S, K] the guesses behind them."""
        self._is_here[slots] = False
        carried = self._owners[self._is_here[self._owners]]
        samples, others = self._samples[::-1]
        new_drafts, old_drafts = self._drafts[::-1]
        count = len(slots)
        samples[:count] = tokens
        if drafts is not None:
            new_drafts[:count] = drafts
        elif self.num_drafts:
            new_drafts[:count] = NO_DRAFT
        if len(carried):
            self._kept.reverse()
            self._kept[0].host[: len(carried)] = self._place[carried]
            places = self._kept[0].upload(len(carried))
            samples[count : count + len(carried)] = others[places]
            if self.num_drafts:
                new_drafts[count : count + len(carried)] = old_drafts[places]
        self._samples.reverse()
        self._drafts.reverse()
        self._owners = np.concatenate([slots, carried])
        self._place[self._owners] = np.arange(len(self._owners))
        self._is_here[slots] = True

    def fill(self, ids: StagedBuffer, spans: RowSpans) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Input ids int64 [T'] in ``ids``, whose host array holds what the host knows, 0 elsewhere.

        The second result are the drafts int64 [D] to verify, ``NO_DRAFT`` for missing ones; None where there are none.
        """
        common = self._is_here[spans.slots] & spans.samples
        num_common = int(common.sum())
        if spans.num_drafts is not None and spans.draft_ids is not None:
            view = ids.upload(spans.num_padded)
            return view, self._place_with_drafts(view, spans, common)
        if num_common < spans.num_tokens:
            # R4.40, R4.42: somebody's ids are known to the host alone.
            view = ids.upload(spans.num_padded)
            if num_common == 0:
                return view, None
        else:
            view = ids.tensor[: spans.num_padded]
            view[spans.num_tokens :] = 0
        self._place_samples(view, spans.ends[common] - 1, self._place[spans.slots[common]])
        return view, None

    def _place_samples(self, view: torch.Tensor, targets: np.ndarray, sources: np.ndarray) -> None:
        count = len(targets)
        in_order = np.arange(count)
        if int(targets[-1]) == count - 1 and np.array_equal(sources, in_order):
            # R4.44: targets ascend, so the last one tells that they are the first places. P4.3: the order of samples
            # is compared as well.
            view[:count] = self._samples[0][:count]
            return
        self._sources.host[:count] = sources
        self._targets.host[:count] = targets
        view[self._targets.upload(count)] = self._samples[0][self._sources.upload(count)]

    def _place_with_drafts(self, view: torch.Tensor, spans: RowSpans, common: BoolArray) -> torch.Tensor:
        """R4.41: a row's sample lies its drafts before its end."""
        counts, given = spans.num_drafts, spans.draft_ids
        if counts is None or given is None:
            raise RuntimeError("a step with drafts needs their counts and their ids")
        if common.any():
            targets = spans.ends[common] - 1 - counts[common]
            self._place_samples(view, targets, self._place[spans.slots[common]])
        total = len(given)
        rows = np.repeat(np.arange(len(counts)), counts)
        ranks = np.arange(total) - np.repeat(np.cumsum(counts) - counts, counts)
        self._draft_ids.host[:total] = given
        drafts = self._draft_ids.upload(total)
        own = np.flatnonzero(common[rows] & (given == NO_DRAFT) & (ranks < self.num_drafts))
        if len(own):
            places = self._place[spans.slots[rows[own]]] * self.num_drafts + ranks[own]
            self._draft_owned.host[: len(own)] = own
            self._draft_sources.host[: len(own)] = places
            guesses = self._drafts[0].view(-1)[self._draft_sources.upload(len(own))]
            drafts[self._draft_owned.upload(len(own))] = guesses
        self._draft_places.host[:total] = spans.ends[rows] - counts[rows] + ranks
        # A missing draft is refused whatever it is, but its place needs the id of some token.
        view[self._draft_places.upload(total)] = drafts.clamp(min=0)
        return drafts
