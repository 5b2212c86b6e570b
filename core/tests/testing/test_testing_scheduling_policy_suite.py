"""The kit for scheduling policies accepts sound ones and rejects each mutant."""

from __future__ import annotations

import bisect
import random
from collections.abc import Iterator, Sequence
from typing import ClassVar

import pytest

from hardpoint.interfaces import PluginContext, RequestQueue, RequestView, SchedulingPolicy
from hardpoint.testing.scheduling_policy_suite import SchedulingPolicySuite
from hardpoint.testing.suite_runner import run_suite


class ByArrival:
    """A plain queue, ends first: what a dictionary gives for nothing."""

    def __init__(self) -> None:
        self.requests: dict[str, RequestView] = {}
        self.returned: list[RequestView] = []

    def __len__(self) -> int:
        return len(self.requests) + len(self.returned)

    def __iter__(self) -> Iterator[RequestView]:
        return iter([*self.returned, *self.requests.values()])

    def append(self, request: RequestView) -> None:
        self.requests[request.request_id] = request

    def prepend(self, request: RequestView) -> None:
        self.returned.append(request)

    def peek(self) -> RequestView:
        if self.returned:
            return self.returned[-1]
        for request in self.requests.values():
            return request
        raise IndexError("empty")

    def pop(self) -> RequestView:
        request = self.peek()
        if self.returned:
            return self.returned.pop()
        return self.requests.pop(request.request_id)

    def discard(self, request_id: str) -> bool:
        if self.requests.pop(request_id, None) is not None:
            return True
        kept = [request for request in self.returned if request.request_id != request_id]
        found = len(kept) < len(self.returned)
        self.returned = kept
        return found


class Plain(SchedulingPolicy):
    queue: ClassVar[type[ByArrival]] = ByArrival

    def create_queue(self) -> RequestQueue:
        return self.queue()

    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        return True

    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return running[0]


class Counting(Plain):
    """Hears of everything: the kit calls these methods too."""

    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def on_scheduled(self, request: RequestView, num_tokens: int) -> None:
        self.tokens[request.request_id] = self.tokens.get(request.request_id, 0) + num_tokens

    def on_finished(self, request: RequestView) -> None:
        self.tokens.pop(request.request_id, None)


def make_suite(policy: type[SchedulingPolicy]) -> type[SchedulingPolicySuite]:
    class Suite(SchedulingPolicySuite):
        def create_policy(self, ctx: PluginContext) -> SchedulingPolicy:
            return policy()

    return Suite


class TestPlain(make_suite(Plain)):  # type: ignore[misc]
    pass


@pytest.mark.slow
class TestCounting(make_suite(Counting)):  # type: ignore[misc]
    pass


class _Forgets(ByArrival):
    def discard(self, request_id: str) -> bool:
        return request_id in self.requests


class _FindsAgain(ByArrival):
    def discard(self, request_id: str) -> bool:
        super().discard(request_id)
        return True


class _Twice(ByArrival):
    def pop(self) -> RequestView:
        request = super().pop()
        if len(self.requests) % 7 == 3:
            self.requests[request.request_id] = request
        return request


class _Loses(ByArrival):
    def prepend(self, request: RequestView) -> None:
        if len(self.returned) < 2:
            super().prepend(request)


class _ToTheEnd(ByArrival):
    def prepend(self, request: RequestView) -> None:
        self.append(request)


class _PeekTakes(ByArrival):
    def peek(self) -> RequestView:
        return super().pop()


class _OtherThanPeek(ByArrival):
    def pop(self) -> RequestView:
        if self.requests and not self.returned:
            return self.requests.popitem()[1]
        return super().pop()


class _NoneWhenEmpty(ByArrival):
    def pop(self) -> RequestView:
        return super().pop() if len(self) else None  # type: ignore[return-value]


class _Shuffles(ByArrival):
    def pop(self) -> RequestView:
        if len(self.requests) > 1 and not self.returned and random.random() < 0.5:
            name = next(iter(self.requests))
            self.requests[name] = self.requests.pop(name)
        return super().pop()


class _Slow(ByArrival):
    """Kept in order with an insertion in the middle and a search from the front."""

    def __init__(self) -> None:
        super().__init__()
        self.order: list[tuple[int, str]] = []

    def append(self, request: RequestView) -> None:
        super().append(request)
        bisect.insort(self.order, (request.record.priority, request.request_id))

    def discard(self, request_id: str) -> bool:
        self.order = [entry for entry in self.order if entry[1] != request_id]
        return super().discard(request_id)


class _Keeps(ByArrival):
    kept: ClassVar[list[RequestView]] = []

    def append(self, request: RequestView) -> None:
        super().append(request)
        self.kept.append(request)


def with_queue(queue: type[ByArrival]) -> type[Plain]:
    return type(queue.__name__.strip("_"), (Plain,), {"queue": queue})


class VictimFromElsewhere(Plain):
    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return self.__dict__.setdefault("first", running[-1])


class RandomVictim(Plain):
    def victim(self, running: Sequence[RequestView]) -> RequestView:
        return random.choice(running)


class BreaksPromise(Plain):
    picks_last: ClassVar[bool] = True


class AnswersWithSideEffect(Plain):
    turn = False

    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        self.turn = not self.turn
        return self.turn


class RemembersTenants(Plain):
    def __init__(self) -> None:
        self.tokens: dict[str, int] = {}

    def on_scheduled(self, request: RequestView, num_tokens: int) -> None:
        self.tokens[request.record.tenant] = self.tokens.get(request.record.tenant, 0) + num_tokens


MUTANTS: dict[type[SchedulingPolicy], str] = {
    with_queue(_Forgets): "test_discarding",
    with_queue(_FindsAgain): "test_discarding",
    with_queue(_Twice): "test_nobody_is_lost_and_nobody_comes_twice",
    with_queue(_Loses): "test_nobody_is_lost_and_nobody_comes_twice",
    with_queue(_ToTheEnd): "test_who_comes_back_is_first_again",
    with_queue(_PeekTakes): "test_peeking_changes_nothing",
    with_queue(_OtherThanPeek): "test_peeking_changes_nothing",
    with_queue(_NoneWhenEmpty): "test_an_empty_queue_says_so",
    with_queue(_Shuffles): "test_equal_calls_give_an_equal_order",
    with_queue(_Slow): "test_a_long_queue_costs_little_more_than_a_short_one",
    with_queue(_Keeps): "test_nothing_is_kept_of_those_that_ended",
    VictimFromElsewhere: "test_the_victim_is_one_of_those_running",
    RandomVictim: "test_the_victim_is_one_of_those_running",
    BreaksPromise: "test_the_victim_is_one_of_those_running",
    AnswersWithSideEffect: "test_the_choice_between_two_queues_is_free_of_effects",
    RemembersTenants: "test_memory_does_not_grow_with_tenants_gone",
}


@pytest.mark.slow
@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[SchedulingPolicy]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed
