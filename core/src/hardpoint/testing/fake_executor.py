"""An executor over one in-process worker, with optional delay and injected faults."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from hardpoint.errors import ConfigError, EngineDeadError, WorkerError
from hardpoint.interfaces.executor import Executor
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import WORKER_RPC, PendingOutput, Worker


class FakeExecutor(Executor):
    """Runs each step at once; ``before_step(step)`` may sleep or raise, ``kill(reason)`` plays a worker's death."""

    def __init__(self, worker: Worker, before_step: Callable[[SchedulerOutput], None] | None = None) -> None:
        self.worker = worker
        self.before_step = before_step
        self.is_shut_down = False
        self._dead: str | None = None
        self._callbacks: list[Callable[[str], None]] = []

    @property
    def world_size(self) -> int:
        return 1

    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        if method not in WORKER_RPC:
            raise ConfigError(f"worker method {method!r} is not callable; allowed: {', '.join(sorted(WORKER_RPC))}")
        if self._dead is not None:
            raise EngineDeadError(self._dead)
        return [getattr(self.worker, method)(*args)]

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        future: Future[RunnerOutput | Deferred] = Future()
        try:
            if self._dead is not None:
                raise EngineDeadError(self._dead)
            if self.before_step is not None:
                self.before_step(step)
            output = self.worker.execute(step)
            future.set_result(output.result() if isinstance(output, PendingOutput) else output)
        except (WorkerError, EngineDeadError) as error:
            future.set_exception(error)
        return future

    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]:
        future: Future[RunnerOutput] = Future()
        output = self.worker.sample(step_id, grammar)
        future.set_result(output.result() if isinstance(output, PendingOutput) else output)
        return future

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self._callbacks.append(callback)

    def kill(self, reason: str = "worker 0 died") -> None:
        self._dead = reason
        for callback in self._callbacks:
            callback(reason)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self.is_shut_down = True
        self.worker.shutdown()
