"""Asynchronous loads from outside: what starts them, and what follows when they end (R3.65)."""

from __future__ import annotations

from hardpoint.interfaces import FinishReason, LoadResult
from hardpoint_scheduling.schedulers.lifecycle import Lifecycle
from hardpoint_scheduling.schedulers.loads import Arrival, Load
from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState


class RemoteKV:
    """Moves requests out of the queues while their KV is on its way, and back when it is there."""

    def __init__(self, state: SchedulerState, lifecycle: Lifecycle) -> None:
        self._state = state
        self._lifecycle = lifecycle

    def begin(self, request: LiveRequest, num_local: int, num_external: int) -> None:
        """The request left its queue and got blocks for both parts; nothing of it can be found by others yet."""
        request.move_to(RequestStatus.WAITING_FOR_REMOTE_KV)
        self._state.loads.under_way[request.request_id] = Load(request, num_local, num_external)

    def take_arrivals(self) -> None:
        """Promote the requests whose loads ended since the last step, before anybody is admitted."""
        state = self._state
        if not state.extensions.loading:
            return
        arrived = [request for result in state.extensions.take_loaded() if (request := self._end_load(result))]
        # In front, in the order of their arrival: they waited for their turn before.
        for request in reversed(arrived):
            state.skipped.prepend(request)

    def _end_load(self, result: LoadResult) -> LiveRequest | None:
        """The request that can be admitted now, None when it is gone."""
        state, request_id = self._state, result.request_id
        if request_id in state.loads.orphaned:
            state.loads.orphaned.remove(request_id)
            state.kv.free(request_id)
            return None
        load = state.loads.under_way.get(request_id)
        if load is None:
            return None
        num_loaded = load.num_external if result.num_tokens is None else result.num_tokens
        if not 0 <= num_loaded <= load.num_external:
            raise RuntimeError(
                f"request {request_id}: {num_loaded} tokens are said to be loaded, {load.num_external} were to be"
            )
        del state.loads.under_way[request_id]
        request = load.request
        if result.error is not None:
            state.kv.free(request_id)
            ended = self._lifecycle.finish_from_outside([request_id], FinishReason.ERROR, result.error)
            state.ended.extend(ended)
            return None
        request.move_to(RequestStatus.PREEMPTED if request.num_preemptions else RequestStatus.WAITING)
        if num_loaded < load.num_external and not state.kv.keeps_all:
            # Its tables are made to go on from the end of the load, and have no blocks for what an earlier token reads.
            state.kv.free(request_id)
            state.loads.incomplete.add(request_id)
            return request
        arrival = Arrival(load.num_local + num_loaded, load.num_local, load.num_local + load.num_external)
        state.loads.arrived[request_id] = arrival
        if state.kv.prefix_caching:
            # Not before: blocks of a load that fails must never be found.
            state.kv.enter_full_blocks(request_id, request.block_hashes, arrival.num_computed)
        return request


def blocks_for_prefills(state: SchedulerState, admitted: list[LiveRequest]) -> int:
    """Blocks that prefills under way still need: of running requests, of those just ``admitted`` and of loads (R3.75).

    A prefill is under way while the known tokens of a request outgrow its blocks (R3.68).
    """
    table, slots = state.table, state.running.slots
    outgrown = (table.num_tokens[slots] > table.capacity[slots]).nonzero()[0].tolist()
    requests = [state.running.requests[position] for position in outgrown]
    requests.extend(admitted)
    requests.extend(state.loads.requests())
    requests.extend(state.live[request_id] for request_id in state.loads.arrived)
    return sum(state.kv.blocks_to_grow(request.request_id, request.num_tokens) for request in requests)
