"""How requests leave the running list: finished, preempted, failed; and when their blocks become free."""

from __future__ import annotations

from collections.abc import Iterable

from hardpoint.interfaces import EngineOutput, FinishReason
from hardpoint_scheduling.schedulers.request import FINAL_STATUS, LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState


class Lifecycle:
    """Every way out goes through here, so each request ends once and each block is given back once."""

    def __init__(self, state: SchedulerState) -> None:
        self._state = state

    def finish_from_outside(
        self, request_ids: Iterable[str], reason: FinishReason, error: str | None
    ) -> list[EngineOutput]:
        """End live requests and build their terminal outputs; ids that are not live are ignored."""
        state = self._state
        ended = [state.live[i] for i in dict.fromkeys(request_ids) if i in state.live]
        self.end_all([(request, reason) for request in ended])
        return [
            EngineOutput(r.request_id, [], reason, num_cached_tokens=r.num_cached_tokens, error=error) for r in ended
        ]

    def end_all(self, ended: list[tuple[LiveRequest, FinishReason]]) -> None:
        """Move requests to their final state and give up everything they hold; the caller builds the outputs."""
        state = self._state
        state.running.remove_all([request for request, _ in ended if request.slot is not None])
        for request, reason in ended:
            request.move_to(FINAL_STATUS[reason])
            del state.live[request.request_id]
            if request.slot is None:
                if not state.waiting.discard(request.request_id):
                    state.skipped.discard(request.request_id)
                continue
            last_step = int(state.table.last_step[request.slot])
            # Asked while the counters still show what was computed: a connector may want to send it.
            may_free = state.extensions.may_free(request)
            state.finished_slots.append(state.table.release(request))
            if not may_free:
                state.held_blocks.add(request.request_id)
            elif state.fences.is_through(last_step):
                state.kv.free(request.request_id)
            else:
                state.fences.defer(request.request_id)

    def can_preempt(self, request: LiveRequest) -> bool:
        """Whether preempting frees the blocks now: no step under way writes them (R3.49)."""
        state = self._state
        return request.slot is not None and state.fences.is_through(int(state.table.last_step[request.slot]))

    def preempt(self, request: LiveRequest) -> None:
        """Give up blocks and slot and go back to the head of the queue with all tokens kept (R3.78)."""
        state = self._state
        state.running.remove_all([request])
        state.preempted_slots.append(state.table.release(request))
        state.kv.free(request.request_id)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        if request.prompt_logprobs is not None:
            request.prompt_logprobs = []
        state.counters.preemptions += 1
        state.waiting.prepend(request)

    def release_due(self) -> None:
        """Free what a newly processed step no longer needs."""
        for request_id in self._state.fences.advance():
            self._state.kv.free(request_id)

    def release_held(self) -> None:
        """Free blocks that extensions held and now let go (R3.85)."""
        state = self._state
        if not state.extensions.holding:
            return
        for request_id in state.extensions.take_freeable():
            if request_id not in state.held_blocks:
                continue
            state.held_blocks.remove(request_id)
            if state.inflight:
                state.fences.defer(request_id)
            else:
                state.kv.free(request_id)
