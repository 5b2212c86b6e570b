"""Invariants of a scheduler's state, checked in tests and when idle."""

from __future__ import annotations

from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState


def check_state(state: SchedulerState) -> None:
    """Raise ``RuntimeError`` naming the first violated invariant."""
    state.kv.pool.check_integrity(state.kv.tables())
    _check_containers(state)
    _check_slots(state)
    _check_holders(state)


def _check_containers(state: SchedulerState) -> None:
    """I3.5: every live request is in exactly one container, and nobody else is."""
    places = [request.request_id for request in (*state.waiting, *state.skipped, *state.running.requests)]
    if len(places) != len(set(places)) or set(places) != set(state.live):
        raise RuntimeError("live requests and the members of waiting, skipped and running differ")
    for request in state.live.values():
        runs = request.status is RequestStatus.RUNNING
        if request.status.is_finished or runs != (request.slot is not None):
            raise RuntimeError(f"request {request.request_id} is {request.status.name} with slot {request.slot}")
    if len(state.running) > state.active_cap:
        raise RuntimeError(f"{len(state.running)} requests run, allowed are {state.active_cap}")


def _check_slots(state: SchedulerState) -> None:
    table = state.table
    owners = [request for request in table.owner if request is not None]
    if len(owners) + table.num_free != table.num_slots:
        raise RuntimeError("free and owned slots do not add up")
    if {id(r) for r in owners} != {id(r) for r in state.running.requests}:
        raise RuntimeError("the owners of slots are not the running requests")
    if state.running.slots.tolist() != [request.slot for request in state.running.requests]:
        raise RuntimeError("the running list and its array of slots differ")
    for request in state.running.requests:
        _check_counters(state, request)


def _check_counters(state: SchedulerState, request: LiveRequest) -> None:
    table, slot = state.table, request.slot
    known, computed, capacity = int(table.num_tokens[slot]), int(table.computed[slot]), int(table.capacity[slot])
    if known != request.num_tokens:
        raise RuntimeError(f"request {request.request_id}: {known} tokens counted, {request.num_tokens} known")
    if not 0 <= computed <= min(known, capacity):
        raise RuntimeError(f"request {request.request_id}: {computed} computed of {known}, room for {capacity}")
    sizes = state.kv.group_block_sizes()
    blocks = state.kv.block_ids(request.request_id)
    if blocks and capacity != min(len(ids) * size for ids, size in zip(blocks, sizes, strict=True)):
        raise RuntimeError(f"request {request.request_id}: capacity {capacity} does not match its blocks")
    if state.kv.prefix_caching and len(request.block_hashes) != known // state.kv.hash_block_size:
        raise RuntimeError(f"request {request.request_id}: {len(request.block_hashes)} hashes for {known} tokens")


def _check_holders(state: SchedulerState) -> None:
    """Blocks are held by running requests and by ended ones whose release is delayed, by nobody else."""
    delayed = {entry.request_id for entry in state.fences.waiting} | state.held_blocks
    allowed = {request.request_id for request in state.running.requests} | delayed
    if set(state.kv.tables()) != allowed:
        raise RuntimeError(f"blocks are held by {sorted(set(state.kv.tables()) ^ allowed)} unexpectedly or not at all")
    if not state.inflight and state.fences.waiting:
        raise RuntimeError("blocks wait for a step although none is under way")
