"""Plugin kind ``worker``: one rank's share of the model. Driven by an executor, possibly in another process.

Only the methods in :data:`WORKER_RPC` can be called remotely; arguments and results are typed msgpack.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import msgspec

from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, SchedulerOutput


class ParallelSlice(msgspec.Struct, frozen=True, kw_only=True):
    """This rank's place in a grid whose inner axis is tensor parallelism, the outer one the pipeline.

    ``init_method`` is the rendezvous address of collectives, unused for world size 1. ``devices`` are the logical
    devices by local rank; empty means the local rank itself.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    init_method: str | None = None
    data_parallel_size: int = 1
    data_parallel_rank: int = 0
    devices: tuple[int, ...] = ()

    @property
    def output_rank(self) -> int:
        """The rank that samples: the first one of the last pipeline stage."""
        return (self.pipeline_parallel_size - 1) * self.tensor_parallel_size

    @property
    def device(self) -> int:
        """Logical device of this rank."""
        return self.devices[self.local_rank] if self.devices else self.local_rank


class WorkerConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a worker needs to know, equal on all ranks but for ``parallel``."""

    model: ModelInfo
    dtype: str
    kv_cache_dtype: str
    block_size: int
    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int
    threads: ThreadPlan
    parallel: ParallelSlice = ParallelSlice()
    attention_backend: str | None = None
    quantization: str | None = None
    compiler: str | None = None
    kv_cache_bytes: int | None = None
    batch_invariant: bool = False
    show_progress: bool = True
    seed: int = 0
    extensions: dict[str, Any] = {}


@dataclass(frozen=True, slots=True)
class WorkerContext(PluginContext):
    """Context of every kind created inside a worker. ``device`` is the framework's device object, once bound."""

    config: WorkerConfig | None = None
    device: Any = None
    attributes: Mapping[str, Any] = field(default_factory=dict)


class PendingOutput(ABC):
    """A submitted step whose results are still on the device: the next step can be submitted meanwhile."""

    @abstractmethod
    def result(self) -> RunnerOutput:
        """Wait and return; called once, on any thread."""


class Worker(ABC):
    """Call order: init_device, load_model, kv_cache_specs, kv_cache_budget, initialize_kv_cache, then steps."""

    @abstractmethod
    def init_device(self) -> None: ...

    @abstractmethod
    def load_model(self) -> None:
        """Raises the model errors of ``hardpoint.errors``."""

    @abstractmethod
    def kv_cache_specs(self) -> list[LayerSpec]:
        """One entry per layer that keeps KV, in model order."""

    @abstractmethod
    def kv_cache_budget(self) -> int:
        """Bytes available for KV after weights and a profiled forward."""

    @abstractmethod
    def initialize_kv_cache(self, config: KVCacheConfig) -> None: ...

    @abstractmethod
    def warm_up(self) -> None:
        """Run what would otherwise slow the first request."""

    @abstractmethod
    def execute(self, step: SchedulerOutput) -> RunnerOutput | Deferred | PendingOutput:
        """Update state and run the forward. A second call while a deferred step is pending raises ``RuntimeError``."""

    @abstractmethod
    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        """Finish a deferred step; raises ``RuntimeError`` when none with that id is pending."""

    @abstractmethod
    def supported_tasks(self) -> list[str]: ...

    @abstractmethod
    def check_health(self) -> None:
        """Raise if the device is unusable."""

    @abstractmethod
    def shutdown(self) -> None: ...


class RpcMethod(msgspec.Struct, frozen=True):
    """Signature of a remote method: argument types in order and the result type."""

    arguments: tuple[Any, ...]
    result: Any


WORKER_RPC: Mapping[str, RpcMethod] = {
    **dict.fromkeys(("init_device", "load_model", "warm_up", "check_health", "shutdown"), RpcMethod((), None)),
    "kv_cache_specs": RpcMethod((), list[LayerSpec]),
    "kv_cache_budget": RpcMethod((), int),
    "initialize_kv_cache": RpcMethod((KVCacheConfig,), None),
    "execute": RpcMethod((SchedulerOutput,), RunnerOutput | Deferred),
    "sample": RpcMethod((int, GrammarMask | None), RunnerOutput),
    "supported_tasks": RpcMethod((), list[str]),
}
