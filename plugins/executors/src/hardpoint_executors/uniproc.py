"""The executor ``uniproc``: one worker, in this process, called directly."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any

from hardpoint.errors import ConfigError, EngineDeadError, WorkerError
from hardpoint.interfaces import (
    Deferred,
    Executor,
    ExecutorContext,
    GrammarMask,
    NoOptions,
    PendingOutput,
    RunnerOutput,
    SchedulerOutput,
    WorkerConfig,
    plugin,
)
from hardpoint.interfaces.worker import WORKER_RPC
from hardpoint_executors.build import build_worker, load_model
from hardpoint_executors.context import require
from hardpoint_executors.errors import worker_error
from hardpoint_executors.outputs import OutputQueue
from hardpoint_executors.rpc import RpcCodec, RpcFailure

__all__ = ["UniprocExecutor", "create"]


@plugin("executor", options=NoOptions)
class UniprocExecutor(Executor):
    """Runs every call in the calling thread; a future is complete when returned unless the worker's device still works.

    A call cannot be interrupted: ``timeout_s`` has no effect but on the shutdown's wait for a device.
    """

    def __init__(self, ctx: ExecutorContext, options: NoOptions) -> None:
        """Raises ``ConfigError`` for ranks that this process cannot be, and what building a worker raises."""
        del options
        plugins, whole = require(ctx)
        config = self._at_its_place(ctx, whole)
        self._worker = build_worker(plugins, ctx.worker, config, ctx.worker_options)
        # What this process answers in the worker's stead.
        self._own = {"load_model": partial(load_model, self._worker, plugins, config)}
        self._rank = config.parallel.rank
        self._codec = RpcCodec(WORKER_RPC)
        self._outputs = OutputQueue("outputs")
        self._is_shut_down = False

    @classmethod
    def _at_its_place(cls, ctx: ExecutorContext, config: WorkerConfig) -> WorkerConfig:
        """``config`` as the rank in this process sees it."""
        if config.parallel.world_size != 1:
            raise ConfigError(
                f"executor 'uniproc' runs one rank, but the world size is {config.parallel.world_size}; "
                f"choose --executor multiproc"
            )
        return config

    @property
    def world_size(self) -> int:
        return 1

    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        del timeout_s
        self._codec.check(method, args)
        if ranks is not None and set(ranks) - {0}:
            raise ConfigError(f"ranks {list(ranks)} do not exist; this executor has rank 0 only")
        if ranks is not None and not ranks:
            return []
        return [self._call(method, *args)]

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        return self._submit("execute", step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]:
        return self._submit("sample", step_id, grammar)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        """The worker dies with this process, so there is nobody left to tell."""
        del callback

    def shutdown(self, timeout_s: float = 10.0) -> None:
        if not self._is_shut_down:
            self._is_shut_down = True
            self._outputs.close(timeout_s)
            self._worker.shutdown()

    def _submit(self, method: str, *args: Any) -> Future[Any]:
        future: Future[Any] = Future()
        try:
            output = self._call(method, *args)
        except (WorkerError, EngineDeadError) as error:
            self._outputs.deliver(partial(future.set_exception, error), waits=False)
            return future
        if not isinstance(output, PendingOutput) and self._outputs.is_idle:
            future.set_result(output)
        elif isinstance(output, PendingOutput):
            self._outputs.deliver(partial(self._wait, method, output, future), waits=True)
        else:
            self._outputs.deliver(partial(future.set_result, output), waits=False)
        return future

    def _call(self, method: str, *args: Any) -> Any:
        if self._is_shut_down:
            raise EngineDeadError("the executor is shut down")
        try:
            return (self._own.get(method) or getattr(self._worker, method))(*args)
        except Exception as error:
            raise self._failed(method, error) from error

    def _wait(self, method: str, output: PendingOutput, future: Future[Any]) -> None:
        try:
            future.set_result(output.result())
        except Exception as error:
            future.set_exception(self._failed(method, error))

    def _failed(self, method: str, error: Exception) -> WorkerError:
        return worker_error(method, {self._rank: RpcFailure.of(error)}, {}, 1)


create = UniprocExecutor
