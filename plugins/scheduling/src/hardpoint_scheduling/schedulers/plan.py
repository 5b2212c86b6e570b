"""The step under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np

from hardpoint.interfaces import BlockUpdate, Int32Array, NewRow, SchedulerOutput
from hardpoint_scheduling.kv_cache.coordinator import Blocks
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.slots import SlotTable

EMPTY: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class GrownRows:
    """Blocks that running requests got in this step: row ``positions[i]`` of the running list got ``blocks[i]``."""

    positions: list[int] = field(default_factory=list)
    blocks: list[Blocks] = field(default_factory=list)


@dataclass(slots=True)
class StepPlan:
    """Rows of running requests as arrays, rows of admitted ones as lists; ``budget`` is what is left of the step,
    ``prefill_cap`` the most new tokens of one request (None: no cap).

    ``slots``, ``computed`` and ``counts`` are int32 [number of running rows].
    """

    budget: int
    num_groups: int
    prefill_cap: int | None = None
    rows: list[LiveRequest] = field(default_factory=list)
    slots: Int32Array = field(default_factory=lambda: EMPTY)
    computed: Int32Array = field(default_factory=lambda: EMPTY)
    counts: Int32Array = field(default_factory=lambda: EMPTY)
    updates: tuple[BlockUpdate, ...] = ()
    admitted: list[LiveRequest] = field(default_factory=list)
    admitted_computed: list[int] = field(default_factory=list)
    admitted_counts: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)

    def take_running(
        self, requests: list[LiveRequest], slots: Int32Array, computed: Int32Array, counts: Int32Array, grown: GrownRows
    ) -> None:
        """Adopt the running loop's result. Arrays run over ``requests``; rows with a count of 0 are left out."""
        keep = counts > 0
        updates = _block_updates(len(requests), self.num_groups, grown)
        if not keep.all():
            chosen = np.flatnonzero(keep)
            requests = [requests[i] for i in chosen.tolist()]
            slots, computed, counts = slots[chosen], computed[chosen], counts[chosen]
            updates = tuple(BlockUpdate(update.counts[chosen], update.ids) for update in updates)
        self.rows, self.slots, self.computed, self.counts, self.updates = requests, slots, computed, counts, updates
        self.budget -= int(counts.sum())

    def admit(self, request: LiveRequest, num_computed: int, num_new: int, row: NewRow) -> None:
        self.admitted.append(request)
        self.admitted_computed.append(num_computed)
        self.admitted_counts.append(num_new)
        self.new_rows.append(row)
        self.budget -= num_new

    def build(
        self,
        step_id: int,
        table: SlotTable,
        finished_slots: list[int],
        preempted_slots: list[int],
        common_blocks: tuple[int, ...],
    ) -> SchedulerOutput:
        """The finished record. Leaves all state as it is."""
        slots, computed, counts, updates = self.slots, self.computed, self.counts, self.updates
        if not updates:
            updates = _block_updates(0, self.num_groups, GrownRows())
        if self.admitted:
            slots = np.concatenate([slots, _int32([row.slot for row in self.new_rows])])
            computed = np.concatenate([computed, _int32(self.admitted_computed)])
            counts = np.concatenate([counts, _int32(self.admitted_counts)])
            none = np.zeros(len(self.admitted), dtype=np.int32)
            updates = tuple(BlockUpdate(np.concatenate([u.counts, none]), u.ids) for u in updates)
        return SchedulerOutput(
            step_id=step_id,
            slots=slots,
            generations=table.generation[slots],
            num_computed_tokens=computed,
            num_scheduled_tokens=counts,
            samples=computed + counts == table.num_tokens[slots],
            new_rows=tuple(self.new_rows),
            new_blocks=updates,
            finished_slots=_int32(finished_slots) if finished_slots else EMPTY,
            preempted_slots=_int32(preempted_slots) if preempted_slots else EMPTY,
            blocks_to_zero=EMPTY,
            num_common_prefix_blocks=common_blocks,
            num_tokens=int(counts.sum()),
            extensions={},
        )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _block_updates(num_rows: int, num_groups: int, grown: GrownRows) -> tuple[BlockUpdate, ...]:
    updates = []
    for group in range(num_groups):
        counts = np.zeros(num_rows, dtype=np.int32)
        ids: Int32Array = EMPTY
        if grown.positions:
            counts[grown.positions] = [len(blocks[group]) for blocks in grown.blocks]
            ids = _int32([block for blocks in grown.blocks for block in blocks[group]])
        updates.append(BlockUpdate(counts, ids))
    return tuple(updates)
