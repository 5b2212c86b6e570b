"""Runs the ranks of one group as threads, so that a test sees all of them at once."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Generic, TypeVar

import torch

__all__ = ["RankThreads"]

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
