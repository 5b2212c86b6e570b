"""What the model sees in the place of token embeddings: prompts given as embeddings, by slot, and encoded media."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch

from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import NewRow

if TYPE_CHECKING:
    from hardpoint.interfaces.model import Model
    from hardpoint_torch_runtime.runner.input_batch import InputBatch
    from hardpoint_torch_runtime.runner.prompt_items import PromptItems

__all__ = ["PromptEmbeddings"]


class PromptEmbeddings:
    """Empty for ordinary requests, and then free of cost. ``items``: media of prompts, where the model takes any."""

    def __init__(self, items: PromptItems | None = None) -> None:
        self._by_slot: dict[int, np.ndarray] = {}
        self._items = items

    def enter(self, row: NewRow) -> None:
        self.drop(row.slot)
        if row.prompt_embeds is not None:
            self._by_slot[row.slot] = row.prompt_embeds

    def drop(self, slot: int) -> None:
        self._by_slot.pop(slot, None)

    def any_wanted(self, slots: Int32Array, num_computed: Int32Array) -> bool:
        """Whether a row that has computed ``num_computed`` tokens goes on within embeddings of its own, or has media
        ahead."""
        if self._items is not None and self._items.any_ahead(slots, num_computed):
            return True
        if not self._by_slot:
            return False
        rows = zip(slots.tolist(), num_computed.tolist(), strict=True)
        return any(computed < len(self._by_slot.get(slot, ())) for slot, computed in rows)

    def for_batch(self, batch: InputBatch, model: Model) -> torch.Tensor | None:
        """Embeddings [T', C] of the whole batch when any of its rows brings its own, else None."""
        embedded = self._given(batch, model) if self._by_slot else None
        if not batch.media:
            return embedded
        if embedded is None:
            embedded = model.embed(batch.token_ids).clone()
        for piece in batch.media:
            embedded[piece.start : piece.start + len(piece.rows)] = piece.rows.to(embedded.dtype)
        return embedded

    def _given(self, batch: InputBatch, model: Model) -> torch.Tensor | None:
        embedded: torch.Tensor | None = None
        for row, slot in enumerate(batch.slots.tolist()):
            given = self._by_slot.get(slot)
            first = int(batch.num_computed[row])
            if given is None or first >= len(given):
                continue
            if embedded is None:
                embedded = model.embed(batch.token_ids).clone()
            last = min(first + int(batch.num_scheduled[row]), len(given))
            start = int(batch.query_start_loc_cpu[row])
            part = torch.from_numpy(np.ascontiguousarray(given[first:last]))
            embedded[start : start + last - first] = part.to(embedded.device, embedded.dtype)
        return embedded
