"""The running loop: every request that holds KV moves on before anybody is admitted."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardpoint.interfaces import Int32Array
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.plan import GrownRows, StepPlan
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.state import SchedulerState


@dataclass(slots=True)
class _Pass:
    """Arrays over the running list: ``counts`` int32, 0 where a request gets nothing in this step."""

    requests: list[LiveRequest]
    slots: Int32Array
    computed: Int32Array
    counts: Int32Array
    grown: GrownRows


class RunningLoop:
    """First come, first served: the budget goes to the head of the list, shortage of blocks hits its tail.

    Rows that stay within their blocks are handled as arrays; only a row at a block boundary is visited.
    """

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def run(self, plan: StepPlan) -> bool:
        """Fill ``plan`` with running rows. Returns whether anybody was preempted."""
        state = self._state
        running = state.running
        if not running.requests or plan.budget <= 0:
            return False
        preempted = False
        work = _Pass(
            running.requests, running.slots, state.table.computed[running.slots], _zeros(len(running)), GrownRows()
        )
        start = 0
        while start < len(work.requests):
            self._distribute(work, start, plan)
            short = self._grow(work, start)
            if short is None:
                break
            # No blocks for row ``short``: rows before it stand, the last request of the list makes room (R3.48).
            victim = running.requests[-1]
            if not self._lifecycle.can_preempt(victim):
                work.counts[short:] = 0
                break
            self._lifecycle.preempt(victim)
            preempted = True
            self._shorten(work, len(running))
            start = short
        plan.take_running(work.requests, work.slots, work.computed, work.counts, work.grown)
        self._enter_full_blocks(plan)
        return preempted

    def _distribute(self, work: _Pass, start: int, plan: StepPlan) -> None:
        """New tokens of the rows from ``start`` on, within what earlier rows left of the budget (R3.44, R3.45)."""
        slots = work.slots[start:]
        wanted = self._state.table.num_tokens[slots] - work.computed[start:]
        if plan.prefill_cap is not None:
            np.minimum(wanted, plan.prefill_cap, out=wanted)
        left = plan.budget - int(work.counts[:start].sum())
        if int(wanted.sum()) > left:
            granted = np.minimum(np.cumsum(wanted, dtype=np.int64), left)
            wanted = np.diff(granted, prepend=0).astype(np.int32)
        work.counts[start:] = wanted

    def _grow(self, work: _Pass, start: int) -> int | None:
        """Allocate for rows that outgrow their blocks. Returns the position that got none, None when all fit."""
        state = self._state
        table = state.table
        ends = work.computed[start:] + work.counts[start:]
        if state.extensions.lookahead:
            ends = self._with_lookahead(work, start, ends)
        outgrown = np.flatnonzero((ends > table.capacity[work.slots[start:]]) & (work.counts[start:] > 0))
        if not len(outgrown):
            return None
        grow, requests, notify = state.kv.grow, work.requests, state.extensions.allocation
        short: int | None = None
        done = 0
        for position, end in zip((outgrown + start).tolist(), ends[outgrown].tolist(), strict=True):
            request = requests[position]
            blocks = grow(request.request_id, end)
            if blocks is None:
                short = position
                break
            done += 1
            work.grown.positions.append(position)
            work.grown.blocks.append(blocks)
            if notify:
                state.extensions.after_allocation(request, blocks, 0)
        grown = outgrown[:done]
        table.capacity[work.slots[start:][grown]] = state.kv.covered_all(ends[grown])
        return short

    def _with_lookahead(self, work: _Pass, start: int, ends: Int32Array) -> Int32Array:
        host, kv = self._state.extensions, self._state.kv
        wanted = [
            kv.end_with_lookahead(end, host.num_lookahead_tokens(request))
            for end, request in zip(ends.tolist(), work.requests[start:], strict=True)
        ]
        return np.asarray(wanted, dtype=np.int32)

    def _shorten(self, work: _Pass, length: int) -> None:
        work.requests = work.requests[:length]
        work.slots, work.computed, work.counts = work.slots[:length], work.computed[:length], work.counts[:length]

    def _enter_full_blocks(self, plan: StepPlan) -> None:
        """Blocks that this step completes can be found from now on: later rows and steps run after they are written."""
        kv = self._state.kv
        if not kv.prefix_caching or not plan.rows:
            return
        size = kv.hash_block_size
        ends = plan.computed + plan.counts
        for row in np.flatnonzero(ends // size > plan.computed // size).tolist():
            request = plan.rows[row]
            kv.enter_full_blocks(request.request_id, request.block_hashes, int(ends[row]))


def _zeros(length: int) -> Int32Array:
    return np.zeros(length, dtype=np.int32)
