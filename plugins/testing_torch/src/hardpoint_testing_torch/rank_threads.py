"""Runs the ranks of one group as threads, so that a test sees all of them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

__all__ = ["RankMeeting", "RankThreads", "ThreadCommunicator"]

ResultT = TypeVar("ResultT")


@dataclass(slots=True)
class RankThreads(Generic[ResultT]):
    """Ranks that run at the same time. ``results`` and ``errors`` by rank; a rank is in neither while it runs."""

    patience_s: float
    results: dict[int, ResultT] = field(default_factory=dict)
    errors: dict[int, Exception] = field(default_factory=dict)
    _threads: dict[int, threading.Thread] = field(default_factory=dict)

    @classmethod
    def run(cls, size: int, body: Callable[[int], ResultT], *, patience_s: float) -> list[ResultT]:
        """``body(rank)`` on every rank; results in rank order.

        Raises the error of the lowest rank that had one, ``AssertionError`` naming ranks that still run after
        ``patience_s`` seconds.
        """
        with cls.running(size, body, patience_s=patience_s) as ranks:
            ranks.join(*range(size))
        for rank in sorted(ranks.errors):
            raise ranks.errors[rank]
        return [ranks.results[rank] for rank in range(size)]

    @classmethod
    @contextmanager
    def running(cls, size: int, body: Callable[[int], ResultT], *, patience_s: float) -> Iterator[RankThreads[ResultT]]:
        """Start all ranks; the caller joins those it waits for."""
        ranks = cls(patience_s)
        for rank in range(size):
            thread = threading.Thread(target=ranks._work, args=(rank, body), name=f"rank-{rank}", daemon=True)
            ranks._threads[rank] = thread
            thread.start()
        yield ranks

    def join(self, *ranks: int) -> None:
        """Wait for ``ranks``. Raises ``AssertionError`` for those that still run when the patience is over."""
        deadline = time.monotonic() + self.patience_s
        for rank in ranks:
            self._threads[rank].join(max(0.0, deadline - time.monotonic()))
        late = [rank for rank in ranks if self._threads[rank].is_alive()]
        assert not late, f"ranks {late} still wait after {self.patience_s:g} s; the others said {self.errors}"

    def _work(self, rank: int, body: Callable[[int], ResultT]) -> None:
        try:
            # As in a forward: tensors that record nothing.
            with torch.inference_mode():
                self.results[rank] = body(rank)
        except Exception as error:
            self.errors[rank] = error


@dataclass(slots=True)
class RankMeeting:
    """Where ranks in threads exchange parts; ``num_meetings`` counts how often they did."""

    size: int
    patience_s: float = 60.0
    num_meetings: int = 0
    _parts: dict[int, torch.Tensor] = field(default_factory=dict)
    _barrier: threading.Barrier = field(init=False)

    def __post_init__(self) -> None:
        self._barrier = threading.Barrier(self.size, timeout=self.patience_s)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        """The parts of all ranks in rank order. Raises ``BrokenBarrierError`` where one does not come in time."""
        self._parts[rank] = part.clone()
        self._barrier.wait()
        if rank == 0:
            self.num_meetings += 1
        parts = [self._parts[other] for other in range(self.size)]
        self._barrier.wait()
        return parts


@dataclass(frozen=True, slots=True)
class ThreadCommunicator:
    """A communicator of one of the ranks that meet."""

    meeting: RankMeeting
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim)

    def close(self) -> None:
        """Nothing is held."""
