"""Invariants of a scheduler's state, checked in tests and when idle."""

from __future__ import annotations

import numpy as np

from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.state import SchedulerState


def check_state(state: SchedulerState) -> None:
    """Raise ``RuntimeError`` naming the first violated invariant (I3.1-I3.7)."""
    state.kv.pool.check_integrity(state.kv.tables())
    _check_containers(state)
    _check_slots(state)
    _check_requests(state)
    _check_inflight(state)
    _check_holders(state)
    _check_fences(state)


def _check_containers(state: SchedulerState) -> None:
    """I3.5: every live request is in exactly one container, and nobody else is."""
    waiting = (*state.waiting, *state.skipped, *state.loads.requests())
    places = [request.request_id for request in (*waiting, *state.running.requests)]
    if len(places) != len(set(places)) or set(places) != set(state.live):
        raise RuntimeError("live requests and the members of waiting, skipped and running differ")
    if state.returning != {request.request_id for request in waiting if request.num_preemptions}:
        raise RuntimeError("the preempted requests that wait are not those noted as returning")
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
    # Guesses have room of their own where states come after them.
    room = known + request.num_placeholders if state.kv.tells_guesses_apart else capacity
    if not 0 <= computed <= min(known + request.num_placeholders, room):
        raise RuntimeError(
            f"request {request.request_id}: {computed} computed of {known} and {request.num_placeholders} "
            f"placeholders, room for {capacity}"
        )
    if not request.num_computed_tokens >= int(table.in_flight[slot]) >= int(table.owed[slot]) >= 0:
        raise RuntimeError(f"request {request.request_id}: more in flight than computed, or less than owed")
    if not state.kv.covers_exactly(request.request_id, capacity):
        raise RuntimeError(f"request {request.request_id}: capacity {capacity} does not match its blocks")
    if int(table.entered[slot]) > known:
        raise RuntimeError(f"request {request.request_id}: blocks beyond its {known} tokens can be found")


def _check_requests(state: SchedulerState) -> None:
    """I1.2 and the part of I3.6 that concerns requests without a slot too."""
    size = state.kv.hash_block_size
    for request in state.live.values():
        if state.kv.prefix_caching and len(request.block_hashes) != request.num_tokens // size:
            raise RuntimeError(
                f"request {request.request_id}: {len(request.block_hashes)} hashes for {request.num_tokens} tokens"
            )
        if not 0 <= request.num_stale_tokens <= request.num_in_flight_tokens:
            raise RuntimeError(f"request {request.request_id}: {request.num_stale_tokens} stale tokens in flight")


def _check_inflight(state: SchedulerState) -> None:
    """I3.6: what the requests count as in flight is what the steps under way carry, so all returns to 0 with them."""
    table = state.table
    in_flight, owed, placeholders = (np.zeros(table.num_slots, dtype=np.int64) for _ in range(3))
    stale: dict[LiveRequest, int] = {}
    for entry in state.inflight:
        step = entry.step
        alive = table.generation[step.slots] == step.generations
        slots, samples = step.slots[alive], step.samples[alive]
        in_flight[slots] += step.num_scheduled_tokens[alive]
        owed[slots] += samples
        placeholders[slots] += samples if step.drafts is None else samples + step.drafts.counts[alive]
        for row in np.flatnonzero(~alive).tolist():
            request = entry.rows[row]
            stale[request] = stale.get(request, 0) + int(step.num_scheduled_tokens[row])
    held = np.asarray([owner is not None for owner in table.owner], dtype=np.bool_)
    for name, counted, found in (
        ("in flight", table.in_flight, in_flight),
        ("owed", table.owed, owed),
        ("placeholders", table.placeholders, placeholders),
    ):
        wrong = np.flatnonzero(held & (counted != found))
        if len(wrong):
            slot = int(wrong[0])
            raise RuntimeError(f"slot {slot} counts {int(counted[slot])} {name}, steps under way {int(found[slot])}")
    for request in state.live.values():
        if request.num_stale_tokens != stale.get(request, 0):
            raise RuntimeError(
                f"request {request.request_id} counts {request.num_stale_tokens} stale tokens, steps under way "
                f"{stale.get(request, 0)}"
            )


def _check_fences(state: SchedulerState) -> None:
    """I3.7."""
    fences = state.fences
    if not fences.scheduled == fences.processed + len(state.inflight):
        raise RuntimeError(
            f"{fences.scheduled} steps scheduled, {fences.processed} processed, not {len(state.inflight)}"
        )
    marks = [entry.fence for entry in fences.waiting]
    if marks != sorted(marks) or any(not fences.processed < mark <= fences.scheduled for mark in marks):
        raise RuntimeError(f"fences {marks} are out of order or passed; {fences.processed} steps are processed")


def _check_holders(state: SchedulerState) -> None:
    """Blocks are held by running requests and by ended ones whose release is delayed, by nobody else."""
    delayed = {entry.request_id for entry in state.fences.waiting} | state.held_blocks
    allowed = {request.request_id for request in state.running.requests} | delayed | state.loads.holders()
    if set(state.kv.tables()) != allowed:
        raise RuntimeError(f"blocks are held by {sorted(set(state.kv.tables()) ^ allowed)} unexpectedly or not at all")
    if not state.inflight and state.fences.waiting:
        raise RuntimeError("blocks wait for a step although none is under way")
