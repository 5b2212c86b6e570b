"""Containers of live requests: two wait queues and the running list."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator

import numpy as np

from hardpoint.interfaces import Int32Array
from hardpoint_scheduling.schedulers.request import LiveRequest


class WaitQueue:
    """First come, first served; joining either end, leaving and looking up are O(1)."""

    def __init__(self) -> None:
        self._requests: OrderedDict[str, LiveRequest] = OrderedDict()

    def __len__(self) -> int:
        return len(self._requests)

    def __iter__(self) -> Iterator[LiveRequest]:
        return iter(self._requests.values())

    def __contains__(self, request_id: object) -> bool:
        return request_id in self._requests

    def append(self, request: LiveRequest) -> None:
        self._requests[request.request_id] = request

    def prepend(self, request: LiveRequest) -> None:
        self.append(request)
        self._requests.move_to_end(request.request_id, last=False)

    def prepend_all(self, requests: Iterable[LiveRequest]) -> None:
        """Put ``requests`` ahead of the others, in their given order."""
        for request in reversed(list(requests)):
            self.prepend(request)

    def peek(self) -> LiveRequest:
        return next(iter(self._requests.values()))

    def pop(self) -> LiveRequest:
        return self._requests.popitem(last=False)[1]

    def discard(self, request_id: str) -> bool:
        return self._requests.pop(request_id, None) is not None


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
