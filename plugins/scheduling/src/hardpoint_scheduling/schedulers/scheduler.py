"""The scheduler: continuous batching over a shared state, whatever the policy."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from hardpoint.errors import OverloadedError
from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    PauseMode,
    RunnerOutput,
    Scheduler,
    SchedulerOutput,
    SchedulerStats,
)
from hardpoint_scheduling.kv_cache.coordinator import UNLIMITED_TOKENS
from hardpoint_scheduling.schedulers.admission import Admission
from hardpoint_scheduling.schedulers.integrity import check_state
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.plan import StepPlan
from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.running import RunningLoop
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
        self._admission = Admission(state)
        self._update = OutputUpdate(state, self._lifecycle)
        self._deadlines: list[tuple[float, str]] = []
        self._common_blocks: tuple[int, ...] = ()
        self._common_of: list[LiveRequest] | None = None

    def add(self, request: EngineRequest) -> EngineOutput | None:
        state = self._state
        if request.request_id in state.live or state.kv.holds(request.request_id):
            raise ValueError(f"request {request.request_id} is already live or still holds blocks")
        refusal = self._refusal(request)
        if refusal is not None:
            return refusal
        if self._queue_is_full():
            raise OverloadedError(
                f"{state.num_waiting} requests wait already and --max-waiting allows {state.limits.max_waiting}; "
                "retry later or raise it"
            )
        live = LiveRequest(request, self._length_limit(request))
        if state.kv.prefix_caching:
            state.hasher.extend(request, live.tokens, live.block_hashes)
        state.live[request.request_id] = live
        state.waiting.append(live)
        if request.deadline is not None:
            heapq.heappush(self._deadlines, (request.deadline, request.request_id))
        state.extensions.on_added(live)
        return None

    def _queue_is_full(self) -> bool:
        """Requests that the next step can take to a free slot do not count as waiting."""
        state = self._state
        limit = state.limits.max_waiting
        return limit is not None and state.num_waiting >= limit + state.table.num_free

    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        return self._lifecycle.finish_from_outside(request_ids, reason, error)

    def schedule(self) -> SchedulerOutput:
        state = self._state
        self._end_overdue()
        self._lifecycle.release_held()
        plan = state.start_plan()
        preempted = self._running.run(plan)
        if state.charges:
            for request, num_tokens in zip(plan.rows, plan.counts.tolist(), strict=True):
                state.policy.on_scheduled(request, num_tokens)
        if not preempted:
            self._admission.run(plan)
        step = plan.build(
            state.table, _drained(state.finished_slots), _drained(state.preempted_slots), self._num_common_blocks(plan)
        )
        state.extensions.attach_metadata(step)
        if step.num_tokens:
            state.fences.scheduled += 1
            state.table.advance(step, state.fences.scheduled, state.decode_interval)
            state.inflight.append(InflightStep(step, plan.all_rows))
        return step

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

    def has_work(self) -> bool:
        state = self._state
        if state.finished_slots or state.preempted_slots or state.ended or self._is_overdue():
            return True
        if state.pause is PauseMode.ALL:
            return False
        if state.running.requests:
            return True
        if state.pause is PauseMode.NEW:
            return any(request.status is RequestStatus.PREEMPTED for request in (*state.skipped, *state.waiting))
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
            step_id=state.counters.next_step_id,
        )

    def reset_prefix_cache(self, reset_running: bool = False) -> bool:
        if reset_running and not self._lifecycle.preempt_all():
            return False
        return self._state.kv.reset()

    def set_pause(self, mode: PauseMode) -> None:
        self._state.pause = mode

    def check_integrity(self) -> None:
        check_state(self._state)

    def _refusal(self, request: EngineRequest) -> EngineOutput | None:
        """The terminal output of a request that could never produce a token."""
        length = len(request.prompt_token_ids)
        if length == 0:
            return EngineOutput(request.request_id, [], FinishReason.ERROR, error="the prompt has no tokens")
        wanted = request.sampling.max_tokens
        too_long = length >= self._state.limits.max_model_len or length > self._state.kv.largest_sequence
        if too_long or (wanted is not None and wanted <= 0):
            return EngineOutput(request.request_id, [], FinishReason.LENGTH)
        return None

    def _length_limit(self, request: EngineRequest) -> int:
        """Sequence length at which the request ends.

        Bounded by what the pool holds for one sequence, so that a request alone can always go on. The last token
        needs no KV: nothing follows it.
        """
        longest = min(self._state.limits.max_model_len, self._state.kv.largest_sequence + 1)
        if request.sampling.max_tokens is None:
            return longest
        return min(longest, len(request.prompt_token_ids) + request.sampling.max_tokens)

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
