"""The waiting loop: who starts, or starts again after preemption."""

from __future__ import annotations

import enum

import numpy as np

from hardpoint.interfaces import NewRow, PauseMode
from hardpoint_scheduling.kv_cache.coordinator import Blocks, Gates, PrefixHit, Segments
from hardpoint_scheduling.schedulers.plan import StepPlan
from hardpoint_scheduling.schedulers.queues import LiveQueue
from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState


class _Answer(enum.Enum):
    ADMITTED = enum.auto()
    SET_ASIDE = enum.auto()
    NO_ROOM = enum.auto()


class Admission:
    """Admits from the head of the queue until a budget, the cap or the blocks run out; preempts nobody (R3.67)."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state
        self._watermark_blocks = int(state.limits.watermark * state.kv.pool.num_blocks)

    def run(self, plan: StepPlan) -> None:
        state = self._state
        if state.pause is PauseMode.ALL or not state.num_waiting:
            return
        set_aside: list[LiveRequest] = []
        while plan.budget > 0 and len(state.running) + len(plan.admitted) < state.active_cap:
            queue = self._next_queue()
            if queue is None:
                break
            request = queue.pop()
            if not self._may_enter(request):
                set_aside.append(request)
                continue
            answer = self._try(request, plan)
            if answer is _Answer.NO_ROOM:
                queue.prepend(request)
                break
            if answer is _Answer.SET_ASIDE:
                set_aside.append(request)
        for request in reversed(set_aside):
            state.skipped.prepend(request)
        state.running.extend(plan.admitted)

    def _next_queue(self) -> LiveQueue | None:
        """The queue whose head the policy tries first (R3.5). None when nobody may enter."""
        state = self._state
        held, waiting = state.skipped, state.waiting
        if len(held) and (not len(waiting) or state.policy.precedes(held.peek(), waiting.peek())):
            return held
        if len(waiting) and self._may_enter(waiting.peek()):
            return waiting
        return held if len(held) else None

    def _may_enter(self, request: LiveRequest) -> bool:
        """A pause for new requests still lets preempted ones come back: they were admitted before."""
        return self._state.pause is PauseMode.NONE or request.status is RequestStatus.PREEMPTED

    def _try(self, request: LiveRequest, plan: StepPlan) -> _Answer:
        state = self._state
        if state.extensions.blocking and state.extensions.is_blocked(request):
            return _Answer.SET_ASIDE
        hit = self._find_prefix(request)
        num_external = self._external(request, hit)
        if num_external is None:
            return _Answer.SET_ASIDE
        num_computed = hit.num_tokens + num_external
        num_new = request.num_tokens - num_computed
        if plan.prefill_cap is not None:
            num_new = min(num_new, plan.prefill_cap)
        if num_new > plan.budget and not state.limits.chunked_prefill:
            return _Answer.NO_ROOM
        num_new = min(num_new, plan.budget)
        lookahead = state.extensions.num_lookahead_tokens(request) if state.extensions.lookahead else 0
        segments = Segments(hit.num_tokens, num_external, num_new, lookahead, whole=request.num_tokens)
        blocks = state.kv.allocate_slots(request.request_id, segments, hit, self._gates(plan))
        if blocks is None:
            return _Answer.NO_ROOM
        self._enter(request, plan, blocks, num_computed, num_new, lookahead)
        state.extensions.after_allocation(request, blocks, num_external)
        self._record_hit(request, hit)
        return _Answer.ADMITTED

    def _find_prefix(self, request: LiveRequest) -> PrefixHit:
        if not request.reads_prefix_cache:
            return PrefixHit(0, tuple(() for _ in range(self._state.kv.num_groups)))
        return self._state.kv.find_prefix(request.block_hashes, request.num_tokens)

    def _external(self, request: LiveRequest, hit: PrefixHit) -> int | None:
        """Tokens whose KV comes from elsewhere; None while an extension cannot tell. One token is always computed."""
        extensions = self._state.extensions
        if not extensions.external or not request.reads_prefix_cache:
            return 0
        match = extensions.match_external(request, hit.num_tokens)
        if match is None:
            return None
        return max(min(match.num_tokens, request.num_tokens - 1 - hit.num_tokens), 0)

    def _gates(self, plan: StepPlan) -> Gates:
        # R3.74: the watermark protects those who run; with nobody running it could only block forever.
        anybody = bool(self._state.running.requests or plan.admitted)
        return Gates(
            full_sequence_must_fit=self._state.limits.full_sequence_must_fit,
            reserved_blocks=self._watermark_blocks if anybody else 0,
        )

    def _enter(
        self, request: LiveRequest, plan: StepPlan, blocks: Blocks, num_computed: int, num_new: int, lookahead: int
    ) -> None:
        state = self._state
        resumed = request.status is RequestStatus.PREEMPTED
        request.move_to(RequestStatus.RUNNING)
        end = num_computed + num_new
        capacity = state.kv.covered(state.kv.end_with_lookahead(end, lookahead))
        slot = state.table.assign(request, num_computed, capacity)
        if request.first_scheduled_time is None:
            request.first_scheduled_time = state.clock()
        record = request.record
        row = NewRow(
            request_id=request.request_id,
            slot=slot,
            generation=int(state.table.generation[slot]),
            token_ids=request.copy_tokens(),
            num_prompt_tokens=request.num_prompt_tokens,
            block_ids=tuple(np.asarray(ids, dtype=np.int32) for ids in blocks),
            sampling=record.sampling,
            resumed=resumed,
            prompt_embeds=record.prompt_embeds,
            features=record.features,
            adapter=record.adapter,
        )
        plan.admit(request, num_computed, num_new, row)
        if state.charges:
            # At once: whose turn is next depends on it.
            state.policy.on_scheduled(request, num_new)
        if state.kv.prefix_caching:
            # At once, so that the next request admitted in this very step shares what this one computes.
            state.kv.enter_full_blocks(request.request_id, request.block_hashes, end)

    def _record_hit(self, request: LiveRequest, hit: PrefixHit) -> None:
        """Statistics count admissions, not lookups, each request once (R3.93), and only requests that may hit."""
        state = self._state
        if request.num_preemptions or not state.kv.prefix_caching or not request.reads_prefix_cache:
            return
        request.num_cached_tokens = hit.num_tokens
        state.counters.prefix_queries += request.num_tokens
        state.counters.prefix_hits += hit.num_tokens
