"""Policies: the order of their queues, who makes room, and what they remember of whom."""

from __future__ import annotations

import pytest

from hardpoint.interfaces import RequestQueue, RequestView
from hardpoint_scheduling.schedulers.policies.priority import rank
from hardpoint_scheduling.schedulers.queues import FifoQueue, OrderedQueue
from hardpoint_scheduling.schedulers.request import LiveRequest
from sched_support import request


def live(name: str, **fields: object) -> LiveRequest:
    return LiveRequest(request(name, [4, 5], **fields), 20)


def ids(requests: list[RequestView]) -> list[str]:
    return [r.request_id for r in requests]


def drained(queue: RequestQueue) -> list[str]:
    return [queue.pop().request_id for _ in range(len(queue))]


def test_first_come_first_served_with_a_way_to_the_front() -> None:
    queue = FifoQueue()
    a, b, c = (live(name) for name in "abc")
    queue.append(a)
    queue.append(b)
    queue.prepend(c)
    assert ids(list(queue)) == ["c", "a", "b"]
    assert queue.peek() is c
    assert queue.discard("a")
    assert not queue.discard("a")
    assert drained(queue) == ["c", "b"]
    for taking in (queue.peek, queue.pop):
        with pytest.raises(IndexError, match="empty"):
            taking()


def test_priority_then_arrival_then_id() -> None:
    """R1.13: lower is served first, wherever a request joins."""
    queue = OrderedQueue(rank)
    for name, priority, arrival in (("d", 1, 0.0), ("c", 0, 2.0), ("b", 0, 1.0), ("a", 0, 1.0), ("e", -3, 9.0)):
        (queue.append if name in "ace" else queue.prepend)(live(name, priority=priority, arrival_time=arrival))
    assert drained(queue) == ["e", "a", "b", "c", "d"]
