"""Containers of live requests: wait queues for policies to build on, and the running list."""

from __future__ import annotations

import heapq
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from itertools import count
from typing import Protocol, cast

import numpy as np

from hardpoint.interfaces import Int32Array, RequestView, SchedulingPolicy
from hardpoint_scheduling.schedulers.request import LiveRequest

Rank = tuple[int, float, str]
"""Place in a total order, lower first."""


class LiveQueue(Protocol):
    """A policy's :class:`~hardpoint.interfaces.RequestQueue` as the scheduler uses it: only its own records are in."""

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[LiveRequest]: ...

    def append(self, request: LiveRequest) -> None: ...

    def prepend(self, request: LiveRequest) -> None: ...

    def peek(self) -> LiveRequest: ...

    def pop(self) -> LiveRequest: ...

    def discard(self, request_id: str) -> bool: ...


def live_queue(policy: SchedulingPolicy) -> LiveQueue:
    """A new queue of ``policy``; it gives back what was put in, so the records keep their type."""
    return cast("LiveQueue", policy.create_queue())


def worth_rebuilding(num_entries: int, num_valid: int) -> bool:
    """Whether a heap whose entries are deleted lazily is mostly dead: then a rebuild is paid for by the deletions."""
    return num_entries > 2 * num_valid + 16


class FifoQueue:
    """First come, first served; joining either end, leaving and looking up are O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, RequestView] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return iter(self._requests.values())

    def append(self, request: RequestView) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: RequestView) -> None:
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def peek(self) -> RequestView:
        for request in self._requests.values():
            return request
        raise IndexError("the queue is empty")

    def pop(self) -> RequestView:
        if not self._requests:
            raise IndexError("the queue is empty")
        return self._requests.popitem(last=False)[1]

    def discard(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None


class OrderedQueue:
    """Lowest rank first, whichever end a request joined at; joining and leaving are O(log n), amortized.

    A request that leaves from the middle leaves its entry in the heap, without a reference to the request; entries
    that stand for nobody never outnumber the others by more than a few.
    """

    def __init__(self, rank: Callable[[RequestView], Rank]) -> None:
        self._rank = rank
        self._requests: dict[str, tuple[int, RequestView]] = {}
        self._heap: list[tuple[Rank, int, str]] = []
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[RequestView]:
        return (request for _, request in self._requests.values())

    def append(self, request: RequestView) -> None:
        ticket = next(self._tickets)
        self._requests[request.request_id] = ticket, request
        heapq.heappush(self._heap, (self._rank(request), ticket, request.request_id))

    def prepend(self, request: RequestView) -> None:
        self.append(request)

    def peek(self) -> RequestView:
        while self._heap:
            if self._is_current(self._heap[0]):
                return self._requests[self._heap[0][2]][1]
            heapq.heappop(self._heap)
        raise IndexError("the queue is empty")

    def pop(self) -> RequestView:
        request = self.peek()
        heapq.heappop(self._heap)
        del self._requests[request.request_id]
        return request

    def discard(self, request_id: str) -> bool:
        if self._requests.pop(request_id, None) is None:
            return False
        if worth_rebuilding(len(self._heap), len(self._requests)):
            self._heap = [entry for entry in self._heap if self._is_current(entry)]
            heapq.heapify(self._heap)
        return True

    def _is_current(self, entry: tuple[Rank, int, str]) -> bool:
        """The ticket tells a request from an earlier one of the same id."""
        found = self._requests.get(entry[2])
        return found is not None and found[0] == entry[1]


class RunningList:
    """Requests that hold slots, oldest admission first, and the same order as an array of slots.

    Both are replaced, never changed in place, so a step keeps the lists it was built from.
    """

    def __init__(self) -> None:
        self.requests: list[LiveRequest] = []
        self.slots: Int32Array = _slots_of(self.requests)

    def __len__(self) -> int:
        return len(self.requests)

    def extend(self, requests: list[LiveRequest]) -> None:
        if requests:
            self._replace(self.requests + requests)

    def remove_all(self, requests: Iterable[LiveRequest]) -> None:
        gone = {id(request) for request in requests}
        if gone:
            self._replace([request for request in self.requests if id(request) not in gone])

    def _replace(self, requests: list[LiveRequest]) -> None:
        self.requests = requests
        self.slots = _slots_of(requests)


def _slots_of(requests: list[LiveRequest]) -> Int32Array:
    return np.fromiter((request.slot for request in requests), dtype=np.int32, count=len(requests))
