"""Request record, slots, queues and fences."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import BlockHash, Feature, FinishReason
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256
from hardpoint_scheduling.schedulers.fences import Fences
from hardpoint_scheduling.schedulers.queues import RunningList
from hardpoint_scheduling.schedulers.request import FINAL_STATUS, LiveRequest, Milestone, RequestStatus
from hardpoint_scheduling.schedulers.slots import SlotTable
from sched_support import request


def live(name: str = "r", prompt: tuple[int, ...] = (4, 5, 6), **fields: Any) -> LiveRequest:
    return LiveRequest(request(name, prompt, **fields), 20)


@given(st.lists(st.integers(0, 2**31 - 1), min_size=1), st.lists(st.integers(0, 2**31 - 1)))
def test_outputs_and_all_tokens_never_disagree(prompt: list[int], outputs: list[int]) -> None:
    """R1.2, R1.4, I1.1."""
    made = live(prompt=tuple(prompt))
    everything, tail = made.token_ids, made.output_token_ids
    for token in outputs:
        made.append(token)
    assert list(everything) == prompt + outputs
    assert list(tail) == outputs
    assert (made.num_tokens, made.num_prompt_tokens, made.num_output_tokens) == (
        len(prompt) + len(outputs),
        len(prompt),
        len(outputs),
    )
    assert made.copy_tokens().tolist() == prompt + outputs


def test_the_same_record_gives_the_same_initial_state() -> None:
    """R1.1."""
    record = request("r", [4, 5, 6])
    one, two = LiveRequest(record, 20), LiveRequest(record, 20)
    for name in LiveRequest.__slots__:
        if name not in ("append", "__weakref__"):
            assert getattr(one, name) == getattr(two, name)


def test_views_cannot_be_written() -> None:
    """R1.3."""
    made = live()
    for view in (made.token_ids, made.output_token_ids):
        for method in ("append", "extend", "__setitem__", "pop"):
            assert not hasattr(view, method)
    assert made.token_ids[-1] == 6
    assert made.token_ids[0:2] == [4, 5]
    with pytest.raises(IndexError):
        made.output_token_ids[0]
    assert repr(made.token_ids) == "ReadOnlyView([4, 5, 6])"


def test_every_final_state_has_one_reason() -> None:
    """R1.5: final is one comparison; what was refused for its length reports the length."""
    finals = [status for status in RequestStatus if status.is_finished]
    assert finals == [status for status in RequestStatus if status >= RequestStatus.STOPPED]
    assert {status.finish_reason for status in finals} == set(FinishReason) == set(FINAL_STATUS)
    assert RequestStatus.IGNORED.finish_reason is FinishReason.LENGTH
    for reason, status in FINAL_STATUS.items():
        assert status.finish_reason is reason
    for status in RequestStatus:
        if not status.is_finished:
            with pytest.raises(RuntimeError, match=f"{status.name} has no finish reason"):
                status.finish_reason  # noqa: B018


@given(st.lists(st.sampled_from(RequestStatus), max_size=12))
def test_no_transition_leaves_a_final_state(wanted: list[RequestStatus]) -> None:
    """I1.8."""
    made = live()
    for status in wanted:
        before = made.status
        try:
            made.move_to(status)
        except RuntimeError:
            assert made.status is before
            continue
        assert not before.is_finished
        assert made.status is status


def test_statuses_follow_the_state_machine() -> None:
    """R1.5, I1.8."""
    made = live()
    for status in (RequestStatus.RUNNING, RequestStatus.PREEMPTED, RequestStatus.RUNNING, RequestStatus.STOPPED):
        made.move_to(status)
    for status in RequestStatus:
        with pytest.raises(RuntimeError, match="cannot go from STOPPED"):
            made.move_to(status)
    with pytest.raises(RuntimeError, match="from WAITING to PREEMPTED"):
        live().move_to(RequestStatus.PREEMPTED)
    made = live()
    for status in (
        RequestStatus.WAITING_FOR_GRAMMAR,
        RequestStatus.WAITING,
        RequestStatus.WAITING_FOR_REMOTE_KV,
        RequestStatus.WAITING,
        RequestStatus.RUNNING,
        RequestStatus.WAITING_FOR_STREAMING_INPUT,
    ):
        made.move_to(status)
        assert made.status.is_blocked == status.name.startswith("WAITING_FOR")


def test_counters_start_at_zero_and_follow_the_slot() -> None:
    """R1.4, R1.7: without a slot nothing is computed, in flight or awaited."""
    names = (
        "num_computed_tokens",
        "num_placeholders",
        "num_in_flight_tokens",
        "num_processed_tokens",
        "num_stale_tokens",
        "num_preemptions",
        "next_decode_step",
        "last_step",
    )
    made, table = live(), SlotTable(2)
    assert [getattr(made, name) for name in names] == [0] * len(names)
    assert not made.drops_stale
    slot = table.assign(made, 2, 8)
    table.computed[slot], table.in_flight[slot], table.placeholders[slot] = 7, 4, 3
    table.next_decode_step[slot], table.last_step[slot], table.num_drafts[slot] = 11, 9, 2
    assert [getattr(made, name) for name in names] == [7, 3, 4, 3, 0, 0, 11, 9]
    assert made.num_tokens_with_drafts == 5
    made.num_stale_tokens = 6
    assert made.num_in_flight_tokens == 10
    table.release(made)
    assert (made.num_computed_tokens, made.num_placeholders, made.num_tokens_with_drafts) == (0, 0, 3)


def test_stale_tokens_drain_and_take_the_drop_flag_with_them() -> None:
    """R3.79, R3.80, R3.62."""
    made = live()
    for num_stale, drops, waits in ((0, False, False), (5, False, True), (5, True, False)):
        made.num_stale_tokens, made.drops_stale = num_stale, drops
        assert made.waits_for_stale_output == waits
    made.settle_stale(3)
    assert (made.num_stale_tokens, made.drops_stale) == (2, True)
    made.settle_stale(2)
    assert (made.num_stale_tokens, made.drops_stale) == (0, False)


def test_events_are_taken_once() -> None:
    """R1.14."""
    made = live()
    made.note(Milestone.QUEUED, 1.0)
    made.note(Milestone.SCHEDULED, 2.5)
    assert [(e.milestone.value, e.time) for e in made.take_events()] == [("queued", 1.0), ("scheduled", 2.5)]
    assert made.take_events() == []


def test_requests_have_a_total_order() -> None:
    """R1.13: priority value, arrival, id; lower first."""
    wanted = (
        live("z", priority=-1, arrival_time=9.0),
        live("y", priority=0, arrival_time=1.0),
        live("a", priority=0, arrival_time=2.0),
        live("b", priority=0, arrival_time=2.0),
        live("c", priority=3, arrival_time=0.0),
    )
    assert sorted([wanted[i] for i in (3, 1, 4, 0, 2)]) == list(wanted)
    assert min(wanted) is wanted[0]


def test_a_request_is_freed_without_the_cycle_collector() -> None:
    """R1.10: also one that held a slot, and whose views, hasher and table live on."""
    gc.disable()
    try:
        hasher, table = ChainedHasher(Sha256(), 2, BlockHash(bytes(32))), SlotTable(1)
        made = live(prompt=(4, 5, 6, 7))
        hasher.extend(made.record, made.tokens, made.block_hashes)
        table.assign(made, 0, 4)
        table.release(made)
        view, gone = made.token_ids, weakref.ref(made)
        del made
        assert gone() is None
        assert list(view) == [4, 5, 6, 7]
    finally:
        gc.enable()


def test_items_and_embeddings_fit_the_prompt() -> None:
    """R1.12, R1.4: an item carries its place and its hash, so only the places can disagree with the prompt."""

    def item(offset: int, length: int) -> Feature:
        return Feature(modality="image", content_hash="h", offset=offset, length=length)

    made = live(features=(item(0, 1), item(1, 2)), prompt_embeds=np.zeros((3, 2), dtype=np.float32))
    assert made.num_prompt_tokens == 3
    for features in ((item(2, 2),), (item(0, 2), item(1, 1)), (item(1, 1), item(0, 1)), (item(-1, 1),)):
        with pytest.raises(InvalidRequestError, match="^the item at .* prompt order"):
            live(features=features)
    with pytest.raises(InvalidRequestError, match="^the prompt has 2 rows of prompt embeddings for 3 tokens"):
        live(prompt_embeds=np.zeros((2, 2), dtype=np.float32))


def test_a_slot_starts_clean_whoever_held_it() -> None:
    """No entry of an earlier owner survives."""
    table = SlotTable(1)
    first = live("a", sampling={"stop_token_ids": (1, 2, 3), "min_tokens": 4}, eos_token_ids=(9,))
    slot = table.assign(first, 2, 8)
    assert table.stop_ids[slot].tolist()[:5] == [1, 2, 3, 9, -1]
    assert (int(table.stops_after[slot]), first.num_computed_tokens) == (7, 2)
    table.detail[slot] = False
    table.last_step[slot] = 12
    for column in (table.placeholders, table.owed, table.in_flight, table.num_drafts, table.entered):
        column[slot] = 3
    table.next_decode_step[slot] = 20
    table.release(first)
    assert int(table.generation[slot]) == 0
    assert first.slot is None
    assert first.num_computed_tokens == 0
    second = live("b")
    assert table.assign(second, 0, 4) == slot
    assert table.stop_ids[slot].tolist() == [-1] * 8
    assert (int(table.generation[slot]), int(table.last_step[slot]), bool(table.detail[slot])) == (2, 0, True)
    for column in (table.placeholders, table.owed, table.in_flight, table.num_drafts, table.entered):
        assert column[slot] == 0
    assert int(table.next_decode_step[slot]) == 0
    with pytest.raises(RuntimeError, match="does not own slot"):
        table.release(first)


def test_a_step_keeps_the_running_list_it_was_built_from() -> None:
    table, running = SlotTable(3), RunningList()
    requests = [live(name) for name in "abc"]
    for made in requests:
        table.assign(made, 0, 4)
    running.extend(requests)
    before, slots = running.requests, running.slots
    running.remove_all([requests[1]])
    assert len(before) == len(slots) == 3
    assert running.slots.tolist() == [0, 2]
    running.remove_all([])
    assert len(running) == 2


def test_fences_open_in_order() -> None:
    """R3.87."""
    fences = Fences()
    assert fences.is_through(0)
    fences.scheduled = 1
    fences.defer("a")
    fences.scheduled = 3
    fences.defer("b")
    assert not fences.is_through(1)
    assert [fences.advance() for _ in range(3)] == [["a"], [], ["b"]]
    assert fences.is_through(3)
