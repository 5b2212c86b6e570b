"""Conformance of the plugin kind ``scheduling_policy``: derive from :class:`SchedulingPolicySuite`."""

from __future__ import annotations

import gc
import time
import tracemalloc
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

import numpy as np
import pytest

from hardpoint.interfaces import (
    EngineRequest,
    PluginContext,
    RequestQueue,
    RequestView,
    SamplingParams,
    SchedulingPolicy,
)
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["SchedulingPolicySuite", "WaitingRequest", "make_waiting"]


@dataclass(frozen=True, eq=False)
class WaitingRequest:
    """What a scheduler shows of a request, here one that has computed nothing."""

    record: EngineRequest
    num_computed_tokens: int = 0

    @property
    def request_id(self) -> str:
        return self.record.request_id

    @property
    def num_tokens(self) -> int:
        return len(self.record.prompt_token_ids)

    @property
    def num_prompt_tokens(self) -> int:
        return len(self.record.prompt_token_ids)

    @property
    def output_token_ids(self) -> Sequence[int]:
        return ()


def make_waiting(
    name: str, *, prompt: int = 4, priority: int = 0, arrival: float = 0.0, tenant: str = ""
) -> WaitingRequest:
    """``prompt`` is the number of its tokens."""
    ids = np.arange(3, 3 + prompt, dtype=np.int32)
    return WaitingRequest(
        EngineRequest(
            request_id=name,
            prompt_token_ids=ids,
            sampling=SamplingParams(),
            priority=priority,
            arrival_time=arrival,
            tenant=tenant,
        )
    )


def mixed(count: int, seed: int = 0) -> list[WaitingRequest]:
    """Requests of a few tenants and priorities, in order of arrival."""
    rng = np.random.default_rng(seed)
    return [
        make_waiting(
            f"r{i}",
            prompt=int(rng.integers(1, 30)),
            priority=int(rng.integers(-2, 3)),
            arrival=float(i),
            tenant=f"tenant {int(rng.integers(0, 4))}",
        )
        for i in range(count)
    ]


class SchedulingPolicySuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.SchedulingPolicy`: whatever its order, nobody is lost or kept."""

    kind: ClassVar[str] = "scheduling_policy"
    torch_free: ClassVar[bool] = True

    def create_policy(self, ctx: PluginContext) -> SchedulingPolicy:
        """The policy under test, as its factory makes it."""
        made: SchedulingPolicy = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def policy(self) -> SchedulingPolicy:
        return self.create_policy(self.context())

    @pytest.mark.parametrize("seed", range(4))
    def test_nobody_is_lost_and_nobody_comes_twice(self, policy: SchedulingPolicy, seed: int) -> None:
        """R3.1, I3.5: over a random life of both queues."""
        life = _Life(policy, np.random.default_rng(seed))
        for request in mixed(100, seed):
            life.join(request)
            for _ in range(3):
                life.happen()
            life.check()
        life.end_all()

    def test_peeking_changes_nothing(self, policy: SchedulingPolicy) -> None:
        queue = filled(policy.create_queue(), mixed(40))
        while len(queue):
            first, size = queue.peek(), len(queue)
            assert queue.peek() is first, "peeking twice gave two requests"
            assert len(queue) == size, f"peeking changed the length from {size} to {len(queue)}"
            assert queue.pop() is first, "pop gave another request than peek"

    def test_an_empty_queue_says_so(self, policy: SchedulingPolicy) -> None:
        queue = policy.create_queue()
        for _ in range(2):
            assert len(queue) == 0, f"an empty queue counts {len(queue)} requests"
            assert list(queue) == [], "iterating an empty queue gives requests"
            for take in (queue.peek, queue.pop):
                with pytest.raises(IndexError):
                    take()
            queue.append(make_waiting("a"))
            queue.pop()

    def test_who_comes_back_is_first_again(self, policy: SchedulingPolicy) -> None:
        """R3.78: taking the best one out and putting it back changes no order, also among equals."""
        for requests in (mixed(40), [make_waiting(f"r{i}") for i in range(6)]):
            queue = filled(policy.create_queue(), requests)
            while len(queue) > 1:
                first = queue.pop()
                queue.prepend(first)
                assert queue.peek() is first, "a request that was put back at once lost its place"
                queue.pop()
            queue.pop()

    def test_discarding(self, policy: SchedulingPolicy) -> None:
        """From anywhere, once; the id is free for another request, which takes its own place."""
        requests = mixed(60)
        queue = filled(policy.create_queue(), requests)
        for request in requests[::2]:
            assert queue.discard(request.request_id), "a waiting request was not found"
            assert not queue.discard(request.request_id), "it was found again"
            policy.on_finished(request)
        assert not queue.discard("nobody"), "an id that never was in the queue was found"
        left = {r.request_id for r in queue}
        assert left == {r.request_id for r in requests[1::2]}, "others than the discarded ones are missing"
        again = make_waiting(requests[0].request_id, priority=5, arrival=99.0, tenant="another")
        queue.append(again)
        popped = drained(queue)
        assert len(popped) == 31, f"{len(popped)} requests came out, not 31"
        times = sum(request is again for request in popped)
        assert times == 1, f"the new request of a discarded one's id came out {times} times"
        assert not any(request is requests[0] for request in popped), "a discarded request came out"

    def test_equal_calls_give_an_equal_order(self, policy: SchedulingPolicy) -> None:
        """Data-parallel engines and replayed traces depend on it."""
        orders = []
        for made in (policy, self.create_policy(self.context())):
            queue = filled(made.create_queue(), mixed(80, seed=3))
            order = []
            while len(queue):
                request = queue.pop()
                made.on_scheduled(request, request.num_tokens)
                order.append(request.request_id)
            orders.append(order)
        assert orders[0] == orders[1], "two policies that were told the same gave two orders"

    def test_the_choice_between_two_queues_is_free_of_effects(self, policy: SchedulingPolicy) -> None:
        """R3.5."""
        held, waiting = (filled(policy.create_queue(), requests) for requests in (mixed(20), mixed(40, 1)[20:]))
        while len(held) and len(waiting):
            answer = policy.precedes(held.peek(), waiting.peek())
            assert isinstance(answer, bool), f"precedes gave {answer!r}, which is no bool"
            assert policy.precedes(held.peek(), waiting.peek()) is answer, "asking twice gave two answers"
            (held if answer else waiting).pop()

    def test_the_victim_is_one_of_those_running(self, policy: SchedulingPolicy) -> None:
        """R3.48: always the same of the same ones; ``picks_last`` is a promise."""
        queue = filled(policy.create_queue(), mixed(12, seed=5))
        running = drained(queue)
        for member in running:
            policy.on_scheduled(member, member.num_tokens)
        for count in range(len(running), 0, -1):
            some = tuple(running[:count])
            victim = policy.victim(some)
            assert any(victim is request for request in some), "the victim is not among the running"
            assert policy.victim(some) is victim, "asking twice gave two victims"
            if policy.picks_last:
                assert victim is some[-1], "picks_last is set, but the victim is another one"

    @pytest.mark.parametrize("way", ["served", "discarded"])
    def test_nothing_is_kept_of_those_that_ended(self, policy: SchedulingPolicy, way: str) -> None:
        """No reference to a request stays behind, in no queue and nowhere else."""
        queue = policy.create_queue()
        gone = [weakref.ref(request) for request in self._pass_through(policy, queue, way)]
        gc.collect()
        assert sum(reference() is not None for reference in gone) == 0, "the policy keeps requests that ended"
        queue.append(make_waiting("next"))
        assert queue.pop().request_id == "next", "a request that ended came out"

    def _pass_through(self, policy: SchedulingPolicy, queue: RequestQueue, way: str) -> list[WaitingRequest]:
        requests = mixed(50)
        filled(queue, requests)
        for request in requests:
            if way == "served":
                served = queue.pop()
                policy.on_scheduled(served, served.num_tokens)
            else:
                queue.discard(request.request_id)
        for request in requests:
            policy.on_finished(request)
        return requests

    def test_memory_does_not_grow_with_tenants_gone(self, policy: SchedulingPolicy) -> None:
        """Tenants come and go by the thousands; what is remembered of them has an end."""
        queue, sizes = policy.create_queue(), []
        tracemalloc.start()
        try:
            for count in range(1, 1_801):
                request = make_waiting(f"r{count}", prompt=1, tenant=f"tenant {count}")
                queue.append(request)
                if count % 3:
                    assert queue.pop() is request, "another request came out of a queue of one"
                else:
                    queue.discard(request.request_id)
                policy.on_scheduled(request, 1 + count % 7)
                policy.on_finished(request)
                if count % 600 == 0:
                    sizes.append(tracemalloc.get_traced_memory()[0])
        finally:
            tracemalloc.stop()
        assert sizes[2] - sizes[1] < 24_000, f"600 tenants that are gone still take {sizes[2] - sizes[1]} bytes"

    def test_a_long_queue_costs_little_more_than_a_short_one(self) -> None:
        """O(log n) or better for joining, leaving and looking up."""
        crowd = [
            make_waiting(f"r{i}", priority=i * 7_919 % 5, arrival=float(i), tenant=f"t{i % 8}") for i in range(6_100)
        ]
        few, many = (min(self._cost(crowd[: size + 100]) for _ in range(3)) for size in (200, 6_000))
        assert many < 10 * few + 2e-6, f"{few * 1e6:.2f} us with 200 waiting, {many * 1e6:.2f} us with 6,000"

    def _cost(self, crowd: Sequence[WaitingRequest]) -> float:
        """Seconds per operation while all but the last 100 of ``crowd`` wait."""
        queue = filled(self.create_policy(self.context()).create_queue(), crowd[:-100])
        middle = [request.request_id for request in crowd[len(crowd) // 3 : len(crowd) // 3 + 50]]
        begin = time.perf_counter()
        for request in crowd[-100:]:
            queue.append(request)
            queue.prepend(queue.pop())
        for name in middle:
            queue.discard(name)
            queue.peek()
        return (time.perf_counter() - begin) / 400


def filled(queue: RequestQueue, requests: Sequence[WaitingRequest]) -> RequestQueue:
    for request in requests:
        queue.append(request)
    return queue


def drained(queue: RequestQueue) -> list[RequestView]:
    return [queue.pop() for _ in range(len(queue))]


class _Life:
    """Both queues and the running list, as a scheduler uses them, beside a plain account of who is where."""

    def __init__(self, policy: SchedulingPolicy, rng: np.random.Generator) -> None:
        self.policy = policy
        self.rng = rng
        self.queues = {name: policy.create_queue() for name in ("waiting", "held")}
        self.members: dict[str, dict[str, RequestView]] = {"waiting": {}, "held": {}}
        self.running: list[RequestView] = []

    def join(self, request: WaitingRequest) -> None:
        self._enter("held" if self.rng.random() < 0.2 else "waiting", request, "append")

    def happen(self) -> None:
        event = self.rng.choice(
            ["admit", "hold", "compute", "preempt", "finish", "abort"], p=[0.3, 0.2, 0.2, 0.1, 0.1, 0.1]
        )
        getattr(self, f"_{event}")()

    def check(self) -> None:
        for name, queue in self.queues.items():
            expected = self.members[name]
            assert len(queue) == len(expected), f"the {name} queue counts {len(queue)} requests, not {len(expected)}"
            inside = [request.request_id for request in queue]
            lost, extra = sorted({*expected} - {*inside}), sorted({*inside} - {*expected})
            assert not lost + extra, f"iterating the {name} queue leaves out {lost} and adds {extra}"
            assert len(inside) == len(expected), f"iterating the {name} queue gives {len(inside) - len(expected)} twice"
            if inside:
                first = queue.peek()
                assert first is expected.get(first.request_id), f"{first.request_id} is peeked at, but not in the queue"

    def end_all(self) -> None:
        for request in self.running:
            self.policy.on_finished(request)
        for name, queue in self.queues.items():
            for request in [*self.members[name].values()]:
                self._discard(name, request)
            assert len(queue) == 0, f"{len(queue)} requests are left in the {name} queue after all were discarded"

    def _enter(self, name: str, request: RequestView, way: str) -> None:
        getattr(self.queues[name], way)(request)
        self.members[name][request.request_id] = request

    def _take(self) -> RequestView | None:
        """The next one of both queues, in the order a scheduler follows."""
        held, waiting = self.queues["held"], self.queues["waiting"]
        if len(held) and (not len(waiting) or self.policy.precedes(held.peek(), waiting.peek())):
            name = "held"
        elif len(waiting):
            name = "waiting"
        else:
            return None
        taken = self.queues[name].pop()
        is_member = self.members[name].pop(taken.request_id, None) is taken
        assert is_member, f"{taken.request_id} came out of the {name} queue, in which it was not"
        return taken

    def _admit(self) -> None:
        request = self._take()
        if request is not None:
            self.running.append(request)
            self.policy.on_scheduled(request, request.num_tokens)

    def _hold(self) -> None:
        request = self._take()
        if request is not None:
            self._enter("held", request, "prepend")

    def _compute(self) -> None:
        for request in self.running:
            self.policy.on_scheduled(request, 1)

    def _preempt(self) -> None:
        if self.running:
            victim = self.policy.victim(tuple(self.running))
            self.running = [request for request in self.running if request is not victim]
            self._enter("waiting", victim, "prepend")

    def _finish(self) -> None:
        if self.running:
            self.policy.on_finished(self.running.pop(int(self.rng.integers(len(self.running)))))

    def _abort(self) -> None:
        for name, members in self.members.items():
            if members:
                request = members.pop(str(self.rng.choice(sorted(members))))
                self._discard(name, request)

    def _discard(self, name: str, request: RequestView) -> None:
        found = self.queues[name].discard(request.request_id)
        assert found, f"{request.request_id} waits in the {name} queue, but discarding it there says it does not"
        self.policy.on_finished(request)
