"""Virtual times of tenants, and a queue ordered by them."""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from itertools import count

from hardpoint.interfaces import RequestView
from hardpoint_scheduling.schedulers.queues import FifoQueue, worth_rebuilding

MOST_ABSENT = 500
"""Tenants without requests that are remembered because they had more than their share; the rest starts anew."""


@dataclass(slots=True)
class _Account:
    """``time``: tokens computed divided by the weight. ``num_live``, ``num_waiting``: requests of the tenant."""

    weight: float
    time: float = 0.0
    num_live: int = 0
    num_waiting: int = 0


class TenantTimes:
    """One account per tenant that has requests, or that left with more than its share, until the others caught up."""

    def __init__(self, weights: Mapping[str, float], default_weight: float, *, most_absent: int = MOST_ABSENT) -> None:
        self._weights = dict(weights)
        self._default_weight = default_weight
        self._most_absent = most_absent
        self._accounts: dict[str, _Account] = {}
        # (time, tenant) of those that left, and how many of these entries still count.
        self._absent: list[tuple[float, str]] = []
        self._num_absent = 0
        self._reached = 0.0

    def __len__(self) -> int:
        return len(self._accounts)

    def of(self, tenant: str) -> float:
        """The tenant's virtual time."""
        account = self._accounts.get(tenant)
        return self._reached if account is None else account.time

    def join(self, tenant: str) -> None:
        """A new request of the tenant waits."""
        account = self._accounts.get(tenant)
        if account is None:
            account = self._accounts[tenant] = _Account(self._weights.get(tenant, self._default_weight))
        elif account.num_live == 0:
            self._num_absent -= 1
        account.num_live += 1
        self.wait(tenant)

    def wait(self, tenant: str) -> None:
        """One more request of the tenant is in a queue; the first one brings no credit from the past along."""
        account = self._accounts[tenant]
        if account.num_waiting == 0:
            account.time = max(account.time, self._reached)
        account.num_waiting += 1

    def stop_waiting(self, tenant: str) -> None:
        """A request of the tenant left its queue."""
        self._accounts[tenant].num_waiting -= 1

    def serve(self, tenant: str) -> None:
        """The tenant is the one whose turn it is, so all that wait have reached its time."""
        reached = self._accounts[tenant].time
        if reached > self._reached:
            self._reached = reached
            self._forget_absent()

    def charge(self, tenant: str, num_tokens: int) -> None:
        account = self._accounts[tenant]
        account.time += num_tokens / account.weight

    def leave(self, tenant: str) -> None:
        """A request of the tenant ended."""
        account = self._accounts[tenant]
        account.num_live -= 1
        if account.num_live == 0:
            self._num_absent += 1
            heapq.heappush(self._absent, (account.time, tenant))
            self._forget_absent()

    def _forget_absent(self) -> None:
        """Drop accounts that the others caught up with, and the smallest ones beyond the number to remember."""
        while self._absent and (self._absent[0][0] <= self._reached or self._num_absent > self._most_absent):
            time, tenant = heapq.heappop(self._absent)
            if self._is_absent(time, tenant):
                del self._accounts[tenant]
                self._num_absent -= 1
        if worth_rebuilding(len(self._absent), self._num_absent):
            self._absent = [entry for entry in set(self._absent) if self._is_absent(*entry)]
            heapq.heapify(self._absent)

    def _is_absent(self, time: float, tenant: str) -> bool:
        """Whether an entry still stands for a tenant that is away: it may have come back, and left again later."""
        account = self._accounts.get(tenant)
        return account is not None and account.num_live == 0 and account.time == time


@dataclass(slots=True)
class _Lane:
    """Waiting requests of one tenant. ``ticket`` tells its entry in the heap from those of earlier lanes."""

    ticket: int
    requests: FifoQueue = field(default_factory=FifoQueue)


class TenantQueue:
    """The tenant with the lowest virtual time first, and within it first come, first served.

    Times only grow while a tenant waits, so an entry of the heap that is out of date lies too far ahead: it is put
    right when it comes up.
    """

    def __init__(self, times: TenantTimes) -> None:
        self._times = times
        self._lanes: dict[str, _Lane] = {}
        self._heap: list[tuple[float, int, str]] = []
        self._tenant_of: dict[str, str] = {}
        self._tickets = count()

    def __len__(self) -> int:
        return len(self._tenant_of)

    def __iter__(self) -> Iterator[RequestView]:
        for lane in self._lanes.values():
            yield from lane.requests

    def append(self, request: RequestView) -> None:
        self._times.join(request.record.tenant)
        self._lane_for(request, next(self._tickets)).append(request)

    def prepend(self, request: RequestView) -> None:
        self._times.wait(request.record.tenant)
        self._lane_for(request, -next(self._tickets)).prepend(request)

    def peek(self) -> RequestView:
        return self._best().requests.peek()

    def pop(self) -> RequestView:
        request = self._best().requests.peek()
        self._times.serve(request.record.tenant)
        self.discard(request.request_id)
        return request

    def discard(self, request_id: str) -> bool:
        tenant = self._tenant_of.pop(request_id, None)
        if tenant is None:
            return False
        lane = self._lanes[tenant]
        lane.requests.discard(request_id)
        self._times.stop_waiting(tenant)
        if not len(lane.requests):
            del self._lanes[tenant]
            if worth_rebuilding(len(self._heap), len(self._lanes)):
                self._heap = [entry for entry in self._heap if self._is_current(entry)]
                heapq.heapify(self._heap)
        return True

    def _lane_for(self, request: RequestView, ticket: int) -> FifoQueue:
        """``ticket`` is for a new lane: the lower one is first among tenants of equal times."""
        tenant = request.record.tenant
        lane = self._lanes.get(tenant)
        if lane is None:
            lane = self._lanes[tenant] = _Lane(ticket)
            heapq.heappush(self._heap, (self._times.of(tenant), lane.ticket, tenant))
        self._tenant_of[request.request_id] = tenant
        return lane.requests

    def _best(self) -> _Lane:
        """Raises ``IndexError`` when the queue is empty."""
        while True:
            time, ticket, tenant = entry = self._heap[0]
            if not self._is_current(entry):
                heapq.heappop(self._heap)
            elif self._times.of(tenant) > time:
                heapq.heapreplace(self._heap, (self._times.of(tenant), ticket, tenant))
            else:
                return self._lanes[tenant]

    def _is_current(self, entry: tuple[float, int, str]) -> bool:
        lane = self._lanes.get(entry[2])
        return lane is not None and lane.ticket == entry[1]
