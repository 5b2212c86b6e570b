"""Plugin kind ``platform``: the only place that talks to hardware.

A platform is created once per process from the launcher's choice. Nothing here may initialize a device except
:meth:`Platform.init_worker`.
"""

from __future__ import annotations

import enum
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, NewType

import msgspec

if TYPE_CHECKING:
    import torch

LogicalDevice = NewType("LogicalDevice", int)
VisibleDevice = NewType("VisibleDevice", int)
PhysicalDevice = NewType("PhysicalDevice", int)


class PlatformKind(enum.StrEnum):
    CPU = "cpu"
    CUDA = "cuda"
    ROCM = "rocm"
    OUT_OF_TREE = "out_of_tree"


class ThreadPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Sizes of every thread pool on this host; the one place that decides. Counts of threads.

    ``cores`` are the core ids compute threads may run on; empty means unpinned.
    """

    compute_threads: int
    api_threads: int = 1
    cores: tuple[int, ...] = ()


class DeviceDescription(msgspec.Struct, frozen=True, kw_only=True):
    """Facts for capability decisions; can be fabricated. ``capability`` is (major, minor) or None (CPU)."""

    device_type: str
    name: str
    capability: tuple[int, int] | None = None
    memory_bytes: int = 0
    features: frozenset[str] = frozenset()


class EngineSettings(msgspec.Struct, kw_only=True):
    """The part of the configuration a platform may edit in :meth:`Platform.check_and_update`. Unset means None.

    ``worker`` must be set afterwards: the plugin name of kind ``worker``. ``architecture`` and ``model`` (the
    architecture's fields) are for reading.
    """

    worker: str | None = None
    executor: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    attention_backend: str | None = None
    world_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    architecture: str = ""
    model: dict[str, Any] = {}


class Platform(ABC):
    """Attributes have the defaults of spec 12 §3; override what differs."""

    kind: ClassVar[PlatformKind] = PlatformKind.OUT_OF_TREE
    name: ClassVar[str] = ""
    device_type: ClassVar[str] = "cpu"
    dispatch_key: ClassVar[str] = "CPU"
    cluster_resource_key: ClassVar[str] = ""
    visibility_variable: ClassVar[str] = ""
    simple_compile_backend: ClassVar[str] = "inductor"
    collective_backend: ClassVar[str] = ""
    supported_quantization: ClassVar[Sequence[str]] = ()
    extra_environment: ClassVar[Sequence[str]] = ()

    @abstractmethod
    def describe(self, device: LogicalDevice) -> DeviceDescription: ...

    @abstractmethod
    def check_and_update(self, settings: EngineSettings) -> None:
        """Fill unset settings, refuse impossible ones (``ConfigError``). Must leave ``settings.worker`` set."""

    @abstractmethod
    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan: ...

    @abstractmethod
    def attention_candidates(self) -> Sequence[str]:
        """Names of ``attention_backend`` plugins in order of preference."""

    @abstractmethod
    def memory_budget(self, device: LogicalDevice) -> int:
        """Bytes that may be used on the device in total, by the operator's limits."""

    @abstractmethod
    def memory_used(self, device: LogicalDevice) -> int:
        """Bytes in use now by this process (and others sharing the device)."""

    @abstractmethod
    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        """Bind this process to the device; the only method that may initialize it."""

    def synchronize(self, device: LogicalDevice) -> None:
        """Wait for queued work; nothing to do where work is synchronous."""
        del device

    def capabilities(self) -> Mapping[str, Any]:
        """Open keys for diagnosis."""
        return {}
