"""A device with queues, made of the host: copies take place when a test says so, and freed memory is spoilt.

Work of the main stream is done at once, as tensors of the host are computed; what lags behind, on a virtual clock, are
events and copies. So an output that is read too early, memory that is let go too early, and a host that waits where it
should not, are all seen without a device.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Deferred, Executor, GrammarMask, PendingOutput, RunnerOutput, SchedulerOutput, Worker
from hardpoint.interfaces.worker import WORKER_RPC

__all__ = ["POISON", "FakeCopyStream", "FakeEvent", "FakeStreams", "PromisingExecutor"]

POISON = -7
"""What memory holds that nobody has written yet, or that was freed. Of bools it is True."""


class FakeEvent:
    """``blocking``: whether a thread that waits for it would sleep. ``place``: the virtual time at which it is done."""

    def __init__(self, streams: FakeStreams, name: str, place: int, *, blocking: bool) -> None:
        self.name = name
        self.blocking = blocking
        self.place = place
        self._streams = streams

    def query(self) -> bool:
        return self._streams.now >= self.place

    def synchronize(self) -> None:
        """Time passes until it is done."""
        self._streams.log.append(f"wait {self.name}")
        self._streams.advance_to(self.place)


class FakeStreams:
    """Attributes:
    now: virtual time; everything submitted up to then is done.
    log: waits of the host, copies and whatever a test adds, in the order in which they happened.
    events: all that were recorded.
    """

    def __init__(self) -> None:
        self.now = 0
        self.log: list[str] = []
        self.events: list[FakeEvent] = []
        self._queue: list[Callable[[], None]] = []
        self._lock = threading.RLock()

    @property
    def end(self) -> int:
        """The time at which everything submitted so far will be done."""
        return len(self._queue)

    def submit(self, work: Callable[[], None]) -> None:
        with self._lock:
            self._queue.append(work)

    def advance_to(self, place: int) -> None:
        with self._lock:
            while self.now < place:
                self._queue[self.now]()
                self.now += 1

    def advance(self) -> None:
        """Let everything submitted so far be done."""
        self.advance_to(self.end)

    def record(self, name: str, *, blocking: bool) -> FakeEvent:
        with self._lock:
            event = FakeEvent(self, name, self.end, blocking=blocking)
            self.events.append(event)
            return event

    def create_copy_stream(self) -> FakeCopyStream:
        return FakeCopyStream(self)

    def record_main(self) -> FakeEvent:
        """What the main stream has to do is done when it is submitted, so time does not have to pass for it."""
        event = FakeEvent(self, "uploads", self.now, blocking=True)
        self.events.append(event)
        return event


class FakeCopyStream:
    """Copies that were not told to wait for the main stream are refused: they might read what is not computed yet."""

    def __init__(self, streams: FakeStreams) -> None:
        self._streams = streams
        self._waits = False

    def wait_for_main(self) -> None:
        self._streams.log.append("copies wait for main")
        self._waits = True

    def copy_to_host(self, source: torch.Tensor) -> torch.Tensor:
        if not self._waits:
            raise AssertionError("a copy was submitted before its stream was told to wait for the main stream")
        # The same memory without its owner: when that is gone, the memory is somebody else's.
        memory = source.detach().numpy()
        weakref.finalize(source, memory.fill, POISON).atexit = False
        host = np.full_like(memory, POISON, order="C")
        self._streams.submit(lambda: self._copy(memory, host))
        return torch.from_numpy(host)

    def _copy(self, memory: np.ndarray, host: np.ndarray) -> None:
        host[...] = memory
        self._streams.log.append("copy")

    def record_event(self, *, blocking: bool) -> FakeEvent:
        self._waits = False
        return self._streams.record("copies", blocking=blocking)


class _Promise(Future[Any]):
    """Complete once somebody asks for the result: what is under way stays so as long as nobody does."""

    def __init__(self, output: object) -> None:
        super().__init__()
        self._output = output

    def result(self, timeout: float | None = None) -> Any:
        if not self.done():
            output = self._output
            self.set_result(output.result() if isinstance(output, PendingOutput) else output)
        return super().result(timeout)


class PromisingExecutor(Executor):
    """One worker in this process, whose outputs are taken when the engine asks for them and no earlier."""

    def __init__(self, worker: Worker) -> None:
        self._worker = worker

    @property
    def world_size(self) -> int:
        return 1

    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        del ranks, timeout_s
        if method not in WORKER_RPC:
            raise ConfigError(f"worker method {method!r} is not callable; allowed: {', '.join(sorted(WORKER_RPC))}")
        return [getattr(self._worker, method)(*args)]

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        return _Promise(self._worker.execute(step))

    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]:
        return _Promise(self._worker.sample(step_id, grammar))

    def on_failure(self, callback: Callable[[str], None]) -> None:
        del callback

    def shutdown(self, timeout_s: float = 10.0) -> None:
        del timeout_s
        self._worker.shutdown()
