"""The fake worker as a plugin, with faults on demand: for executors and supervisors under test."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from typing import Any

import msgspec

from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import WorkerContext
from hardpoint.testing.fake_worker import FakeWorker

__all__ = ["FAULTS", "Fault", "FaultyWorker", "create"]

FAULTS = "faults"
"""Key of ``WorkerConfig.extensions`` under which a list of :class:`Fault` as plain data is found."""


class Fault(msgspec.Struct, frozen=True):
    """What happens in ``method`` on ``ranks`` (None: all): ``raise``, ``exit`` (at once, with code 3) or ``hang``.

    ``after`` is the number of calls that still succeed. The method ``create`` is the factory itself.
    """

    method: str
    action: str
    ranks: tuple[int, ...] | None = None
    after: int = 0


class FaultyWorker(FakeWorker):
    """Counts its calls by method in :attr:`calls` and misbehaves as told."""

    def __init__(self, rank: int, faults: list[Fault], *, block_size: int, deferred: bool) -> None:
        super().__init__(block_size=block_size, deferred=deferred)
        self.rank = rank
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

    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred:
        self._meet("execute")
        return super().execute(step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput:
        self._meet("sample")
        return super().sample(step_id, grammar)

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
    """Faults come from the worker configuration's extensions, ``deferred`` from its extension of that name."""
    del options
    if ctx.config is None:
        raise ValueError("a worker needs its configuration")
    faults = msgspec.convert(ctx.config.extensions.get(FAULTS, []), list[Fault])
    deferred = bool(ctx.config.extensions.get("deferred", False))
    return FaultyWorker(ctx.config.parallel.rank, faults, block_size=ctx.config.block_size, deferred=deferred)
