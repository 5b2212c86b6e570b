"""Policies: the order of their queues, who makes room, and what they remember of whom."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import PluginNotFoundError
from hardpoint.interfaces import (
    FinishReason,
    NoOptions,
    PluginContext,
    RequestQueue,
    RequestView,
    Scheduler,
    SchedulerContext,
    SchedulingPolicy,
)
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint_scheduling.schedulers.factories import BatchOptions, build_scheduler, load_policy
from hardpoint_scheduling.schedulers.policies import fair_share, fcfs, priority
from hardpoint_scheduling.schedulers.policies.fair_share import FairShareOptions, FairSharePolicy
from hardpoint_scheduling.schedulers.policies.priority import PriorityPolicy, rank
from hardpoint_scheduling.schedulers.policies.tenants import TenantQueue, TenantTimes
from hardpoint_scheduling.schedulers.queues import FifoQueue, OrderedQueue
from hardpoint_scheduling.schedulers.request import LiveRequest
from sched_support import Loop, expected, make_loop, request

CONTEXT = PluginContext("under-test", 1, frozenset({ProcessRole.ENGINE}))
POLICIES: dict[str, Callable[[], SchedulingPolicy]] = {
    "fcfs": lambda: fcfs.create(CONTEXT, NoOptions()),
    "priority": lambda: priority.create(CONTEXT, NoOptions()),
    "fair_share": lambda: fair_share.create(CONTEXT, FairShareOptions(weights={"t1": 2.0})),
}


def live(name: str, **fields: Any) -> LiveRequest:
    return LiveRequest(request(name, [4, 5], **fields), 20)


def ids(requests: Any) -> list[str]:
    return [r.request_id for r in requests]


def drained(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def scheduled_by(policy: SchedulingPolicy) -> Callable[..., Scheduler]:
    """A factory of schedulers with this policy."""

    def create(ctx: SchedulerContext, options: BatchOptions, clock: Callable[[], float] = time.time) -> Scheduler:
        return build_scheduler(ctx, policy, options, clock)

    return create


# First come, first served


def test_first_come_first_served_with_a_way_to_the_front() -> None:
    queue = FifoQueue()
    a, b, c = (live(name) for name in "abc")
    queue.append(a)
    queue.append(b)
    queue.prepend(c)
    assert ids(queue) == ["c", "a", "b"]
    assert queue.peek() is c
    assert queue.discard("a")
    assert not queue.discard("a")
    assert drained(queue) == ["c", "b"]
    for taking in (queue.peek, queue.pop):
        with pytest.raises(IndexError, match="empty"):
            taking()


def test_who_was_held_back_comes_first_and_the_last_makes_room() -> None:
    """R3.5, R3.48: FCFS."""
    policy = POLICIES["fcfs"]()
    assert policy.precedes(live("held", arrival_time=9.0), live("waiting", arrival_time=1.0))
    assert policy.picks_last
    assert policy.victim([live("a"), live("b")]).request_id == "b"


# Priority


def test_priority_then_arrival_then_id() -> None:
    """R1.13: lower is served first, wherever a request joins."""
    queue = OrderedQueue(rank)
    for name, value, arrival in (("d", 1, 0.0), ("c", 0, 2.0), ("b", 0, 1.0), ("a", 0, 1.0), ("e", -3, 9.0)):
        (queue.append if name in "ace" else queue.prepend)(live(name, priority=value, arrival_time=arrival))
    assert drained(queue) == ["e", "a", "b", "c", "d"]


def test_the_better_head_of_both_queues_is_tried_and_the_worst_request_makes_room() -> None:
    """R3.5, R3.48: PRIORITY; ties by latest arrival."""
    policy = PriorityPolicy()
    assert not policy.picks_last
    urgent, early, late = live("u", priority=-1), live("e", arrival_time=1.0), live("l", arrival_time=2.0)
    assert policy.precedes(urgent, early)
    assert not policy.precedes(late, early)
    assert policy.victim([late, urgent, early]) is late
    assert policy.victim([urgent, early]) is early


def test_entries_of_requests_that_left_do_not_pile_up() -> None:
    """Deletion is lazy, but the heap stays within twice its members."""
    queue = OrderedQueue(rank)
    for i in range(5_000):
        queue.append(live(f"r{i}", arrival_time=float(-i)))
        if i >= 10:
            assert queue.discard(f"r{i - 10}")
        assert len(queue._heap) <= 2 * len(queue) + 17
    assert ids([queue.pop()]) == ["r4999"]


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["append", "prepend", "pop", "discard"]), st.integers(0, 7), st.integers(-2, 2)))
)
def test_an_ordered_queue_is_a_sorted_list(events: list[tuple[str, int, int]]) -> None:
    """R1.13."""
    queue, inside = OrderedQueue(rank), dict[str, LiveRequest]()
    for event, number, value in events:
        name = f"r{number}"
        if event == "discard":
            assert queue.discard(name) == (inside.pop(name, None) is not None)
        elif event == "pop" and inside:
            best = min(inside.values(), key=rank)
            assert queue.peek() is best
            assert queue.pop() is inside.pop(best.request_id)
        elif event in ("append", "prepend") and name not in inside:
            inside[name] = live(name, priority=value)
            getattr(queue, event)(inside[name])
        assert len(queue) == len(inside)
    assert drained(queue) == ids(sorted(inside.values(), key=rank))


# Fair shares


def test_the_tenant_with_the_least_time_is_next() -> None:
    times = TenantTimes({"big": 2.0}, 1.0)
    queue = TenantQueue(times)
    for i in range(4):
        for tenant in ("small", "big"):
            queue.append(live(f"{tenant}{i}", tenant=tenant))
    order = []
    while len(queue):
        taken = queue.pop()
        order.append(taken.request_id)
        times.charge(taken.record.tenant, 10)
    assert order == ["small0", "big0", "big1", "small1", "big2", "big3", "small2", "small3"]


def test_nobody_saves_up_credit_by_being_idle() -> None:
    """A tenant that comes late gets its share from now on, not what it might have had before."""
    times = TenantTimes({}, 1.0)
    queue = TenantQueue(times)
    for i in range(40):
        queue.append(live(f"a{i}", tenant="a"))
        if i >= 20:
            queue.append(live(f"b{i}", tenant="b"))
        if i < 20:
            queue.pop()
            times.charge("a", 100)
    # Whoever comes late starts at what the others have reached: b is behind by one service, not by twenty.
    assert times.of("a") == 2_000
    assert times.of("b") == 1_900
    served = Counter[str]()
    for _ in range(20):
        tenant = queue.pop().record.tenant
        served[tenant] += 1
        times.charge(tenant, 100)
    assert abs(served["a"] - served["b"]) <= 2


def test_a_tenant_cannot_shed_its_debt_by_leaving() -> None:
    times = TenantTimes({}, 1.0, most_absent=3)
    queue = TenantQueue(times)
    for name in ("greedy", "modest"):
        queue.append(live(name, tenant=name))
    queue.pop()
    times.charge("greedy", 1_000)
    times.leave("greedy")
    queue.append(live("again", tenant="greedy"))
    assert times.of("greedy") == 1_000
    assert queue.peek().request_id == "modest"
    queue.pop()
    times.charge("modest", 5_000)
    times.leave("modest")
    queue.pop()
    times.leave("greedy")
    assert len(times) == 1, "the others have reached what greedy had, so it starts like anybody"


def test_only_so_many_absent_tenants_are_remembered() -> None:
    times = TenantTimes({}, 1.0, most_absent=3)
    queue = TenantQueue(times)
    for i in range(50):
        queue.append(live(f"r{i}", tenant=f"t{i}"))
        queue.discard(f"r{i}")
        times.charge(f"t{i}", 1 + i)
        times.leave(f"t{i}")
    assert len(times) == 3
    assert [times.of(f"t{i}") for i in (0, 47, 48, 49)] == [0, 48, 49, 50], "the largest debts are kept"


@settings(max_examples=30, deadline=None)
@given(
    st.lists(st.tuples(st.sampled_from(["join", "serve", "hold", "drop", "charge"]), st.integers(0, 3)), max_size=80)
)
def test_who_is_served_has_the_least_time_of_all_that_wait(events: list[tuple[str, int]]) -> None:
    """Whatever the tenants did before; and nobody is lost."""
    times = TenantTimes({"t1": 3.0}, 1.0)
    queue, waiting, running = TenantQueue(times), dict[str, RequestView](), list[RequestView]()
    for number, (event, tenant) in enumerate(events):
        if event == "join":
            made = live(f"r{number}", tenant=f"t{tenant}")
            waiting[made.request_id] = made
            queue.append(made)
        elif event in ("serve", "hold") and waiting:
            least = min(times.of(r.record.tenant) for r in waiting.values())
            taken = queue.pop()
            assert times.of(taken.record.tenant) == least
            if event == "hold":
                queue.prepend(taken)
                assert queue.peek() is taken
            else:
                running.append(waiting.pop(taken.request_id))
                times.charge(taken.record.tenant, 7)
        elif event == "drop" and running:
            times.leave(running.pop(0).record.tenant)
        elif event == "charge" and running:
            times.charge(running[-1].record.tenant, 20)
        assert len(queue) == len(waiting)
    assert sorted(drained(queue)) == sorted(waiting)


def test_the_most_served_tenant_makes_room_with_its_latest_request() -> None:
    """R3.48 [D]: victim choice is the policy's."""
    policy = FairSharePolicy(FairShareOptions())
    queue = policy.create_queue()
    running = [live(f"{tenant}{i}", tenant=tenant) for i in range(2) for tenant in "ab"]
    for one in running:
        queue.append(one)
    policy.on_scheduled(running[0], 50)
    assert policy.victim(running).request_id == "a1"
    policy.on_scheduled(running[1], 60)
    assert policy.victim(running).request_id == "b1"


