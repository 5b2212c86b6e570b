"""How requests leave the running list: finished, preempted, failed; and when their blocks become free."""

from __future__ import annotations

from collections.abc import Iterable

from hardpoint.interfaces import EngineOutput, FinishReason
from hardpoint_scheduling.schedulers.request import FINAL_STATUS, LiveRequest, Milestone, RequestStatus
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
            if request.slot is not None and reason is not FinishReason.ERROR:
                # While it is live: events of these blocks tell its tokens.
                self._enter_known_blocks(request)
            del state.live[request.request_id]
            if request.slot is None:
                if not state.waiting.discard(request.request_id):
                    state.skipped.discard(request.request_id)
                state.loads.drop(request.request_id, state.kv)
                state.returning.discard(request.request_id)
                state.policy.on_finished(request)
                continue
            state.policy.on_finished(request)
            last_step = int(state.table.last_step[request.slot])
            # Asked while the counters still show what was computed: a connector may want to send it.
            may_free = state.extensions.may_free(request)
            if state.encoder is not None:
                state.encoder.give_up(request, distrust=reason is FinishReason.ERROR)
            state.finished_slots.append(state.table.release(request))
            if not may_free:
                state.held_blocks.add(request.request_id)
            elif state.fences.is_through(last_step):
                state.kv.free(request.request_id)
            else:
                state.fences.defer(request.request_id)

    def can_preempt(self, request: LiveRequest) -> bool:
        """Whether preempting frees the blocks now (R3.49)."""
        state = self._state
        return request.slot is not None and state.fences.is_through(int(state.table.last_step[request.slot]))

    def preempt(self, request: LiveRequest, *, drop_stale: bool = False) -> None:
        """Give up blocks and slot and go back to the head of the queue with all tokens kept (R3.78).

        What is in flight is stale from now on: it is delivered when it comes back, or thrown away with ``drop_stale``.
        """
        state = self._state
        self._enter_known_blocks(request)
        in_flight = request.num_in_flight_tokens
        if state.encoder is not None:
            state.encoder.give_up(request)
        state.running.remove_all([request])
        state.preempted_slots.append(state.table.release(request))
        state.kv.free(request.request_id)
        request.move_to(RequestStatus.PREEMPTED)
        request.num_preemptions += 1
        # R3.79: a share that was stale before is part of what is in flight, so this is no sum.
        request.num_stale_tokens = in_flight
        request.drops_stale = in_flight > 0 and (drop_stale or request.drops_stale)
        if request.prompt_logprobs is not None:
            # They come with the first output, so an output that is under way would come without.
            request.prompt_logprobs = []
            request.drops_stale = in_flight > 0
        request.note(Milestone.PREEMPTED, state.clock())
        state.counters.preemptions += 1
        state.returning.add(request.request_id)
        state.waiting.prepend(request)

    def preempt_all(self) -> bool:
        """Preempt everybody and drop what is in flight (R3.22); False, and nobody preempted, if blocks stay in use."""
        state = self._state
        running = state.running.requests
        others_hold = len(state.kv.tables()) > len(running) + len(state.loads.arrived)
        if others_hold or not all(self.can_preempt(request) for request in running):
            return False
        # The last one first, so that they come back in their order.
        for request in reversed(running):
            self.preempt(request, drop_stale=True)
        state.loads.give_up_arrived(state.kv)
        return True

    def _enter_known_blocks(self, request: LiveRequest) -> None:
        """Blocks that became full since the request was scheduled last can be found by others after it let them go."""
        kv, table, slot = self._state.kv, self._state.table, request.slot
        end = min(request.num_computed_tokens, request.num_tokens)
        if kv.prefix_caching and end >= int(table.entered[slot]) + kv.hash_block_size:
            kv.enter_full_blocks(request.request_id, request.block_hashes, end)

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
            if state.fences.is_through(state.fences.scheduled):
                state.kv.free(request_id)
            else:
                state.fences.defer(request_id)
