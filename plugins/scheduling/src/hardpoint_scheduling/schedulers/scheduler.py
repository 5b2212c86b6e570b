"""The scheduler: continuous batching over a shared state, whatever the policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Sequence

import numpy as np

from hardpoint.interfaces import (
    ENCODER_INPUTS,
    EngineOutput,
    EngineRequest,
    FinishReason,
    KVEvent,
    PauseMode,
    RunnerOutput,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint_scheduling.kv_cache.coordinator import UNLIMITED_TOKENS
from hardpoint_scheduling.schedulers.admission import Admission
from hardpoint_scheduling.schedulers.intake import Intake
from hardpoint_scheduling.schedulers.integrity import check_state
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.plan import StepPlan
from hardpoint_scheduling.schedulers.prefill_balance import PrefillBalance
from hardpoint_scheduling.schedulers.remote_kv import RemoteKV
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.running import RunningLoop
from hardpoint_scheduling.schedulers.slots import NO_TOKEN
from hardpoint_scheduling.schedulers.state import InflightStep, SchedulerState
from hardpoint_scheduling.schedulers.update import OutputUpdate


class BatchScheduler(Scheduler):
    """Thin coordinator: the running loop, admission, output update and life cycle do the work on a shared state.

    Steps are planned ahead of the output of earlier ones, up to ``max_inflight_steps``: what these will sample counts
    as placeholders, and the workers know the tokens behind them. Rows of one step may share blocks: a block completed
    by an earlier row can be part of a later row's prefix, so workers write the KV of all rows of a layer before any row
    attends.
    """

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._lifecycle = Lifecycle(state)
        self._running = RunningLoop(state, self._lifecycle)
        self._remote = RemoteKV(state, self._lifecycle)
        self._admission = Admission(state, self._remote)
        self._intake = Intake(state, self._admission)
        self._balance = PrefillBalance(state.limits.prefill_interval)
        self._update = OutputUpdate(state, self._lifecycle)
        self._deadlines: list[tuple[float, str]] = []
        self._common_blocks: tuple[int, ...] = ()
        self._common_of: list[LiveRequest] | None = None

    def add(self, request: EngineRequest) -> EngineOutput | None:
        refusal = self._intake.add(request)
        if refusal is None and request.deadline is not None:
            self._remember_deadline(request.deadline, request.request_id)
        return refusal

    def _remember_deadline(self, deadline: float, request_id: str) -> None:
        """Deadlines of ended requests stay until they are most of the heap: long ones must not keep them all."""
        live = self._state.live
        if len(self._deadlines) > 2 * len(live) + 64:
            self._deadlines = [entry for entry in self._deadlines if entry[1] in live]
            heapq.heapify(self._deadlines)
        heapq.heappush(self._deadlines, (deadline, request_id))

    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        return self._lifecycle.finish_from_outside(request_ids, reason, error)

    def schedule(self) -> SchedulerOutput:
        state = self._state
        self._end_overdue()
        self._lifecycle.release_held()
        self._remote.take_arrivals()
        plan = self._start_plan()
        lacking = self._running.run(plan)
        if state.charges:
            for request, num_tokens in zip(plan.rows, plan.counts.tolist(), strict=True):
                state.policy.on_scheduled(request, num_tokens)
        (self._admission.run_short if lacking else self._admission.run)(plan)
        step = plan.build(
            state.table,
            _drained(state.finished_slots),
            _drained(state.preempted_slots),
            self._num_common_blocks(plan),
            state.kv.take_blocks_to_zero(),
            state.kv.take_block_copies(),
            is_ahead=bool(state.inflight),
        )
        if self._balance.enabled:
            self._balance.note(plan.step_id, was_full=plan.room(0) == 0)
        state.extensions.attach_metadata(step)
        if step.num_tokens:
            if state.encoder is not None and (inputs := state.encoder.build(plan.all_rows)) is not None:
                step.extensions[ENCODER_INPUTS] = inputs
            state.fences.scheduled += 1
            is_only = not state.inflight
            state.table.advance(step, state.fences.scheduled, state.decode_interval, is_only=is_only)
            state.inflight.append(InflightStep(step, plan.all_rows))
            if state.expects_drafts:
                self._expect_drafts(state.inflight[-1])
        return step

    def _expect_drafts(self, entry: InflightStep) -> None:
        """The next step verifies what the worker will guess after this one's samples, unseen here."""
        rows = np.flatnonzero(entry.step.samples)
        host = self._state.extensions
        counts = np.asarray([host.num_expected_drafts(entry.rows[row]) for row in rows.tolist()], dtype=np.int32)
        ids = np.full(int(counts.sum()), NO_TOKEN, dtype=np.int32)
        self._state.table.attach_drafts(entry.step.slots[rows], counts, ids)

    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        state = self._state
        outputs = self.take_outputs()
        if step.num_tokens:
            outputs.extend(self._update.apply(step, output))
        if state.extensions.all:
            state.extensions.on_output(step, output)
            self._lifecycle.release_held()
        return outputs

    def take_outputs(self) -> list[EngineOutput]:
        """Terminal outputs that arose while scheduling and were not delivered yet; each is returned once."""
        outputs, self._state.ended = self._state.ended, []
        return outputs

    def take_events(self) -> Sequence[KVEvent]:
        log = self._state.kv.pool.log
        return () if log is None else log.take()

    def has_work(self) -> bool:
        state = self._state
        if state.finished_slots or state.preempted_slots or state.ended or self._is_overdue():
            return True
        if state.pause is PauseMode.ALL:
            return False
        if state.running.requests:
            return True
        if state.pause is PauseMode.NEW:
            return bool(state.returning)
        return state.num_waiting > 0

    def live_request_ids(self) -> Iterable[str]:
        return list(self._state.live)

    def stats(self) -> SchedulerStats:
        state = self._state
        return SchedulerStats(
            num_running=len(state.running),
            num_waiting=state.num_waiting,
            num_free_blocks=state.kv.pool.num_free,
            num_total_blocks=state.kv.pool.num_usable,
            prefix_cache_queries=state.counters.prefix_queries,
            prefix_cache_hits=state.counters.prefix_hits,
            num_preemptions=state.counters.preemptions,
            num_skipped=len(state.skipped) + len(state.loads.under_way),
            num_cached_blocks=state.kv.pool.num_cached,
            num_evictions=state.kv.pool.num_evictions,
            recent_prefix_queries=state.counters.recent_hits.num_queried,
            recent_prefix_hits=state.counters.recent_hits.num_found,
            step_id=state.counters.next_step_id,
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        state = self._state
        if (reset_running and not self._lifecycle.preempt_all()) or not state.kv.reset():
            return False
        return state.encoder is None or state.encoder.cache.reset()

    def set_pause(self, mode: PauseMode) -> None:
        self._state.pause = mode

    def check_integrity(self) -> None:
        check_state(self._state)

    def _start_plan(self) -> StepPlan:
        """A step with whole budgets; whether prefills take part in it is up to the cadence of all engines (R3.43)."""
        state, plan = self._state, self._state.start_plan()
        state.kv.begin_step()
        if state.encoder is not None:
            state.encoder.begin_step()
        if self._balance.enabled:
            slots = state.running.slots
            any_decodes = bool((state.table.computed[slots] >= state.table.num_tokens[slots] - 1).any())
            plan.defers_prefills = self._balance.defers(plan.step_id, any_decodes)
        return plan

    def _is_overdue(self) -> bool:
        return bool(self._deadlines) and self._deadlines[0][0] <= self._state.clock()

    def _end_overdue(self) -> None:
        while self._is_overdue():
            deadline, request_id = heapq.heappop(self._deadlines)
            live = self._state.live.get(request_id)
            if live is not None and live.record.deadline == deadline:
                text = "the deadline of the request has passed"
                self._state.ended.extend(self.finish([request_id], FinishReason.ABORT, text))

    def _num_common_blocks(self, plan: StepPlan) -> tuple[int, ...]:
        """Leading blocks that all running requests share and all rows of this step have computed before it.

        Sharing changes only with the members, so it is counted again only when the running list was replaced.
        """
        kv, requests = self._state.kv, self._state.running.requests
        if self._common_of is not requests:
            self._common_of = requests
            self._common_blocks = kv.num_common_blocks(requests[0].request_id) if requests else ()
        if not any(self._common_blocks):
            return (0,) * kv.num_groups
        shortest = min([*plan.admitted_computed, int(plan.computed.min(initial=UNLIMITED_TOKENS))])
        return tuple(
            min(n, shortest // size) for n, size in zip(self._common_blocks, kv.group_block_sizes(), strict=True)
        )


def _drained(slots: list[int]) -> list[int]:
    """A copy of ``slots``, which is empty afterwards: later changes do not reach a step already handed out."""
    taken = slots[:]
    slots.clear()
    return taken
