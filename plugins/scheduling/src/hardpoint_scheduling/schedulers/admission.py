"""The waiting loop: who starts, or starts again after preemption."""

from __future__ import annotations

import enum
from dataclasses import dataclass

import numpy as np

from hardpoint.interfaces import NewRow, PauseMode, WaitReason
from hardpoint_scheduling.kv_cache.coordinator import Blocks, Gates, Segments
from hardpoint_scheduling.kv_cache.encoder_cache import EncoderItem
from hardpoint_scheduling.schedulers.external import Start, find_start
from hardpoint_scheduling.schedulers.plan import StepPlan
from hardpoint_scheduling.schedulers.queues import LiveQueue
from hardpoint_scheduling.schedulers.remote_kv import RemoteKV, blocks_for_prefills
from hardpoint_scheduling.schedulers.request import LiveRequest, Milestone, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState

_BLOCKED_STATUS = {
    WaitReason.GRAMMAR: RequestStatus.WAITING_FOR_GRAMMAR,
    WaitReason.REMOTE_KV: RequestStatus.WAITING_FOR_REMOTE_KV,
    WaitReason.STREAMING_INPUT: RequestStatus.WAITING_FOR_STREAMING_INPUT,
}
"""A request that waits for a dependency only (an adapter's turn) shows no status of its own."""


class _Answer(enum.Enum):
    ADMITTED = enum.auto()
    LOADING = enum.auto()
    SET_ASIDE = enum.auto()
    NO_ROOM = enum.auto()


@dataclass(frozen=True, slots=True)
class _Refusal:
    """Who found no blocks last, and what was free then."""

    request_id: str
    num_free: int


