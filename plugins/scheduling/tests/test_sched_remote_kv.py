"""KV from elsewhere: how it joins the cached prefix, and asynchronous loads from their start to their end."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    ExternalMatch,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    LoadResult,
    MambaCacheMode,
    PauseMode,
    RequestView,
    SchedulerExtension,
    spec_to_wire,
)
from hardpoint.testing import FakeWorker
from hardpoint_scheduling.kv_cache.coordinator import PrefixHit
from hardpoint_scheduling.schedulers.external import Start, merge
from hardpoint_scheduling.schedulers.factories import create_fcfs, create_priority
from hardpoint_scheduling.schedulers.remote_kv import blocks_for_prefills
from hardpoint_scheduling.schedulers.request import RequestStatus
from kv_support import chunked, state, window
from sched_support import BLOCK, Loop, expected, make_loop, request, spec

PROMPT = list(range(3, 13))


@dataclass
class Store(SchedulerExtension):
    """A store that has the KV of every prompt, up to ``num_tokens`` of them, and copies it when told to.

    ``lookahead``: as an extension that drafts would want it.
    """

    num_tokens: int = 1_000
    asynchronous: bool = True
    lookahead: int = 0
    name: str = "store"
    worker: FakeWorker | None = None
    asked: list[tuple[str, int]] = field(default_factory=list)
    loads: dict[str, tuple[RequestView, list[int], int]] = field(default_factory=dict)
    results: list[LoadResult] = field(default_factory=list)

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        self.asked.append((request.request_id, num_local_tokens))
        return ExternalMatch(
            max(min(self.num_tokens, request.num_prompt_tokens) - num_local_tokens, 0), self.asynchronous
        )

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return self.lookahead

    def after_allocation(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if num_external and self.asynchronous:
            self.loads[request.request_id] = request, list(block_ids[0]), num_external

    def finish(self, request_id: str, num_tokens: int | None = None, error: str | None = None) -> None:
        """The transfer ends: ``num_tokens`` of what was to be loaded are in the blocks (None: all)."""
        view, blocks, num_external = self.loads.pop(request_id)
        local = self.asked[[name for name, _ in self.asked].index(request_id)][1]
        end = local + (num_external if num_tokens is None else num_tokens)
        if self.worker is not None:
            known = view.record.prompt_token_ids
            for position in range(local, end):
                self.worker.kv[blocks[position // BLOCK], position % BLOCK] = known[position]
        self.results.append(LoadResult(request_id, num_tokens, error))

    def take_loaded(self) -> Iterable[LoadResult]:
        taken, self.results = self.results, []
        return taken


def loop_with(store: Store, num_blocks: int = 64, **fields: Any) -> Loop:
    loop = make_loop(num_blocks, extensions=(store,), **fields)
    store.worker = loop.worker
    return loop


def status(loop: Loop, name: str) -> RequestStatus:
    return loop.scheduler._state.live[name].status


# A + t + E


def hit(aligned: int, tail: int) -> PrefixHit:
    blocks = tuple(range(1, 1 + aligned // BLOCK + bool(tail)))
    return PrefixHit(aligned + tail, (blocks,), tail)


@pytest.mark.parametrize(
    ("aligned", "tail", "external", "computed", "loads"),
    [
        (8, 0, 4, 12, 4),
        (8, 0, 0, 8, 0),
        (8, 2, 5, 13, 5),
        (8, 2, 3, 11, 3),
        (8, 2, 2, 10, 0),
        (8, 2, 1, 10, 0),
        (0, 3, 0, 3, 0),
        (0, 3, 9, 9, 9),
    ],
)
def test_a_partial_block_and_external_tokens(aligned: int, tail: int, external: int, computed: int, loads: int) -> None:
    """R3.64, P3.10: more from outside replaces the partial block, less is not loaded at all."""
    start = merge(hit(aligned, tail), external, asynchronous=True)
    assert (start.num_computed, start.num_external) == (computed, loads)
    assert start.asynchronous == (loads > 0), "a load of nothing is no load"
    assert len(start.hit.blocks[0]) == aligned // BLOCK + (tail > 0 and not loads), "nothing is copied to be replaced"
    assert start.num_local == start.hit.num_tokens


def test_merging_nothing_changes_nothing() -> None:
    """R3.64."""
    assert merge(hit(8, 3), 0, asynchronous=False) == Start(hit(8, 3), 0, num_local=11)
    assert hit(8, 0).without_tail() == hit(8, 0)


# Asynchronous loads


def test_a_load_holds_blocks_and_nothing_else() -> None:
    """R3.65: 0 new tokens, no slot, no lookahead, nothing in the prefix index; others are not kept waiting."""
    store = Store(num_tokens=8, lookahead=3)
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    step = loop.step()
    assert step.is_empty
    assert status(loop, "far") is RequestStatus.WAITING_FOR_REMOTE_KV
    state = loop.scheduler._state
    assert len(state.kv.block_ids("far")[0]) == 2, "two blocks for 8 tokens, none for lookahead"
    assert state.kv.pool.num_cached == 0
    assert (len(state.running), state.num_waiting) == (0, 1)
    store.num_tokens = 0
    loop.scheduler.add(request("near", PROMPT, max_tokens=2))
    assert loop.step().num_computed_tokens.tolist() == [0], "what is being loaded is not found"
    loop.run_some(3)
    assert len(loop.ends("near")) == 1
    store.finish("far")
    step = loop.step()
    assert step.num_computed_tokens.tolist() == [8]
    assert step.num_scheduled_tokens.tolist() == [2]
    assert status(loop, "far") is RequestStatus.RUNNING
    loop.run()
    assert loop.tokens("far") == expected(PROMPT, 5)


def test_nothing_is_looked_up_twice_for_a_loaded_request() -> None:
    """R3.63: what is computed counts, even if more is cached by now."""
    store = Store(num_tokens=4)
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.num_tokens = 0
    loop.scheduler.add(request("near", PROMPT, max_tokens=1))
    loop.run_some(2)
    asked = list(store.asked)
    store.finish("far")
    assert loop.step().num_computed_tokens.tolist() == [4]
    assert store.asked == asked
    loop.run()
    assert loop.tokens("far") == expected(PROMPT, 5)


def test_what_was_loaded_can_be_found_by_others() -> None:
    """R3.65: from its arrival on."""
    store = Store(num_tokens=8)
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.finish("far")
    store.num_tokens = 0
    loop.scheduler.add(request("near", [*PROMPT[:9], 50]))
    step = loop.step()
    assert step.num_computed_tokens.tolist() == [8, 8]
    loop.run()
    assert loop.tokens("near") == expected([*PROMPT[:9], 50], 5)


def test_one_token_of_a_wholly_loaded_prompt_is_computed() -> None:
    """R3.91, P3.1."""
    store = Store()
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.finish("far")
    step = loop.step()
    assert (step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()) == ([9], [1])
    loop.run()
    assert loop.tokens("far") == expected(PROMPT, 5)


@pytest.mark.parametrize("arrived", [0, 3, 4, 7])
def test_what_did_not_arrive_is_computed(arrived: int) -> None:
    """R3.65: the invalid part; local hits and the part that came are kept."""
    store = Store(num_tokens=0)
    loop = loop_with(store)
    loop.scheduler.add(request("first", PROMPT[:5], max_tokens=1))
    loop.run()
    store.num_tokens = 1_000
    loop.scheduler.add(request("far", [*range(3, 20)]))
    loop.step()
    assert store.asked[-1] == ("far", 4)
    store.finish("far", arrived)
    step = loop.step()
    assert step.num_computed_tokens.tolist() == [4 + arrived]
    loop.run()
    assert loop.tokens("far") == expected([*range(3, 20)], 5)
    assert loop.ends("far")[0].num_cached_tokens == 4, "the statistics count the local hit"
    assert loop.scheduler.stats().num_free_blocks == 63


OTHERS = {"window": window(4), "chunks": chunked(8), **{f"state {mode}": state(mode) for mode in MambaCacheMode}}


def hybrid_loop_with(store: Store, other: KVCacheSpec) -> Loop:
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate((spec(), other)))
    return loop_with(store, kv_cache=KVCacheConfig(num_blocks=64, groups=groups, tensors=()), max_num_batched_tokens=32)


@pytest.mark.parametrize("kind", OTHERS)
@pytest.mark.parametrize("arrived", [0, 4, 11])
def test_tables_with_gaps_are_of_no_use_to_a_load_that_came_in_part(kind: str, arrived: int) -> None:
    """R3.65, R3.70, R3.12: what is left out before the end of a load is read by tokens before it, so the request
    starts over from its cached prefix, once, whatever the store has."""
    store = Store(num_tokens=0)
    loop = hybrid_loop_with(store, OTHERS[kind])
    loop.scheduler.add(request("first", PROMPT[:5], max_tokens=1))
    loop.run()
    store.num_tokens = 1_000
    prompt = [*range(3, 20)]
    loop.scheduler.add(request("far", prompt))
    loop.step()
    asked = list(store.asked)
    local = asked[-1][1]
    assert local == (0 if kind == "state none" else 4)
    cached = loop.scheduler.stats().num_cached_blocks
    store.finish("far", arrived)
    loop.scheduler._remote.take_arrivals()
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_free_blocks == 63
    assert loop.scheduler.stats().num_cached_blocks == cached, "a part is not entered"
    step = loop.step()
    assert step.num_computed_tokens.tolist() == [local]
    table = step.new_rows[0].block_ids[1].tolist()
    if kind == "state align":
        # It reads the state at its start and leaves one at its end.
        assert table[0]
        assert table[-1]
    else:
        assert all(table)
    loop.run()
    assert store.asked == asked
    assert loop.tokens("far") == expected(prompt, 5)
    assert loop.scheduler.stats().num_free_blocks == 63
    assert not loop.scheduler._state.loads.incomplete


@pytest.mark.parametrize("kind", OTHERS)
def test_a_whole_load_goes_on_from_its_end_in_every_group(kind: str) -> None:
    """R3.65, R3.70."""
    store = Store(num_tokens=12)
    loop = hybrid_loop_with(store, OTHERS[kind])
    loop.scheduler.add(request("far", range(3, 20)))
    loop.step()
    store.finish("far")
    assert loop.step().num_computed_tokens.tolist() == [12]
    loop.run()
    assert loop.tokens("far") == expected([*range(3, 20)], 5)


@pytest.mark.parametrize("error", [None, "the store is gone"])
def test_a_load_in_part_may_be_the_end_of_its_request(error: str | None) -> None:
    """R3.65, P3.4: nothing of it stays behind, and its name is free."""
    store = Store()
    loop = hybrid_loop_with(store, window(4))
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.finish("far", 2, error=error)
    loop.scheduler._remote.take_arrivals()
    loop.scheduler.finish(["far"], FinishReason.ABORT)
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_free_blocks == 63
    assert not loop.scheduler._state.loads.incomplete
    assert loop.scheduler.add(request("far", PROMPT)) is None
    loop.step()
    assert status(loop, "far") is RequestStatus.WAITING_FOR_REMOTE_KV, "a new request is loaded anew"


def test_a_failed_load_can_end_its_request_by_the_extensions_policy() -> None:
    """R3.65."""
    store = Store()
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.finish("far", 2, error="the store is gone")
    loop.run()
    (end,) = loop.ends("far")
    assert (end.finish_reason, end.error) == (FinishReason.ERROR, "the store is gone")
    assert loop.scheduler.stats().num_free_blocks == 63
    assert not loop.scheduler.has_work()


def test_blocks_of_a_request_that_ended_wait_for_its_load() -> None:
    """R3.65, P3.4: the transfer still writes them."""
    store = Store()
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    loop.scheduler.finish(["far"], FinishReason.ABORT)
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_free_blocks == 60
    with pytest.raises(ValueError, match="still holds blocks"):
        loop.scheduler.add(request("far", PROMPT))
    store.finish("far")
    loop.step()
    assert loop.scheduler.stats().num_free_blocks == 63
    assert loop.scheduler.add(request("far", PROMPT)) is None


def test_a_request_that_ends_after_its_arrival_frees_its_blocks_at_once() -> None:
    """R3.65: also one that waits for its turn."""
    store = Store()
    loop = loop_with(store, max_num_seqs=1)
    store.num_tokens = 0
    loop.scheduler.add(request("runs", [4], max_tokens=20))
    loop.step()
    store.num_tokens = 1_000
    # The cap is reached, so a place has to be there when the load begins.
    loop.scheduler.finish(["runs"], FinishReason.ABORT)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.num_tokens = 0
    loop.scheduler.add(request("other", [5], max_tokens=20))
    loop.step()
    store.finish("far")
    loop.step()
    assert status(loop, "far") is RequestStatus.WAITING
    held = loop.scheduler.stats().num_free_blocks
    loop.scheduler.finish(["far"], FinishReason.ABORT)
    loop.scheduler.check_integrity()
    assert loop.scheduler.stats().num_free_blocks == held + 3


def test_reports_of_loads_that_nobody_knows_are_ignored_and_impossible_ones_are_not() -> None:
    store = Store(num_tokens=4)
    loop = loop_with(store)
    store.results.append(LoadResult("nobody"))
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.results.append(LoadResult("far", 5))
    with pytest.raises(RuntimeError, match="5 tokens are said to be loaded, 4 were to be"):
        loop.scheduler.schedule()


def test_an_extension_that_never_reports_may_not_load_asynchronously() -> None:
    class Silent(SchedulerExtension):
        name = "silent"

        def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
            return ExternalMatch(4, asynchronous=True)

    loop = make_loop(extensions=(Silent(),))
    loop.scheduler.add(request("a", PROMPT))
    with pytest.raises(ConfigError, match="'silent' loads KV asynchronously, but never reports"):
        loop.scheduler.schedule()


def test_a_preempted_request_is_loaded_again_and_comes_back_as_resumed() -> None:
    """R3.65, R3.68."""
    store = Store(num_tokens=8)
    loop = loop_with(store, prefix_caching=False)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    store.finish("far")
    loop.run_some(2)
    loop.scheduler._lifecycle.preempt(loop.scheduler._state.running.requests[0])
    loop.step()
    assert status(loop, "far") is RequestStatus.WAITING_FOR_REMOTE_KV
    store.finish("far")
    loop.scheduler.set_pause(PauseMode.NEW)
    assert loop.scheduler.has_work()
    step = loop.step()
    assert [row.resumed for row in step.new_rows] == [True]
    loop.run()
    assert loop.tokens("far") == expected(PROMPT, 5)


def test_arrivals_keep_their_order_and_the_policy_its_say() -> None:
    """R3.5."""
    for create, order in ((create_fcfs, ["b", "a", "c"]), (create_priority, ["a", "b", "c"])):
        store = Store()
        loop = loop_with(store, max_num_batched_tokens=64, create=create)
        for i, name in enumerate("abc"):
            loop.scheduler.add(request(name, [*PROMPT, 60 + i], arrival_time=float(i)))
        loop.step()
        for name in "bac":
            store.finish(name)
        assert [row.request_id for row in loop.step().new_rows] == order
        loop.run()
        assert loop.tokens("c") == expected([*PROMPT, 62], 5)


def test_a_reset_takes_back_what_has_arrived_but_waits_for_what_is_under_way() -> None:
    """R3.22."""
    store = Store(num_tokens=8)
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    loop.step()
    assert not loop.scheduler.reset_prefix_cache(reset_running=True)
    store.finish("far")
    loop.scheduler._remote.take_arrivals()
    assert loop.scheduler.reset_prefix_cache(reset_running=True)
    loop.scheduler.check_integrity()
    loop.step()
    store.finish("far")
    loop.run()
    assert loop.tokens("far") == expected(PROMPT, 5)


# Reserved blocks


def test_a_load_leaves_prefills_under_way_what_they_need() -> None:
    """R3.75, R3.68: or the two would wait for each other's blocks for ever."""
    store = Store(num_tokens=0)
    loop = loop_with(store, num_blocks=11, prefix_caching=False, max_num_batched_tokens=8)
    loop.scheduler.add(request("prefill", range(3, 29), max_tokens=2))
    loop.step()
    state = loop.scheduler._state
    assert len(state.kv.block_ids("prefill")[0]) == 2
    assert blocks_for_prefills(state, []) == 5
    store.num_tokens = 1_000
    loop.scheduler.add(request("far", range(40, 56), max_tokens=2))
    loop.step()
    # 6 blocks are free after this step, 3 of them for the rest of the prefill: 4 are too many, though they are there.
    assert state.kv.pool.num_free == 6
    assert status(loop, "far") is RequestStatus.WAITING
    loop.run_some(4)
    assert status(loop, "far") is RequestStatus.WAITING_FOR_REMOTE_KV
    store.finish("far")
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 0
    assert loop.tokens("far") == expected([*range(40, 56)], 2)


