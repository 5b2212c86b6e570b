"""The running loop: every request that holds KV moves on before anybody is admitted."""

from __future__ import annotations

from dataclasses import dataclass
from typing import cast

import numpy as np
from numpy.typing import NDArray

from hardpoint.interfaces import BoolArray, Int32Array
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.plan import GrownRows, StepPlan
from hardpoint_scheduling.schedulers.request import LiveRequest, hash_full_blocks
from hardpoint_scheduling.schedulers.state import SchedulerState

_ENTERED_AT_ONCE = 16
"""Rows whose full blocks become known in the step that fills them, also where many rows fill one at once."""


@dataclass(slots=True)
class _Pass:
    """Arrays over the running list, all int32: ``wanted`` tokens if nothing else limits a request, and ``counts``, what
    it gets; 0 where it gets nothing in this step.
    """

    requests: list[LiveRequest]
    slots: Int32Array
    computed: Int32Array
    wanted: Int32Array
    counts: Int32Array
    grown: GrownRows

    def remove(self, position: int) -> None:
        """Take out a row, with whatever it got: its tokens are in the budget again (R3.51)."""
        self.requests = self.requests[:position] + self.requests[position + 1 :]
        self.slots, self.computed, self.wanted, self.counts = (
            np.delete(column, position) for column in (self.slots, self.computed, self.wanted, self.counts)
        )
        self.grown.remove(position)


