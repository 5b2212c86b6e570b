"""Plugin kind ``platform``: the only place that talks to hardware.

A platform is created once per process from the launcher's choice. Nothing here may initialize a device except
:meth:`Platform.init_worker`.
"""

from __future__ import annotations

import enum
import os
import sys
import threading
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import msgspec

from hardpoint.interfaces.devices import DeviceMap, PhysicalDevice
from hardpoint.interfaces.devices import LogicalDevice as LogicalDevice

if TYPE_CHECKING:
    import torch

# Looked up among the loaded modules, never imported: this package works without it.
_FRAMEWORK = "torch"
_POOL_LOCK = threading.RLock()


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
    architecture's fields) are for reading. A platform may leave ``block_size`` unset: the smallest size that its
    attention backends accept is then taken, from ``preferred_block_size`` on (tokens).
    """

    worker: str | None = None
    executor: str | None = None
    dtype: str | None = None
    kv_cache_dtype: str | None = None
    block_size: int | None = None
    preferred_block_size: int | None = None
    attention_backend: str | None = None
    world_size: int = 1
    max_num_seqs: int | None = None
    max_num_batched_tokens: int | None = None
    kv_cache_bytes: int | None = None
    architecture: str = ""
    model: dict[str, Any] = {}


class Platform(ABC):
    """One kind of device. The attributes' defaults hold for a device without specialties; override what differs.

    A name that the platform lacks is looked up in the framework's namespace of :attr:`device_type` (``torch.cuda`` and
    the like), so platforms need not repeat its memory queries. Dunder names never are: copying would call the answer.
    Type checkers do not see such names; fetch them with ``getattr``.

    Attributes:
        name: the device's name in messages.
        device_type: the framework's device string.
        dispatch_key: the framework's operator dispatch key.
        cluster_resource_key: what a cluster scheduler calls the device; empty: nothing.
        visibility_variable: environment variable that masks devices; empty: the platform has none.
        mask_suppressing_variables: environment variables that keep a cluster scheduler from masking devices.
        simple_compile_backend: compiler of the framework for small functions.
        collective_backend: the framework's collective library; empty: none.
        communicator: name of the ``communicator`` plugin to prefer; empty: that of ``collective_backend``.
        supported_quantization: ``quantization`` plugins that may be used; empty: no restriction.
        extra_environment: further environment variables that processes of the platform need.
        kernel_candidates: by seam, ``kernel_override`` plugins to try where the operator names none, the best first.
    """

    kind: ClassVar[PlatformKind] = PlatformKind.OUT_OF_TREE
    name: ClassVar[str] = ""
    device_type: ClassVar[str] = "cpu"
    dispatch_key: ClassVar[str] = "CPU"
    cluster_resource_key: ClassVar[str] = ""
    visibility_variable: ClassVar[str] = ""
    mask_suppressing_variables: ClassVar[Sequence[str]] = ()
    simple_compile_backend: ClassVar[str] = "inductor"
    collective_backend: ClassVar[str] = ""
    communicator: ClassVar[str] = ""
    supported_quantization: ClassVar[Sequence[str]] = ()
    extra_environment: ClassVar[Sequence[str]] = ()
    kernel_candidates: ClassVar[Mapping[str, Sequence[str]]] = {}
    _graph_pool: ClassVar[tuple[int, Any] | None] = None

    if not TYPE_CHECKING:  # Type checkers would let every misspelt name pass.

        def __getattr__(self, name: str) -> Any:
            # Only asked for what is missing here. Names of the class itself must not recurse.
            fault = f"platform {type(self).name!r} has no attribute {name!r}"
            if not (name.startswith("__") and name.endswith("__")):
                framework = sys.modules.get(_FRAMEWORK)
                namespace = getattr(framework, type(self).device_type, None)
                if hasattr(namespace, name):
                    return getattr(namespace, name)
                absent = f", and {_FRAMEWORK}, which might have it, is not loaded in this process"
                fault += absent if framework is None else f", and neither has {_FRAMEWORK}.{type(self).device_type}"
            raise AttributeError(fault, name=name, obj=self)

    @property
    def is_cuda(self) -> bool:
        return self.kind is PlatformKind.CUDA

    @property
    def is_rocm(self) -> bool:
        return self.kind is PlatformKind.ROCM

    @property
    def is_out_of_tree(self) -> bool:
        return self.kind is PlatformKind.OUT_OF_TREE

    @classmethod
    def graph_pool(cls) -> Any:
        """The process's memory pool for captured graphs: made by the first call, shared by all instances.

        A subclass shares it unless it overrides :meth:`create_graph_pool`. Raises ``TypeError`` where the platform
        has no graphs.
        """
        owner: Any = next(base for base in cls.__mro__ if "create_graph_pool" in vars(base))
        with _POOL_LOCK:
            made = vars(owner).get("_graph_pool")
            if made is None or made[0] != os.getpid():  # a forked child has no claim on its parent's
                made = owner._graph_pool = (os.getpid(), cls.create_graph_pool())
            return made[1]

    @classmethod
    def create_graph_pool(cls) -> Any:
        """A new pool; override where graphs can be captured. Raises ``TypeError`` where they cannot."""
        raise TypeError(f"platform {cls.name!r} captures no graphs; it would have to override create_graph_pool")

    def device_map(self, environment: Mapping[str, str], assigned: Sequence[PhysicalDevice] | None = None) -> DeviceMap:
        """Device ids under this platform's visibility variable; override to resolve items that are no numbers."""
        return DeviceMap(self.visibility_variable, environment, assigned)

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

    def capabilities(self) -> Mapping[str, Any]:
        """Open keys for diagnosis."""
        return {}