def test_whoever_runs_longest_is_spared_while_there_is_another() -> None:
    """R3.48, I3.5: shares change while requests run, so that they could preempt one another in turn for ever."""
    policy = FairSharePolicy(FairShareOptions())
    queue = policy.create_queue()
    running = [live(tenant, tenant=tenant) for tenant in "ab"]
    for one in running:
        queue.append(one)
    policy.on_scheduled(running[0], 500)
    assert policy.victim(running).request_id == "b"
    assert policy.victim(running[:1]).request_id == "a"


def test_two_tenants_share_a_busy_scheduler_by_their_weights() -> None:
    """A thousand requests of one tenant do not keep the other from its share of the computed tokens."""
    policy = FairSharePolicy(FairShareOptions(weights={"t1": 2.0}))
    loop = make_loop(create=scheduled_by(policy), max_num_seqs=4, max_num_batched_tokens=16, prefix_caching=False)
    for tenant, number in (("t0", 400), ("t1", 200)):
        for i in range(number):
            loop.scheduler.add(request(f"{tenant}-{i}", [9, 8, i % 90 + 3, 7], max_tokens=3, tenant=tenant))
    for _ in range(120):
        loop.step()
    served = Counter(name.partition("-")[0] for name, outputs in loop.outputs.items() for _ in outputs)
    assert 1.7 < served["t1"] / served["t0"] < 2.3
    loop.scheduler.finish(list(loop.scheduler.live_request_ids()), FinishReason.ABORT)
    assert len(policy._times) <= 2


