"""The step under construction."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import chain

import numpy as np

from hardpoint.interfaces import BlockUpdate, Int32Array, NewRow, SchedulerOutput, TokenUpdate
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.slots import SlotTable

EMPTY: Int32Array = np.zeros(0, dtype=np.int32)


@dataclass(slots=True)
class GrownRows:
    """Blocks that running requests got in this step: row ``positions[i]`` of the running list got ``ids[group][i]``."""

    positions: list[int] = field(default_factory=list)
    ids: list[list[Sequence[int]]] = field(default_factory=list)

    def add(self, positions: Sequence[int], ids: Sequence[Sequence[Sequence[int]]]) -> None:
        """``ids`` per group and row, as the coordinator gives them."""
        if not self.ids:
            self.ids = [[] for _ in ids]
        self.positions.extend(positions)
        for known, group in zip(self.ids, ids, strict=True):
            known.extend(group)

    def remove(self, position: int) -> None:
        """Forget a row, and count those after it one lower."""
        if position in self.positions:
            index = self.positions.index(position)
            for known in self.ids:
                del known[index]
            del self.positions[index]
        self.positions = [other - (other > position) for other in self.positions]


@dataclass(slots=True)
class StepPlan:
    """Rows of running requests as arrays, rows of admitted ones as lists.

    ``slots``, ``computed`` and ``counts`` are int32 [number of running rows].

    Attributes:
        budget: tokens that can still be scheduled (R3.31).
        input_budget: tokens that still fit the workers' batch.
        appends_drafts: the model appends drafts inside the batch, so a row takes room for them besides its tokens.
        prefill_cap: the most new tokens of one request, None without a cap (R3.32).
        defers_prefills: running prefills wait for a later step (R3.43).
        num_tokens: tokens of all rows so far.
    """

    step_id: int
    budget: int
    input_budget: int
    num_groups: int
    prefill_cap: int | None = None
    appends_drafts: bool = False
    defers_prefills: bool = False
    num_tokens: int = 0
    rows: list[LiveRequest] = field(default_factory=list)
    slots: Int32Array = field(default_factory=lambda: EMPTY)
    computed: Int32Array = field(default_factory=lambda: EMPTY)
    counts: Int32Array = field(default_factory=lambda: EMPTY)
    updates: tuple[BlockUpdate, ...] = ()
    admitted: list[LiveRequest] = field(default_factory=list)
    admitted_computed: list[int] = field(default_factory=list)
    admitted_counts: list[int] = field(default_factory=list)
    new_rows: list[NewRow] = field(default_factory=list)

    def room(self, draft_slots: int) -> int:
        """Most new tokens of one more row, for which the model appends up to ``draft_slots`` drafts (R3.45)."""
        return max(min(self.budget, self.input_budget - draft_slots), 0)

    def charge(self, num_tokens: int, draft_slots: int) -> None:
        self.num_tokens += num_tokens
        self.budget -= num_tokens
        self.input_budget -= num_tokens + draft_slots

    @property
    def all_rows(self) -> list[LiveRequest]:
        """Requests of the step's rows, in their order."""
        return self.rows + self.admitted if self.admitted else self.rows

    def take_running(
        self,
        requests: list[LiveRequest],
        slots: Int32Array,
        computed: Int32Array,
        counts: Int32Array,
        grown: GrownRows,
        draft_slots: int = 0,
    ) -> None:
        """Adopt the running loop's result. Arrays run over ``requests``; rows with a count of 0 are left out.

        ``draft_slots``: of all rows together.
        """
        updates = _block_updates(len(requests), self.num_groups, grown)
        if not counts.all():
            chosen = np.flatnonzero(counts)
            requests = [requests[i] for i in chosen.tolist()]
            slots, computed, counts = slots[chosen], computed[chosen], counts[chosen]
            updates = tuple(BlockUpdate(update.counts[chosen], update.ids) for update in updates)
        self.rows, self.slots, self.computed, self.counts, self.updates = requests, slots, computed, counts, updates
        self.charge(int(counts.sum()), draft_slots)

    def admit(self, request: LiveRequest, num_computed: int, num_new: int, row: NewRow, draft_slots: int = 0) -> None:
        self.admitted.append(request)
        self.admitted_computed.append(num_computed)
        self.admitted_counts.append(num_new)
        self.new_rows.append(row)
        self.charge(num_new, draft_slots)

    def build(
        self,
        table: SlotTable,
        finished_slots: list[int],
        preempted_slots: list[int],
        common_blocks: tuple[int, ...],
        blocks_to_zero: list[int],
        block_copies: list[tuple[int, int]],
        *,
        is_ahead: bool = True,
    ) -> SchedulerOutput:
        """The finished record. Leaves all state as it is. ``is_ahead``: other steps are under way."""
        slots, computed, counts, updates = self.slots, self.computed, self.counts, self.updates
        if not updates:
            updates = _block_updates(0, self.num_groups, GrownRows())
        if self.admitted:
            slots = np.concatenate([slots, _int32([row.slot for row in self.new_rows])])
            computed = np.concatenate([computed, _int32(self.admitted_computed)])
            counts = np.concatenate([counts, _int32(self.admitted_counts)])
            none = np.zeros(len(self.admitted), dtype=np.int32)
            updates = tuple(BlockUpdate(np.concatenate([u.counts, none]), u.ids) for u in updates)
        # Past the known tokens and the outputs under way come guesses (R3.52).
        beyond = computed + counts - table.num_tokens[slots]
        if is_ahead:
            beyond -= table.placeholders[slots]
        return SchedulerOutput(
            step_id=self.step_id,
            slots=slots,
            generations=table.generation[slots],
            num_computed_tokens=computed,
            num_scheduled_tokens=counts,
            samples=table.yields_sample(slots, beyond),
            new_rows=tuple(self.new_rows),
            new_blocks=updates,
            finished_slots=_int32(finished_slots) if finished_slots else EMPTY,
            preempted_slots=_int32(preempted_slots) if preempted_slots else EMPTY,
            blocks_to_zero=_int32(blocks_to_zero) if blocks_to_zero else EMPTY,
            block_copies=np.asarray(block_copies, dtype=np.int32) if block_copies else None,
            num_common_prefix_blocks=common_blocks,
            num_tokens=self.num_tokens,
            drafts=_drafts(table, slots, beyond) if table.uses_drafts else None,
            extensions={},
        )


def _int32(values: Sequence[int]) -> Int32Array:
    return np.asarray(values, dtype=np.int32)


def _drafts(table: SlotTable, slots: Int32Array, beyond: Int32Array) -> TokenUpdate | None:
    counts = np.maximum(beyond, 0)
    if not counts.any():
        return None
    known = table.drafts[slots]
    return TokenUpdate(counts, known[np.arange(known.shape[1]) < counts[:, None]])


def _block_updates(num_rows: int, num_groups: int, grown: GrownRows) -> tuple[BlockUpdate, ...]:
    updates = []
    for group in range(num_groups):
        counts = np.zeros(num_rows, dtype=np.int32)
        ids: Int32Array = EMPTY
        if grown.positions:
            counts[grown.positions] = [len(blocks) for blocks in grown.ids[group]]
            ids = _int32(list(chain.from_iterable(grown.ids[group])))
        updates.append(BlockUpdate(counts, ids))
    return tuple(updates)
