"""The executor ``multiproc``: one process per rank on this host."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, WorkerError
from hardpoint.interfaces import Deferred, Executor, ExecutorContext, GrammarMask, RunnerOutput, SchedulerOutput, plugin
from hardpoint.ipc import CodecError
from hardpoint.process import LoadReport
from hardpoint_executors.context import require
from hardpoint_executors.group import RankProcess, start_group, stop_ranks
from hardpoint_executors.pending import PendingCalls
from hardpoint_executors.rpc import LOAD_REPORT, RpcCodec

__all__ = ["MultiprocExecutor", "MultiprocOptions", "create"]

_GRACE_AFTER_FAILURE_S = 1.0
_REPORT_S = 5.0
"""A worker that is this late with its report hangs; the engine must not hang with it for long."""

_LONGEST_S = 1_000_000.0
"""Waits of the system end at some number of milliseconds; nobody means longer ones."""

_DEATH_SHOWS_S = 0.5
"""Ranks fail when a peer dies, and say so before its process is gone for good: then the death is what to tell."""


class MultiprocOptions(BaseModel):
    """Options under ``plugins.executor.multiproc``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_timeout_s: float = Field(
        default=120.0,
        gt=0,
        le=_LONGEST_S,
        description="seconds in which every worker process must have built its worker, weights not yet",
    )
    max_ranks: int = Field(
        default=16, ge=1, description="most worker processes to start; a mistyped size must not bury the host"
    )


@plugin("executor", options=MultiprocOptions)
class MultiprocExecutor(Executor):
    """Sends each call to all ranks through one ring, in order; a reader thread per rank completes the futures."""

    def __init__(self, ctx: ExecutorContext, options: MultiprocOptions) -> None:
        """Raises what a worker raises while starting: ``PluginMismatchError`` for other plugins than the plan's.

        ``ConfigError`` for more ranks than ``options`` allow, before any is started.
        """
        _, config = require(ctx)
        if config.parallel.world_size > options.max_ranks:
            raise ConfigError(
                f"{config.parallel.world_size} worker processes were asked for, and at most {options.max_ranks} are "
                "started: lower --tensor-parallel-size, or raise plugins.executor.multiproc.max_ranks"
            )
        self._group = group = start_group(ctx, options.start_timeout_s)
        self._output_rank = frozenset({config.parallel.output_rank})
        self._ranks = ranks = group.ranks
        self._all = frozenset(range(len(ranks)))
        self._codec = RpcCodec()
        self._pending = PendingCalls(self._codec, len(ranks))
        self._is_shut_down = False
        self._readers = [
            threading.Thread(target=self._read, args=(entry,), name=f"replies-{entry.rank}", daemon=True)
            for entry in ranks
        ]
        for reader in self._readers:
            reader.start()

    @property
    def world_size(self) -> int:
        return len(self._ranks)

    @property
    def pids(self) -> tuple[int, ...]:
        """Process ids in rank order."""
        return tuple(entry.process.pid for entry in self._ranks)

    def load_reports(self) -> Sequence[LoadReport]:
        return self.collective_rpc(LOAD_REPORT, timeout_s=_REPORT_S)

    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        asked = self._all if ranks is None else frozenset(ranks)
        if asked - self._all:
            raise ConfigError(f"ranks {sorted(asked - self._all)} do not exist; allowed: 0 to {self.world_size - 1}")
        if not asked:
            self._codec.check(method, args)
            return []
        call_id, future = self._send(method, args, ranks=asked, answering=asked)
        try:
            results: list[Any] = future.result(timeout_s)
        except TimeoutError:
            silent = sorted(self._pending.withdraw(call_id))
            if future.done():
                return list(future.result())
            raise WorkerError(
                f"{method} took longer than {timeout_s:g} s on worker ranks {silent}",
                rank=silent[0],
                kind="TimeoutError",
            ) from None
        return results

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        return self._submit("execute", step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]:
        return self._submit("sample", step_id, grammar)

    def on_failure(self, callback: Callable[[str], None]) -> None:
        self._pending.on_failure(callback)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        if self._is_shut_down:
            return
        self._is_shut_down = True
        failed = self._pending.failure_reason is not None
        with contextlib.suppress(TimeoutError):
            self._group.calls.send(self._codec.encode_call(0, "shutdown", reply_ranks=()), timeout_s)
        stop_ranks(self._ranks, min(timeout_s, _GRACE_AFTER_FAILURE_S) if failed else timeout_s)
        self._pending.fail("the executor is shut down", tell=False)
        for reader in self._readers:
            if reader is not threading.current_thread():
                reader.join()
        self._group.close()

    def _submit(self, method: str, *args: Any) -> Future[Any]:
        """Every rank works, the output rank answers (R4.8)."""
        return self._send(method, args, answering=self._output_rank, unwrap=True)[1]

    def _send(
        self,
        method: str,
        args: tuple[Any, ...],
        *,
        ranks: frozenset[int] | None = None,
        answering: frozenset[int],
        unwrap: bool = False,
    ) -> tuple[int, Future[Any]]:
        self._codec.check(method, args)
        call_id, future = self._pending.open(method, answering, unwrap=unwrap)
        if future.done():
            return call_id, future
        to = None if ranks is None else tuple(sorted(ranks))
        try:
            frame = self._codec.encode_call(call_id, method, args, ranks=to, reply_ranks=tuple(sorted(answering)))
            self._group.calls.send(frame)
        except CodecError:
            self._pending.withdraw(call_id)
            raise
        return call_id, future

    def _read(self, entry: RankProcess) -> None:
        try:
            while (frame := entry.channel.receive()) is not None:
                reply = self._codec.decode_reply(frame)
                if reply.failure is not None and self.world_size > 1:
                    self._pending.wait_failed(_DEATH_SHOWS_S)
                self._pending.answer(entry.rank, reply)
        except CodecError as error:
            self._pending.fail(f"{entry.label} sent an unreadable answer: {error}")
        if not self._is_shut_down:
            self._pending.fail(entry.end_of_process())


create = MultiprocExecutor