def test_loads_leave_one_another_what_they_need() -> None:
    """R3.75: each that begins can end its prompt, so that none waits for another that waits for it."""
    store = Store(num_tokens=12)
    loop = loop_with(store, num_blocks=11, prefix_caching=False, max_num_batched_tokens=64)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 24), max_tokens=1))
    loop.step()
    assert sorted(store.loads) == ["a"], "3 blocks now and 3 later, each: 10 are not enough for both"
    store.finish("a")
    loop.run_some(3)
    assert len(loop.ends("a")) == 1
    store.finish("b")
    loop.run()
    assert loop.tokens("b") == expected([*range(40, 64)], 1)


@pytest.mark.parametrize("max_num_seqs", [1, 4])
def test_what_has_arrived_goes_ahead_where_its_blocks_are_all_there_are(max_num_seqs: int) -> None:
    """I3.5: the more urgent request finds less than it needs, gives its blocks up, and would for ever do so again."""
    store = Store()
    loop = loop_with(
        store,
        num_blocks=8,
        prefix_caching=False,
        max_num_batched_tokens=3,
        max_num_seqs=max_num_seqs,
        create=create_priority,
    )
    loop.scheduler.add(request("far", range(3, 19), max_tokens=1, priority=2))
    loop.step()
    store.finish("far")
    store.num_tokens = 0
    loop.scheduler.add(request("near", range(40, 55), max_tokens=1, priority=0))
    loop.run()
    assert loop.tokens("near") == expected([*range(40, 55)], 1)
    assert loop.tokens("far") == expected([*range(3, 19)], 1)
    assert loop.scheduler.stats().num_preemptions <= 3


