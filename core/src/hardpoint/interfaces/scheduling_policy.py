"""Plugin kind ``scheduling_policy``: who is served first, and who makes room.

A scheduler asks a policy for its order and does everything else itself: budgets, blocks, steps. It keeps two queues,
of requests that can be admitted and of those that something holds back, and a list of running requests.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from typing import ClassVar, Protocol

from hardpoint.interfaces.scheduler import RequestView


class RequestQueue(Protocol):
    """Waiting requests in the order of a policy. Every method is at most O(log n), amortized, but iteration.

    A request is in a queue at most once, and no queue holds on to one that left it. Iteration is in any order.
    """

    def __len__(self) -> int: ...

    def __iter__(self) -> Iterator[RequestView]: ...

    def append(self, request: RequestView) -> None:
        """A new request joins; this happens once in its life, whichever queue it is."""

    def prepend(self, request: RequestView) -> None:
        """A request that left a queue is back: ahead of all that the policy does not put before it."""

    def peek(self) -> RequestView:
        """The one that :meth:`pop` would return. Raises ``IndexError`` when the queue is empty."""
        ...

    def pop(self) -> RequestView:
        """Take out the best one. Raises ``IndexError`` when the queue is empty."""
        ...

    def discard(self, request_id: str) -> bool:
        """Take out the request of that id; False when it is not here."""
        ...


class SchedulingPolicy(ABC):
    """One per scheduler; called from one thread only.

    Attributes:
        picks_last: victims are always the last of the running list; :meth:`victim` is then not called.
    """

    picks_last: ClassVar[bool] = False

    @abstractmethod
    def create_queue(self) -> RequestQueue:
        """An empty queue; all queues of one policy share what it knows."""

    @abstractmethod
    def precedes(self, held: RequestView, waiting: RequestView) -> bool:
        """Whether ``held``, the best of those held back before, is tried before ``waiting``, the best of the others."""

    @abstractmethod
    def victim(self, running: Sequence[RequestView]) -> RequestView:
        """Who of ``running`` (not empty, oldest admission first) gives up its blocks. Changes nothing.

        What was computed for the victim is computed again, so an order that changes meanwhile must spare somebody until
        it ends, such as the oldest: requests could otherwise preempt one another in turn and never get on.
        """

    def on_scheduled(self, request: RequestView, num_tokens: int) -> None:
        """The next step computes ``num_tokens`` of the request. Overriding costs a call per request and step."""

    def on_finished(self, request: RequestView) -> None:
        """The request ended and is in no queue; called once for each that was appended. Keep nothing of it."""
