"""Plugin kind ``executor``: carries one step to every worker and brings the result back."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, ClassVar

from hardpoint.errors import ConfigError
from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import WorkerConfig
from hardpoint.plugins.report import LoadReport


@dataclass(frozen=True, slots=True)
class ExecutorContext(PluginContext):
    """``plan`` is the encoded plugin plan that child processes boot from; ``worker`` the ``worker`` plugin's name;
    ``runtime_dir`` a private 0700 folder for sockets and the like."""

    worker: str = ""
    config: WorkerConfig | None = None
    plan: bytes = b""
    runtime_dir: str = ""
    worker_options: dict[str, Any] = field(default_factory=dict)


class Executor(ABC):
    """One mandatory primitive, :meth:`collective_rpc`; everything else rests on it. Used from one thread."""

    uses_actor_framework: ClassVar[bool] = False
    supports_pipeline_parallel: ClassVar[bool] = False
    _supported_tasks: tuple[str, ...] | None = None

    @abstractmethod
    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        """Call a method of ``WORKER_RPC`` on all (or the given) ranks; results in rank order.

        Raises ``WorkerError`` with rank and original traceback, ``ConfigError`` for an unregistered method,
        ``EngineDeadError`` when a worker is gone.
        """

    @abstractmethod
    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        """Submit a step without waiting. Futures complete in submission order."""

    @abstractmethod
    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]: ...

    @abstractmethod
    def on_failure(self, callback: Callable[[str], None]) -> None:
        """``callback(reason)`` runs once, on any thread, when a worker dies."""

    @abstractmethod
    def shutdown(self, timeout_s: float = 10.0) -> None:
        """Stop all workers and wait; idempotent; leaves no process."""

    @property
    @abstractmethod
    def world_size(self) -> int: ...

    def load_reports(self) -> Sequence[LoadReport]:
        """What each worker process says of its plugins now, in rank order; empty when workers live in this process.

        Raises ``EngineDeadError`` when a worker is gone.
        """
        return ()

    def kv_cache_specs(self) -> list[LayerSpec]:
        """Specs of all ranks by layer. Raises ``ConfigError`` when two ranks describe one layer differently."""
        seen: dict[str, LayerSpec] = {}
        for specs in self.collective_rpc("kv_cache_specs"):
            for layer in specs:
                if seen.setdefault(layer.layer_name, layer) != layer:
                    raise ConfigError(f"ranks disagree on the KV cache of {layer.layer_name}; use equal devices")
        return list(seen.values())

    def kv_cache_budget(self) -> int:
        """Bytes the tightest rank can give."""
        return min(int(budget) for budget in self.collective_rpc("kv_cache_budget"))

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.collective_rpc("initialize_kv_cache", config)

    def supported_tasks(self) -> tuple[str, ...]:
        """Fixed for a loaded model, so asked once (R4.11)."""
        if self._supported_tasks is None:
            self._supported_tasks = tuple(self.collective_rpc("supported_tasks", ranks=[0])[0])
        return self._supported_tasks