def test_the_watermark_and_the_whole_sequence_count_for_loads_too() -> None:
    """R3.73, R3.74."""
    store = Store(num_tokens=4)
    loop = loop_with(store, num_blocks=5, full_sequence_must_fit=True, prefix_caching=False)
    loop.scheduler.add(request("a", [4, 5], max_tokens=30))
    store.num_tokens = 0
    loop.step()
    store.num_tokens = 4
    loop.scheduler.add(request("far", range(3, 18), max_tokens=1))
    loop.step()
    assert status(loop, "far") is RequestStatus.WAITING, "1 block would be enough for the load, but not 4 for the whole"


def test_lookahead_keeps_no_loaded_request_from_its_turn() -> None:
    """R3.65: it was not counted when the load began."""
    store = Store(num_tokens=8, lookahead=8)
    loop = loop_with(store, num_blocks=5, prefix_caching=False)
    loop.scheduler.add(request("far", range(3, 19), max_tokens=1))
    loop.step()
    store.finish("far")
    loop.run()
    assert loop.tokens("far") == expected([*range(3, 19)], 1)


def test_synchronous_loads_count_as_computed_in_the_same_step() -> None:
    """R3.64, R3.70."""
    store = Store(num_tokens=8, asynchronous=False)
    loop = loop_with(store)
    loop.scheduler.add(request("far", PROMPT))
    step = loop.scheduler.schedule()
    assert (step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()) == ([8], [2])
    assert np.asarray(step.new_rows[0].block_ids[0]).tolist() == list(loop.scheduler._state.kv.block_ids("far")[0])
