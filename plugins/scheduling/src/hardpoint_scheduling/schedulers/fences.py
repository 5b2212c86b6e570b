"""When blocks of an ended request may be reused: not before every step that writes them is through."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Deferred:
    """Blocks of ``request_id`` stay referenced until step number ``fence`` is processed."""

    fence: int
    request_id: str


class Fences:
    """Two counters over non-empty steps, scheduled and processed, and what waits for them (R3.86, R3.87).

    Workers run steps in order, so a step that still writes freed blocks is through before a later one refills them.
    Only what is out of that order, a connector's loads, makes it necessary to wait (R3.85): ``enabled`` says so.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self.scheduled = 0
        self.processed = 0
        self.waiting: deque[Deferred] = deque()

    def is_through(self, last_step: int) -> bool:
        """Whether blocks last used by step number ``last_step`` can be reused; 0 stands for no step at all."""
        return not self.enabled or last_step <= self.processed

    def defer(self, request_id: str) -> None:
        """Hold the blocks until every step scheduled so far is processed.

        The latest step counts, not the request's own last one, so entries open in the order in which they came.
        """
        self.waiting.append(Deferred(self.scheduled, request_id))

    def advance(self) -> list[str]:
        """Count one more processed step and return the requests whose blocks it sets free."""
        self.processed += 1
        due = []
        while self.waiting and self.waiting[0].fence <= self.processed:
            due.append(self.waiting.popleft().request_id)
        return due
