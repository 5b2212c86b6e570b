"""Counters of running requests as arrays over slots, so that a steady step is a handful of numpy calls."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from hardpoint.interfaces import BoolArray, Int32Array, SchedulerOutput

if TYPE_CHECKING:
    from hardpoint_scheduling.schedulers.request import LiveRequest

STOP_WIDTH = 8
"""Stop ids per slot that are compared as arrays; a request with more is looked at one by one."""

NO_TOKEN = -1
"""Padding of stop id rows: no token has this id."""


class SlotTable:
    """Struct of arrays, one entry per slot (``0 <= slot < num_slots``).

    Attributes:
        owner: the request that holds the slot, or None.
        generation: int32, how often the slot was handed out while it is held, 0 while it is free. So a late result of
            an earlier owner matches neither a free slot nor the next owner.
        num_tokens: int32, length of the known sequence.
        computed: int32, tokens whose KV exists once all scheduled steps ran and none of their drafts is refused.
        placeholders: int32, scheduled outputs that are not back: one per sample under way and one per draft before it.
        owed: int32, samples under way; each brings at least one token.
        in_flight: int32, scheduled tokens of steps that are not processed.
        num_drafts: int32, guesses to verify in the next step. drafts: int32 [slots, width], their ids; ``NO_TOKEN``
            for one that only the worker knows.
        next_decode_step: int64, id of the first step that may schedule the slot again.
        entered: int32, leading tokens whose blocks were offered to the prefix index.
        capacity: int32, tokens that the held blocks cover.
        limit: int32, ``num_tokens`` at which the request ends for reasons of length.
        stops_after: int32, stop ids count only once ``num_tokens`` exceeds this.
        last_step: int64, fence number of the last step that scheduled the slot.
        pools: bool, the request ends with a pooled result of its prompt: its rows yield no samples.
        detail: bool, the next output needs more than its token (first output, logprobs, many stop ids).
        stop_ids: int32 [slots, STOP_WIDTH], padded with ``NO_TOKEN``.
    """

    def __init__(self, num_slots: int) -> None:
        self.num_slots = num_slots
        self.owner: list[LiveRequest | None] = [None] * num_slots
        self.generation = np.zeros(num_slots, dtype=np.int32)
        self.num_tokens = np.zeros(num_slots, dtype=np.int32)
        self.computed = np.zeros(num_slots, dtype=np.int32)
        self.placeholders = np.zeros(num_slots, dtype=np.int32)
        self.owed = np.zeros(num_slots, dtype=np.int32)
        self.in_flight = np.zeros(num_slots, dtype=np.int32)
        self.num_drafts = np.zeros(num_slots, dtype=np.int32)
        self.drafts = np.full((num_slots, 0), NO_TOKEN, dtype=np.int32)
        self.next_decode_step = np.zeros(num_slots, dtype=np.int64)
        self.entered = np.zeros(num_slots, dtype=np.int32)
        self.capacity = np.zeros(num_slots, dtype=np.int32)
        self.limit = np.zeros(num_slots, dtype=np.int32)
        self.stops_after = np.zeros(num_slots, dtype=np.int32)
        self.last_step = np.zeros(num_slots, dtype=np.int64)
        self.pools = np.zeros(num_slots, dtype=np.bool_)
        self.num_pooling = 0
        self.detail = np.zeros(num_slots, dtype=np.bool_)
        self.stop_ids = np.full((num_slots, STOP_WIDTH), NO_TOKEN, dtype=np.int32)
        self._free = list(range(num_slots - 1, -1, -1))
        self._handed_out = [0] * num_slots

    @property
    def num_free(self) -> int:
        return len(self._free)

    def assign(self, request: LiveRequest, num_computed: int, capacity: int) -> int:
        """Give ``request`` a free slot with every entry set anew."""
        slot = self._free.pop()
        self._handed_out[slot] += 1
        self.owner[slot] = request
        self.generation[slot] = self._handed_out[slot]
        self.num_tokens[slot] = request.num_tokens
        self.computed[slot] = num_computed
        self.capacity[slot] = capacity
        self.limit[slot] = request.limit
        sampling = request.record.sampling
        self.stops_after[slot] = request.num_prompt_tokens + sampling.min_tokens
        for column in (self.placeholders, self.owed, self.in_flight, self.num_drafts, self.entered):
            column[slot] = 0
        self.last_step[slot] = self.next_decode_step[slot] = 0
        stops = [*sampling.stop_token_ids, *(() if sampling.ignore_eos else request.record.eos_token_ids)]
        many_stops = len(stops) > STOP_WIDTH
        self.stop_ids[slot] = NO_TOKEN
        if not many_stops:
            self.stop_ids[slot, : len(stops)] = stops
        self.detail[slot] = True
        self.pools[slot] = request.pools
        self.num_pooling += request.pools
        request.slot, request.table = slot, self
        return slot

    def release(self, request: LiveRequest) -> int:
        """Take the slot back; results still under way for it are stale from now on."""
        slot = request.slot
        if slot is None or self.owner[slot] is not request:
            raise RuntimeError(f"request {request.request_id} does not own slot {slot}")
        self.owner[slot] = None
        self.num_pooling -= request.pools
        self.generation[slot] = 0
        request.slot = request.table = None
        self._free.append(slot)
        return slot

    @property
    def uses_drafts(self) -> bool:
        """Whether any request ever had drafts: without them their columns need not be looked at."""
        return self.drafts.shape[1] > 0

    def yields_sample(self, slots: Int32Array, beyond: Int32Array) -> BoolArray:
        """Rows whose last scheduled token yields a sample, given by how much they reach past the known tokens."""
        samples: BoolArray = beyond >= 0
        return samples & ~self.pools[slots] if self.num_pooling else samples

    def is_through(self, step: SchedulerOutput) -> BoolArray:
        """Rows whose task pools and whose prompt ``step`` completed, as long as they hold their slots."""
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        through: BoolArray = self.pools[step.slots] & (ends >= self.num_tokens[step.slots])
        return through

    def advance(self, step: SchedulerOutput, fence: int, decode_interval: int, *, is_only: bool = False) -> None:
        """Count ``step`` as done, so that the next one can be planned before its output is there (R3.96).

        ``fence`` is the step's number; the next decode of a row that samples comes ``decode_interval`` steps later.
        ``is_only``: no other step is under way, so there is nothing to add to.
        """
        slots, samples = step.slots, step.samples
        self.computed[slots] = step.num_computed_tokens + step.num_scheduled_tokens
        if is_only:
            self.in_flight[slots] = step.num_scheduled_tokens
            self.owed[slots] = self.placeholders[slots] = samples
        else:
            self.in_flight[slots] += step.num_scheduled_tokens
            self.owed[slots] += samples
            self.placeholders[slots] += samples
        self.last_step[slots] = fence
        if decode_interval > 1:
            self.next_decode_step[slots[samples]] = step.step_id + decode_interval
        if step.drafts is not None:
            self.placeholders[slots] += step.drafts.counts
        if self.uses_drafts:
            self.num_drafts[slots] = 0

    def settle(
        self, step: SchedulerOutput, alive: BoolArray, num_sampled: Int32Array, *, is_plain: bool = False
    ) -> None:
        """The output of ``step`` is back for the rows in ``alive``: undo what :meth:`advance` assumed too much.

        A refused draft lowers what is computed (R3.81). ``is_plain``: all rows are alive, none has drafts, and no
        other step is under way.
        """
        if is_plain:
            for column in (self.in_flight, self.owed, self.placeholders):
                column[step.slots] = 0
            return
        rows = slice(None) if alive.all() else alive
        slots, samples = step.slots[rows], step.samples[rows]
        self.in_flight[slots] -= step.num_scheduled_tokens[rows]
        self.owed[slots] -= samples
        self.placeholders[slots] -= samples
        if step.drafts is not None:
            counts = step.drafts.counts[rows]
            self.placeholders[slots] -= counts
            self.computed[slots] -= np.where(samples, samples + counts - num_sampled[rows], 0)

    def attach_drafts(self, slots: Int32Array, counts: Int32Array, ids: Int32Array) -> None:
        """Guesses for the next step of ``slots`` replace those they had; ``counts[i]`` of the ``ids`` are row i's."""
        self.make_room_for_drafts(int(counts.max(initial=0)))
        rows = np.full((len(slots), self.drafts.shape[1]), NO_TOKEN, dtype=np.int32)
        rows[np.arange(rows.shape[1]) < counts[:, None]] = ids
        self.drafts[slots] = rows
        self.num_drafts[slots] = counts

    def make_room_for_drafts(self, width: int) -> None:
        """At least ``width`` drafts per slot can be held afterwards."""
        missing = width - self.drafts.shape[1]
        if missing > 0:
            room = np.full((self.num_slots, missing), NO_TOKEN, dtype=np.int32)
            self.drafts = np.concatenate([self.drafts, room], axis=1)

    def always_needs_detail(self, slot: int) -> bool:
        """Whether outputs after the first still cannot take the array path."""
        owner = self.owner[slot]
        if owner is None:
            return False
        sampling = owner.record.sampling
        eos = () if sampling.ignore_eos else owner.record.eos_token_ids
        return sampling.logprobs is not None or len(sampling.stop_token_ids) + len(eos) > STOP_WIDTH