class RunningLoop:
    """The budget goes to the head of the list; where blocks are short, the policy says who gives up its own.

    Rows that stay within their blocks are handled as arrays; only rows at a block boundary are visited.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def run(self, plan: StepPlan) -> bool:
        """Fill ``plan`` with running rows. Returns whether blocks were so short that somebody was preempted, or waits
        for its own: nobody is to be admitted then.
        """
        state = self._state
        if not state.running.requests or plan.budget <= 0:
            return False
        work = self._begin(plan)
        lacking = False
        start = 0
        while start < len(work.requests):
            self._distribute(work, start, plan)
            if state.kv.step_alignment > 1 and state.limits.chunked_prefill:
                self._align(work, start)
            if state.encoder is not None:
                rest = slice(start, None)
                state.encoder.keep_whole(work.requests[rest], work.slots[rest], work.computed[rest], work.counts[rest])
            short = self._grow(work, start)
            if short is None:
                break
            victim = self._victim()
            if not self._lifecycle.can_preempt(victim):
                # R3.49: its blocks are still written, so preempting would not help; rows before this one stand.
                work.counts[short:] = 0
                break
            position = state.running.requests.index(victim)
            lacking = True
            if position == short and self._will_release(victim):
                work.counts[short:] = 0
                break
            self._lifecycle.preempt(victim)
            work.remove(position)
            if position == short:
                # R3.50: nobody is left to make room.
                work.counts[short:] = 0
                break
            start = short if position > short else short - 1
        draft_slots = sum(self._draft_slots(work)) if plan.appends_drafts else 0
        plan.take_running(work.requests, work.slots, work.computed, work.counts, work.grown, draft_slots)
        if state.encoder is not None:
            state.encoder.settle_rows(plan.rows, plan.computed + plan.counts)
        self._enter_full_blocks(plan)
        return lacking

    def _begin(self, plan: StepPlan) -> _Pass:
        """What every request would like to compute: known tokens, outputs under way and drafts (R3.44)."""
        state, table = self._state, self._state.table
        slots = state.running.slots
        computed, known = table.computed[slots], table.num_tokens[slots]
        wanted = known - computed
        if state.inflight:
            wanted += table.placeholders[slots]
        if table.uses_drafts:
            wanted += table.num_drafts[slots]
            # R3.45: the last token of a sequence needs no KV, and drafts past it are of no use.
            np.clip(wanted, 0, np.maximum(table.limit[slots] - 1 - computed, 0), out=wanted)
        if state.inflight:
            wanted[self._held_back(plan, slots, known)] = 0
        if plan.defers_prefills:
            wanted[computed < known - 1] = 0
        if plan.prefill_cap is not None:
            np.minimum(wanted, plan.prefill_cap, out=wanted)
        if state.encoder is not None:
            state.encoder.lower(state.running.requests, slots, computed, wanted, plan.room(0))
        return _Pass(state.running.requests, slots, computed, wanted, np.zeros_like(wanted), GrownRows())

    def _held_back(self, plan: StepPlan, slots: Int32Array, known: Int32Array) -> BoolArray:
        """Rows whose samples under way already reach the length limit, each bringing at least one token (R3.41), and
        rows whose next decode has to wait for a lap of the pipeline (R3.42).
        """
        table = self._state.table
        owed = table.owed[slots]
        held: BoolArray = (owed > 0) & (known + owed >= table.limit[slots])
        if self._state.limits.num_pipeline_stages > 1:
            held |= table.next_decode_step[slots] > plan.step_id
        return held

    def _align(self, work: _Pass, start: int) -> None:
        """Chunks of prompts end where states can be found (R1.33), if they reach such a place."""
        alignment, computed, counts = self._state.kv.step_alignment, work.computed[start:], work.counts[start:]
        aligned = (computed + counts) // alignment * alignment
        is_chunk = computed < self._state.table.num_tokens[work.slots[start:]] - 1
        np.copyto(counts, aligned - computed, where=is_chunk & (aligned > computed))

    def _distribute(self, work: _Pass, start: int, plan: StepPlan) -> None:
        """New tokens of the rows from ``start`` on, within what earlier rows left of the budgets (R3.45)."""
        if plan.appends_drafts:
            self._distribute_with_drafts(work, start, plan)
            return
        wanted = work.wanted[start:]
        left = plan.room(0) - (int(work.counts[:start].sum()) if start else 0)
        if int(wanted.sum()) > left:
            granted = np.minimum(np.cumsum(wanted, dtype=np.int64), left)
            wanted = np.diff(granted, prepend=0).astype(np.int32)
        work.counts[start:] = wanted

    def _distribute_with_drafts(self, work: _Pass, start: int, plan: StepPlan) -> None:
        """One by one: a row that gets anything also takes room for its drafts out of the input budget."""
        work.counts[start:] = 0
        taken = int(work.counts.sum())
        budget, inputs = plan.budget - taken, plan.input_budget - taken - sum(self._draft_slots(work))
        for position, wanted in enumerate(work.wanted[start:].tolist(), start):
            draft_slots = self._state.extensions.num_lookahead_tokens(work.requests[position])
            count = max(min(wanted, budget, inputs - draft_slots), 0)
            if count:
                work.counts[position] = count
                budget -= count
                inputs -= count + draft_slots

    def _draft_slots(self, work: _Pass) -> list[int]:
        """Of the rows that got tokens."""
        host = self._state.extensions
        return [host.num_lookahead_tokens(work.requests[i]) for i in np.flatnonzero(work.counts).tolist()]

    def _victim(self) -> LiveRequest:
        """R3.48."""
        state = self._state
        running = state.running.requests
        if state.policy.picks_last:
            return running[-1]
        return cast("LiveRequest", state.policy.victim(running))

    def _will_release(self, request: LiveRequest) -> bool:
        """Whether the request may give up blocks once its own steps in flight are through (R3.77).

        Its bound holds with one step in flight (R1.33, R1.35): a request alone in the smallest pool that more of them
        outgrow waits for them. If it was preempted instead (R3.50), it would do the same again and never get further.
        """
        return self._state.kv.releases and int(self._state.table.in_flight[request.slot]) > 0

    def _grow(self, work: _Pass, start: int) -> int | None:
        """Allocate for rows that outgrow their blocks. Returns the position that got none, None when all fit."""
        state, table = self._state, self._state.table
        ends = work.computed[start:] + work.counts[start:]
        if state.extensions.lookahead:
            ends = self._with_lookahead(work, start, ends)
        is_beyond = ends > table.capacity[work.slots[start:]]
        if not is_beyond.any():
            return None
        outgrown = np.flatnonzero(is_beyond & (work.counts[start:] > 0))
        if not len(outgrown):
            return None
        positions = (outgrown + start).tolist()
        slots = work.slots[start:][outgrown]
        # R3.77: steps in flight still read what the counters already count as passed.
        processed = (table.computed[slots] - table.in_flight[slots]).tolist() if state.kv.releases else None
        names = [work.requests[position].request_id for position in positions]
        sure = self._sure(work, outgrown + start) if state.kv.tells_guesses_apart else None
        growth = state.kv.grow_many(names, ends[outgrown].tolist(), processed, None if sure is None else sure.tolist())
        done = growth.num_rows
        work.grown.add(positions[:done], growth.ids)
        table.capacity[slots[:done]] = state.kv.covered_all(
            ends[outgrown[:done]], None if sure is None else sure[:done]
        )
        if state.extensions.allocation:
            for row, position in enumerate(positions[:done]):
                state.extensions.after_allocation(work.requests[position], growth.row(row), 0)
        return positions[done] if done < len(positions) else None

    def _sure(self, work: _Pass, positions: NDArray[np.intp]) -> Int32Array:
        """Ends of the rows at ``positions`` without guesses and lookahead."""
        table, slots = self._state.table, work.slots[positions]
        known = table.num_tokens[slots] + table.placeholders[slots]
        sure: Int32Array = np.minimum(work.computed[positions] + work.counts[positions], known)
        return sure

    def _with_lookahead(self, work: _Pass, start: int, ends: Int32Array) -> Int32Array:
        host, kv = self._state.extensions, self._state.kv
        wanted = [
            kv.end_with_lookahead(end, host.num_lookahead_tokens(request))
            for end, request in zip(ends.tolist(), work.requests[start:], strict=True)
        ]
        return np.asarray(wanted, dtype=np.int32)

    def _enter_full_blocks(self, plan: StepPlan) -> None:
        """Blocks that this step completes can be found from now on: later rows and steps run after they are written.

        Only known tokens count (R3.21): a guess, or an output under way, has no hash yet.
        """
        kv, table = self._state.kv, self._state.table
        if not kv.prefix_caching or not plan.rows:
            return
        size = kv.hash_block_size
        ends = plan.computed + plan.counts
        if self._state.inflight or table.uses_drafts:
            ends = np.minimum(ends, table.num_tokens[plan.slots])
        is_full = ends - table.entered[plan.slots] >= size
        if not is_full.any():
            return
        full = np.flatnonzero(is_full)
        full = full[: _most_entered(len(plan.rows), int(np.count_nonzero(plan.updates[0].counts)), size)]
        requests, ends = [plan.rows[row] for row in full.tolist()], ends[full]
        hashes = hash_full_blocks(self._state.hasher, requests)
        kv.enter_full_blocks_many([r.request_id for r in requests], hashes, ends.tolist())
        table.entered[plan.slots[full]] = ends // size * size


def _most_entered(num_rows: int, num_grown: int, block_size: int) -> int:
    """Rows that one step hashes and enters. Others wait a few steps, so that a step in which hundreds of rows fill or
    begin a block takes little longer than the rest. As many as fill one on average may enter in any case, and half as
    many more in a step without new blocks: so nobody waits until the next block is full.
    """
    average = -(-num_rows // block_size)
    return max(max(_ENTERED_AT_ONCE, average + average // 2) - num_grown, average)