class Admission:
    """Admits in the policy's order until a budget, the cap or the blocks run out; preempts nobody (R3.67)."""

    def __init__(self, state: SchedulerState, remote: RemoteKV) -> None:
        self._state = state
        self._remote = remote
        self._watermark_blocks = int(state.limits.watermark * state.kv.pool.num_blocks)
        self._sessions: dict[str, LiveRequest] = {}
        self._refusal: _Refusal | None = None

    def enqueue(self, request: LiveRequest) -> None:
        """A new request joins the queue it belongs to: it may have to wait for a grammar or its input (R1.6, R3.2)."""
        reason = self._state.extensions.blocker(request)
        if reason in _BLOCKED_STATUS:
            self._note_blocked(request, reason)
            self._state.skipped.append(request)
        else:
            self._state.waiting.append(request)

    def run(self, plan: StepPlan) -> None:
        state = self._state
        if state.pause is PauseMode.ALL or plan.defers_prefills or not state.num_waiting:
            return
        if self._sessions:
            self._wake_sessions()
        answer: _Answer | None = None
        set_aside: list[LiveRequest] = []
        passed_over: list[tuple[LiveQueue, LiveRequest]] = []
        num_returning = self._num_returning() if state.pause is PauseMode.NEW else None
        while plan.room(0) > 0 and self._has_place(plan) and num_returning != 0:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.pop()
            if num_returning is not None:
                if not request.num_preemptions:
                    passed_over.append((queue, request))
                    continue
                num_returning -= 1
            answer = self._try(request, plan)
            if answer is _Answer.NO_ROOM:
                queue.prepend(request)
                break
            if answer is _Answer.SET_ASIDE:
                set_aside.append(request)
        for queue, request in reversed(passed_over):
            queue.prepend(request)
        # R3.62: ahead of those that were set aside in earlier steps, in their own order.
        for request in reversed(set_aside):
            state.skipped.prepend(request)
        if answer is _Answer.NO_ROOM and not state.running.requests and not plan.admitted:
            self._use_what_arrived(plan)
        state.running.extend(plan.admitted)

    def run_short(self, plan: StepPlan) -> None:
        """Blocks are short among those that run, so that nobody is admitted in turn. Where the last one of these had to
        give up its own it would come back, find as few, and give up again."""
        state = self._state
        if state.running.requests or state.pause is PauseMode.ALL or plan.defers_prefills:
            return
        self._use_what_arrived(plan)
        state.running.extend(plan.admitted)

    def _use_what_arrived(self, plan: StepPlan) -> None:
        """Nobody runs, and blocks are short: they are held by requests whose loads have ended.

        One of these goes ahead of its turn, since its blocks are all it needs. New ones that a pause keeps out give
        them back instead, for those that ran before.
        """
        state = self._state
        for request_id in list(state.loads.arrived):
            request = state.live[request_id]
            if state.pause is PauseMode.NEW and not request.num_preemptions:
                state.loads.drop(request_id, state.kv)
            elif state.skipped.discard(request_id):
                if self._try(request, plan) is _Answer.ADMITTED:
                    return
                state.skipped.prepend(request)

    def _has_place(self, plan: StepPlan) -> bool:
        """R3.61. Sessions that wait for their input keep the place they will need."""
        state = self._state
        return len(state.running) + len(plan.admitted) + len(self._sessions) < state.active_cap

    def _num_returning(self) -> int:
        """Waiting requests that ran before: a pause for new ones lets them come back (R3.33)."""
        return len(self._state.returning - self._state.loads.under_way.keys())

    def _next_queue(self) -> LiveQueue | None:
        """The queue whose head the policy tries first (R3.5)."""
        held, waiting = self._state.skipped, self._state.waiting
        if len(held) and (not len(waiting) or self._state.policy.precedes(held.peek(), waiting.peek())):
            return held
        return waiting if len(waiting) else None

    def _wake_sessions(self) -> None:
        """Sessions whose input came are next in line, for the place that was kept for them."""
        state = self._state
        for request_id, request in list(self._sessions.items()):
            waits = request.status is RequestStatus.WAITING_FOR_STREAMING_INPUT
            if waits and state.extensions.blocker(request) is WaitReason.STREAMING_INPUT:
                continue
            del self._sessions[request_id]
            if waits and state.skipped.discard(request_id):
                state.skipped.prepend(request)

    def _note_blocked(self, request: LiveRequest, reason: WaitReason) -> None:
        status = _BLOCKED_STATUS.get(reason)
        # One that ran before stays what it is: it comes back as resumed.
        if status is not None and request.status not in (status, RequestStatus.PREEMPTED):
            request.move_to(status)
        if status is RequestStatus.WAITING_FOR_STREAMING_INPUT:
            self._sessions[request.request_id] = request

    def _is_held_back(self, request: LiveRequest) -> bool:
        """Whether something other than its turn keeps the request waiting (R3.62)."""
        if request.waits_for_stale_output:
            return True
        reason = self._state.extensions.blocker(request) if self._state.extensions.blocking else None
        if reason is not None:
            self._note_blocked(request, reason)
            return True
        if request.status.is_blocked:
            request.move_to(RequestStatus.WAITING)
        return False

    def _try(self, request: LiveRequest, plan: StepPlan) -> _Answer:
        state = self._state
        if self._is_held_back(request):
            return _Answer.SET_ASIDE
        if self._is_refused_again(request):
            return _Answer.NO_ROOM
        start = find_start(state, request)
        if start is None:
            return _Answer.SET_ASIDE
        if start.asynchronous:
            return self._load(request, start, plan)
        lookahead = state.extensions.num_lookahead_tokens(request) if state.extensions.lookahead else 0
        num_new = self._new_tokens(request, start, plan, lookahead)
        blocks = self._allocate(request, start, num_new, lookahead, plan) if num_new > 0 else None
        if blocks is None:
            if state.encoder is not None:
                state.encoder.give_up(request)
            if num_new > 0:
                self._refusal = _Refusal(request.request_id, state.kv.pool.num_free)
            return _Answer.NO_ROOM
        self._enter(request, plan, blocks, start, num_new, lookahead)
        return _Answer.ADMITTED

    def _is_refused_again(self, request: LiveRequest) -> bool:
        """Whether nothing was freed since the request found too few blocks: to look its prefix up in every step until
        something is would cost more than the step. Those that run will free some.
        """
        refusal, state = self._refusal, self._state
        return (
            refusal is not None
            and refusal.request_id == request.request_id
            and state.kv.pool.num_free <= refusal.num_free
            and bool(state.running.requests)
        )

    def _new_tokens(self, request: LiveRequest, start: Start, plan: StepPlan, lookahead: int) -> int:
        """R3.66; 0 when the step has no room for the request."""
        num_new = request.num_tokens - start.num_computed
        chunks = self._state.limits.chunked_prefill and not self._state.kv.needs_whole_prompts
        if plan.prefill_cap is not None and not self._state.kv.needs_whole_prompts:
            num_new = min(num_new, plan.prefill_cap)
        room = plan.room(lookahead if plan.appends_drafts else 0)
        if num_new > room and not chunks:
            return 0
        num_new = min(num_new, room)
        if chunks:
            num_new = self._state.kv.aligned_end(start.num_computed, start.num_computed + num_new) - start.num_computed
        if self._state.encoder is None or not request.record.features:
            return num_new
        reserved = self._state.encoder.reserve(request, start.num_computed, num_new, room)
        return reserved if reserved == num_new or chunks else 0

    def _allocate(
        self, request: LiveRequest, start: Start, num_new: int, lookahead: int, plan: StepPlan
    ) -> Blocks | None:
        """The request's whole tables, None without a change when there is no room for it."""
        kv = self._state.kv
        if start.num_allocated:
            # Room for its tokens was kept while the load was under way, so no gate stands before it; with lookahead,
            # which was not counted, it could wait for others that wait for it.
            grown = kv.grow(request.request_id, start.num_computed + num_new)
            return None if grown is None else kv.block_ids(request.request_id)
        segments = _segments(request, start, num_new, lookahead)
        return kv.allocate_slots(request.request_id, segments, start.hit, self._gates(request, plan))

    def _load(self, request: LiveRequest, start: Start, plan: StepPlan) -> _Answer:
        """Blocks for an asynchronous load, which must not take those that prefills under way still need (R3.65, R3.75).

        Nor may it begin what it cannot end: requests that each hold a part would wait for one another. Nothing is
        computed meanwhile, so there is no lookahead either.
        """
        state = self._state
        reserved = self._gates(request, plan).reserved_blocks + blocks_for_prefills(state, plan.admitted)
        segments = _segments(request, start, 0, 0)
        gates = Gates(full_sequence_must_fit=True, reserved_blocks=reserved)
        blocks = state.kv.allocate_slots(request.request_id, segments, start.hit, gates)
        if blocks is None:
            self._refusal = _Refusal(request.request_id, state.kv.pool.num_free)
            return _Answer.NO_ROOM
        self._remote.begin(request, start.num_local, start.num_external)
        state.extensions.after_allocation(request, blocks, start.num_external)
        return _Answer.LOADING

    def _gates(self, request: LiveRequest, plan: StepPlan) -> Gates:
        """R3.73, R3.74: the watermark protects those who run; with nobody running it could only block forever."""
        state = self._state
        anybody = bool(state.running.requests or plan.admitted)
        guarded = anybody and request.status in (RequestStatus.WAITING, RequestStatus.PREEMPTED)
        return Gates(
            full_sequence_must_fit=state.limits.full_sequence_must_fit,
            reserved_blocks=self._watermark_blocks if guarded else 0,
        )

    def _enter(
        self, request: LiveRequest, plan: StepPlan, blocks: Blocks, start: Start, num_new: int, lookahead: int
    ) -> None:
        state = self._state
        num_computed, end = start.num_computed, start.num_computed + num_new
        state.loads.arrived.pop(request.request_id, None)
        state.loads.incomplete.discard(request.request_id)
        state.returning.discard(request.request_id)
        request.move_to(RequestStatus.RUNNING)
        allocated = (
            max(end, start.num_allocated) if start.num_allocated else state.kv.end_with_lookahead(end, lookahead)
        )
        capacity = state.kv.covered(allocated, end)
        slot = state.table.assign(request, num_computed, capacity)
        now = state.clock()
        request.note(Milestone.SCHEDULED, now)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = now
        plan.admit(
            request, num_computed, num_new, _row(state, request, slot, blocks), lookahead if plan.appends_drafts else 0
        )
        if state.encoder is not None:
            state.encoder.watch(request, slot, num_computed)
        if state.charges:
            # At once: whose turn is next depends on it.
            state.policy.on_scheduled(request, num_new)
        if state.kv.prefix_caching:
            # At once, so that the next request admitted in this very step shares what this one computes.
            state.kv.enter_full_blocks(request.request_id, request.block_hashes, end)
        state.extensions.after_allocation(request, blocks, 0 if start.num_allocated else start.num_external)
        self._record_hit(request, start.num_local)

    def _record_hit(self, request: LiveRequest, num_cached: int) -> None:
        """Statistics count admissions, not lookups, each request once (R3.93), and only requests that may hit."""
        state = self._state
        if request.num_preemptions or not state.kv.prefix_caching or not request.reads_prefix_cache:
            return
        request.num_cached_tokens = num_cached
        state.counters.prefix_queries += request.num_tokens
        state.counters.prefix_hits += num_cached
        state.counters.recent_hits.add(request.num_tokens, num_cached)


def _segments(request: LiveRequest, start: Start, num_new: int, lookahead: int) -> Segments:
    return Segments(
        start.hit.num_tokens,
        start.num_external,
        num_new,
        lookahead,
        whole=request.num_tokens,
        encoder=sum(EncoderItem.of(feature).num_embeddings for feature in request.record.features),
    )


def _row(state: SchedulerState, request: LiveRequest, slot: int, blocks: Blocks) -> NewRow:
    record = request.record
    return NewRow(
        request_id=request.request_id,
        slot=slot,
        generation=int(state.table.generation[slot]),
        token_ids=request.copy_tokens(),
        num_prompt_tokens=request.num_prompt_tokens,
        block_ids=tuple(np.asarray(ids, dtype=np.int32) for ids in blocks),
        sampling=record.sampling,
        resumed=request.num_preemptions > 0,
        prompt_embeds=record.prompt_embeds,
        features=record.features,
        adapter=record.adapter,
        task=record.task,
        pooling=record.pooling,
    )
