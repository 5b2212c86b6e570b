"""Which media items the prompts of running requests have, by slot."""

from __future__ import annotations

import numpy as np

from hardpoint.interfaces.request import Feature, Int32Array
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["PromptItems"]


class PromptItems:
    """State by slot. Without any items it costs nothing; ``num_slots`` is how many rows may run."""

    def __init__(self, num_slots: int) -> None:
        self._items: dict[int, tuple[Feature, ...]] = {}
        self._ends: Int32Array = np.zeros(num_slots, dtype=np.int32)
        """By slot: where its last item ends, 0 without any."""

    def enter(self, row: NewRow) -> None:
        """See ``StatePart``."""
        self._items.pop(row.slot, None)
        self._ends[row.slot] = 0
        if row.features:
            self._items[row.slot] = row.features
            self._ends[row.slot] = row.features[-1].offset + row.features[-1].length

    def release(self, slots: Int32Array) -> None:
        if not self._items:
            return
        self._ends[slots] = 0
        for slot in slots.tolist():
            self._items.pop(slot, None)

    def of(self, slot: int) -> tuple[Feature, ...]:
        """In the order of the prompt."""
        return self._items.get(slot, ())

    def any_ahead(self, slots: Int32Array, num_computed: Int32Array) -> bool:
        """Whether a row that has computed ``num_computed`` tokens has not passed its last item."""
        return bool(self._items) and bool((num_computed < self._ends[slots]).any())

    def rows_ahead(self, batch: InputBatch) -> list[int]:
        """The rows of ``batch`` of which that is so."""
        if not self._items:
            return []
        rows: list[int] = np.flatnonzero(batch.num_computed < self._ends[batch.slots]).tolist()
        return rows