# Pluggable


def test_policies_are_found_by_name_and_an_unknown_one_stops_the_start() -> None:
    """R3.4."""
    runtime = PluginRuntime(build_plan(discover(), PluginSelection()), {ProcessRole.ENGINE})
    assert isinstance(load_policy(runtime, "priority"), PriorityPolicy)
    assert isinstance(load_policy(runtime, "fair_share"), FairSharePolicy)
    with pytest.raises(PluginNotFoundError, match=r"no scheduling_policy plugin 'prioritty'.*priority"):
        load_policy(runtime, "prioritty")
    assert load_policy(None, "fcfs").picks_last
    with pytest.raises(PluginNotFoundError, match="'priority' needs plugin access"):
        load_policy(None, "priority")


class ShortestFirst(PriorityPolicy):
    """As a stranger would write it."""

    def create_queue(self) -> RequestQueue:
        return OrderedQueue(lambda request: (request.num_prompt_tokens, 0.0, request.request_id))


def test_a_policy_of_somebody_else_orders_admissions() -> None:
    """R3.4 [D]."""
    loop = make_loop(create=scheduled_by(ShortestFirst()), max_num_seqs=2, max_num_batched_tokens=64)
    for length in (9, 3, 7, 5):
        loop.scheduler.add(request(f"r{length}", range(3, 3 + length), max_tokens=2))
    loop.run()
    assert [row.request_id for step in loop.steps for row in step.new_rows] == ["r3", "r5", "r7", "r9"]


