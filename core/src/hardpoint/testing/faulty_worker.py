"""The fake worker as a plugin, with faults on demand: for executors and supervisors under test."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import PendingOutput, WorkerContext
from hardpoint.testing.fake_worker import FakeWorker

__all__ = ["FAULTS", "Fault", "FaultyWorker", "create"]

FAULTS = "faults"
"""Key of ``WorkerConfig.extensions`` under which a list of :class:`Fault` as plain data is found."""

_DEVICE_SECONDS = 0.002


class Fault(msgspec.Struct, frozen=True):
    """What happens in ``method`` on ``ranks`` (None: all): ``raise``, ``exit`` (at once, with code 3) or ``hang``.

    ``after`` is the number of calls that still succeed. The method ``create`` is the factory itself.
    """

    method: str
    action: str
    ranks: tuple[int, ...] | None = None
    after: int = 0


class SlowOutput(PendingOutput):
    """A result that is there a little later, or an error instead of it."""

    def __init__(self, output: RunnerOutput, check: Callable[[], None]) -> None:
        self._output = output
        self._check = check

    def result(self) -> RunnerOutput:
        time.sleep(_DEVICE_SECONDS)
        self._check()
        return self._output


class FaultyWorker(FakeWorker):
    """Counts its calls by method in :attr:`calls` and misbehaves as told.

    ``pending`` hands out results before they are there; their faults are those of the method ``result``.
    """

    def __init__(
        self, rank: int, faults: list[Fault], *, block_size: int, deferred: bool = False, pending: bool = False
    ) -> None:
        super().__init__(block_size=block_size, deferred=deferred)
        self.rank = rank
        self.pending = pending
        self.calls: dict[str, int] = {}
        self._faults = [fault for fault in faults if fault.ranks is None or rank in fault.ranks]
        self._meet("create")

    def init_device(self) -> None:
        self._meet("init_device")

    def load_model(self) -> None:
        self._meet("load_model")

    def warm_up(self) -> None:
        self._meet("warm_up")

    def check_health(self) -> None:
        self._meet("check_health")

    def kv_cache_specs(self) -> list[LayerSpec]:
        self._meet("kv_cache_specs")
        return super().kv_cache_specs()

    def kv_cache_budget(self) -> int:
        """Another value on each rank, so that the order of results shows."""
        self._meet("kv_cache_budget")
        return super().kv_cache_budget() + self.rank

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self._meet("initialize_kv_cache")
        super().initialize_kv_cache(config)

    def supported_tasks(self) -> list[str]:
        """Reveals how often it was asked."""
        self._meet("supported_tasks")
        return ["generate", f"call-{self.calls['supported_tasks']}"]

    # Wider than the fake worker's own results, as the contract of workers allows.
    def execute(  # type: ignore[override]
        self, step: SchedulerOutput
    ) -> RunnerOutput | Deferred | PendingOutput:
        self._meet("execute")
        return self._handed_out(super().execute(step))

    def sample(  # type: ignore[override]
        self, step_id: int, grammar: GrammarMask | None
    ) -> RunnerOutput | PendingOutput:
        self._meet("sample")
        output = super().sample(step_id, grammar)
        return SlowOutput(output, self._meet_result) if self.pending else output

    def _handed_out(self, output: RunnerOutput | Deferred) -> RunnerOutput | Deferred | PendingOutput:
        return SlowOutput(output, self._meet_result) if self.pending and isinstance(output, RunnerOutput) else output

    def _meet_result(self) -> None:
        self._meet("result")

    def shutdown(self) -> None:
        self._meet("shutdown")
        super().shutdown()

    def _meet(self, method: str) -> None:
        self.calls[method] = self.calls.get(method, 0) + 1
        for fault in self._faults:
            if fault.method == method and self.calls[method] > fault.after:
                _ACTIONS[fault.action](f"rank {self.rank} fails in {method} as told")


def _raise(message: str) -> None:
    raise ValueError(message)


def _exit(message: str) -> None:
    os._exit(3)


def _hang(message: str) -> None:
    threading.Event().wait()


_ACTIONS: dict[str, Callable[[str], None]] = {"raise": _raise, "exit": _exit, "hang": _hang}


@plugin("worker", options=NoOptions)
def create(ctx: WorkerContext, options: Any) -> FaultyWorker:
    """Faults come from the worker configuration's extensions, ``deferred`` and ``pending`` from those of that name."""
    del options
    if ctx.config is None:
        raise ValueError("a worker needs its configuration")
    faults = msgspec.convert(ctx.config.extensions.get(FAULTS, []), list[Fault])
    switches = {name: bool(ctx.config.extensions.get(name, False)) for name in ("deferred", "pending")}
    return FaultyWorker(ctx.config.parallel.rank, faults, block_size=ctx.config.block_size, **switches)