def play(loop: Loop, policy: str, shapes: list[tuple[int, int, int, int]], aborts: set[int]) -> dict[str, list[int]]:
    """Add requests over time, abort some, and check who is admitted in every step; the prompts of the others."""
    prompts: dict[str, list[int]] = {}
    tried = loop.scheduler
    for number, (length, value, tenant, delay) in enumerate(shapes):
        name = f"r{number:02}"
        prompts[name] = [3 + (number * 7 + i) % 90 for i in range(length)]
        made = request(name, prompts[name], 4, priority=value, arrival_time=float(number), tenant=f"t{tenant}")
        assert tried.add(made) is None
        for _ in range(delay):
            check_order(loop, policy)
        if number in aborts and name in set(tried.live_request_ids()):
            tried.finish([name], FinishReason.ABORT)
            del prompts[name]
    while tried.has_work():
        check_order(loop, policy)
    return prompts


def check_order(loop: Loop, policy: str) -> None:
    """Whoever is admitted is the best of those that waited, by the policy's own measure."""
    state = loop.scheduler._state
    waiting = {r.request_id: r for queue in (state.skipped, state.waiting) for r in queue}
    step = loop.step()
    for row in step.new_rows:
        entered = waiting.pop(row.request_id)
        if policy == "priority":
            assert all(rank(entered) < rank(other) for other in waiting.values())
        elif policy == "fcfs" and not entered.num_preemptions:
            assert all(other.request_id > entered.request_id for other in waiting.values())


SHAPES = st.lists(
    st.tuples(st.integers(1, 14), st.integers(-1, 1), st.integers(0, 2), st.integers(0, 3)), min_size=1, max_size=12
)
ABORTS = st.sets(st.integers(0, 11), max_size=3)


def check_policy(policy: str, shapes: list[tuple[int, int, int, int]], aborts: set[int], num_blocks: int) -> None:
    loop = make_loop(
        num_blocks, create=scheduled_by(POLICIES[policy]()), max_num_seqs=3, max_num_batched_tokens=12, max_model_len=24
    )
    for name, prompt in play(loop, policy, shapes, aborts).items():
        assert loop.tokens(name) == expected(prompt, min(4, (num_blocks - 1) * 4 + 1 - len(prompt)))
        assert len(loop.ends(name)) == 1
    assert loop.scheduler.stats().num_free_blocks == num_blocks - 1


@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=8, deadline=None)
@given(SHAPES, ABORTS, st.integers(6, 30))
def test_no_policy_loses_a_request_or_breaks_its_order(
    policy: str, shapes: list[tuple[int, int, int, int]], aborts: set[int], num_blocks: int
) -> None:
    """R3.1, R3.5, I3.5, I3.8: with preemption under way."""
    check_policy(policy, shapes, aborts, num_blocks)


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("policy", POLICIES)
@settings(max_examples=2_000, deadline=None)
@given(SHAPES, ABORTS, st.integers(6, 30))
def test_no_policy_loses_a_request_however_long_one_looks(
    policy: str, shapes: list[tuple[int, int, int, int]], aborts: set[int], num_blocks: int
) -> None:
    """R3.5, I3.5, I3.8."""
    check_policy(policy, shapes, aborts, num_blocks)
