"""The base of platforms for graphics processors that the framework reaches as one and the same kind of device."""

from __future__ import annotations

import os
import sys
from abc import abstractmethod
from collections.abc import Mapping, Sequence
from copy import copy
from typing import TYPE_CHECKING, Any, ClassVar

from hardpoint.errors import ConfigError
from hardpoint.interfaces.devices import DeviceMap, LogicalDevice, PhysicalDevice, VisibleDevice
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, Platform, ThreadPlan
from hardpoint_gpu import memory
from hardpoint_gpu.described import DescribedDevices, facts_of
from hardpoint_gpu.examination import link_table, visible_devices
from hardpoint_gpu.inventory import DeviceLibrary, GpuFacts, Inventory, LibraryFault, LibraryMissing
from hardpoint_gpu.settings import GpuOptions, fill_settings

if TYPE_CHECKING:
    import torch

__all__ = ["THREADS_VARIABLE", "GpuPlatform"]

THREADS_VARIABLE = "OMP_NUM_THREADS"
_FRAMEWORK = "torch"


class GpuPlatform(Platform):
    """Asks ``library`` for everything that needs no process bound to a device. Both it and ``environment`` (by default
    the process's own) can be fabricated.

    Attributes:
        architecture_prefix: what names of the devices' architectures begin with.
        example: a device of this kind as people describe one.
        devices: ids of the devices under the masks that were set when the platform was made.
        bound: the visible ordinal that :meth:`init_worker` bound this process to, or None.
    """

    device_type: ClassVar[str] = "cuda"
    dispatch_key: ClassVar[str] = "CUDA"
    cluster_resource_key: ClassVar[str] = "GPU"
    collective_backend: ClassVar[str] = "nccl"
    architecture_prefix: ClassVar[str] = "sm_"
    example: ClassVar[str] = "cuda sm_90 80GiB"
    kernel_candidates: ClassVar[Mapping[str, Sequence[str]]] = {
        seam: (f"triton_{seam}",)
        for seam in ("silu_and_mul", "rms_norm", "add_rms_norm", "rotary_embedding", "top_k_top_p")
    }

    def __init__(
        self, options: GpuOptions, library: DeviceLibrary, environment: Mapping[str, str] | None = None
    ) -> None:
        self.options = options
        self.library = library
        # Before the map, which may ask for it.
        self._inventory: Inventory | None = None
        self.devices: DeviceMap = self.device_map(os.environ if environment is None else environment)
        self.bound: VisibleDevice | None = None

    def device_map(self, environment: Mapping[str, str], assigned: Sequence[PhysicalDevice] | None = None) -> DeviceMap:
        return DeviceMap(self.visibility_variable, environment, assigned, self._number_of)

    def inventory(self) -> Inventory:
        """All devices of the host, asked for once. Raises ``ConfigError`` where nobody can tell."""
        if self._inventory is None:
            try:
                self._inventory = self.library.inventory()
            except (LibraryMissing, LibraryFault) as error:
                raise ConfigError(f"the devices of platform {self.name!r} cannot be asked: {error}") from error
        return self._inventory

    def facts(self, device: LogicalDevice) -> GpuFacts:
        """Raises ``ConfigError`` for a device that is masked or does not exist."""
        return self.inventory().device(self.devices.logical_to_physical(device))

    def describe(self, device: LogicalDevice) -> DeviceDescription:
        """Raises ``ConfigError`` as :meth:`facts` does."""
        found = self.facts(device)
        return DeviceDescription(
            device_type=self.device_type,
            name=found.name,
            capability=found.capability,
            memory_bytes=found.memory_bytes,
            features=self.features(found),
        )

    def with_device(self, device: DeviceDescription, count: int) -> GpuPlatform:
        """This platform on a host that has ``count`` such devices and no others, for decisions about what is not here.

        Raises ``ConfigError`` for a description without architecture or memory.
        """
        made = copy(self)
        form = {"architecture_prefix": self.architecture_prefix, "example": self.example}
        made.library = DescribedDevices(tuple(facts_of(device, number, **form) for number in range(count)))
        made._inventory = None
        made.devices = made.device_map({})
        return made

    @abstractmethod
    def features(self, device: GpuFacts) -> frozenset[str]:
        """What kernels may ask for by name; the architecture is among them."""

    def quantization(self, device: GpuFacts) -> Sequence[str]:
        """The usual ``quantization`` plugins that the device has the arithmetic for, by name; others may be tried."""
        del device
        return ()

    @abstractmethod
    def attention_priorities(self, device: GpuFacts | None) -> Sequence[str]:
        """Names of attention backends for a device, or for any where none can be asked; the best first."""

    def check_and_update(self, settings: EngineSettings) -> None:
        fill_settings(settings, self.options, self._visible(), self.name)

    def thread_plan(self, world_size: int, environment: Mapping[str, str]) -> ThreadPlan:
        """The device computes; the host prepares steps and reads weights. ``OMP_NUM_THREADS`` overrides the count."""
        given = environment.get(THREADS_VARIABLE, "").split(",")[0].strip()
        if given:
            if not given.isdecimal() or int(given) < 1:
                raise ConfigError(f"{THREADS_VARIABLE}={given!r} is not a positive number; unset it or set it to one")
            return ThreadPlan(compute_threads=int(given))
        share = len(os.sched_getaffinity(0)) // max(1, world_size)
        return ThreadPlan(compute_threads=max(1, min(self.options.host_threads, share)))

    def attention_candidates(self) -> Sequence[str]:
        if self.options.attention_backends is not None:
            return self.options.attention_backends
        devices = self._visible()
        return self.attention_priorities(devices[0] if devices else None)

    def memory_budget(self, device: LogicalDevice) -> int:
        total = self.facts(device).memory_bytes
        return memory.budget(total, self.options.memory_fraction, self.options.reserve_bytes)

    def memory_used(self, device: LogicalDevice) -> int:
        """By all processes together, this one at its worst so far."""
        number = self.facts(device).number
        try:
            reading = self.library.memory(number)
        except (LibraryMissing, LibraryFault) as error:
            raise ConfigError(f"the memory of device {number} cannot be asked: {error}") from error
        if self.bound is None:
            return reading.used
        namespace = self._namespace()
        return memory.used(
            reading.used, namespace.memory_reserved(self.bound), namespace.max_memory_reserved(self.bound)
        )

    def init_worker(self, device: LogicalDevice, threads: ThreadPlan) -> torch.device:
        """Raises ``ConfigError`` where the framework cannot use the device, ``RuntimeError`` when this process is bound
        to another one."""
        import torch

        ordinal = self.devices.logical_to_visible(device)
        if self.bound not in (None, ordinal):
            raise RuntimeError(f"this process is bound to device {self.bound}, not {ordinal}; start another one for it")
        namespace = self._namespace()
        if not namespace.is_available():
            raise ConfigError(
                f"torch {torch.__version__} reaches no {self.name} device; see `hardpoint plugins doctor platform`"
            )
        if ordinal >= namespace.device_count():
            raise ConfigError(
                f"torch sees {namespace.device_count()} devices, and rank {device} needs ordinal {ordinal}; "
                f"{self.visibility_variable} was changed after the start, or this device cannot be used"
            )
        torch.set_num_threads(threads.compute_threads)
        namespace.set_device(ordinal)
        self.bound = ordinal
        return torch.device(self.device_type, ordinal)

    def synchronize(self, device: LogicalDevice) -> None:
        if self.bound is not None:
            self._namespace().synchronize(self.devices.logical_to_visible(device))

    @classmethod
    def create_graph_pool(cls) -> Any:
        """Raises ``TypeError`` where the framework captures no graphs."""
        namespace = cls._namespace() if _FRAMEWORK in sys.modules else None
        if namespace is None or not callable(getattr(namespace, "is_available", None)) or not namespace.is_available():
            raise TypeError(f"platform {cls.name!r} captures no graphs: torch reaches no such device in this process")
        return namespace.graph_pool_handle()

    def capabilities(self) -> Mapping[str, Any]:
        try:
            found = self.inventory()
            links = self.library.links()
        except (ConfigError, LibraryMissing, LibraryFault) as error:
            return {"fault": str(error)}
        return {
            "library": found.library,
            "driver_version": found.driver_version,
            "devices": [f"{one.number}: {one.name} ({one.architecture})" for one in found.devices],
            "quantization": {str(one.number): list(self.quantization(one)) for one in found.devices},
            "numa_nodes": {str(one.number): one.numa_node for one in found.devices},
            "links": link_table(links),
        }

    def _visible(self) -> tuple[GpuFacts, ...]:
        """The devices of this process, or none where nobody can tell; a mask that is wrong is told all the same."""
        try:
            found = self.inventory()
        except ConfigError:
            return ()
        return visible_devices(found, self.devices)

    def _number_of(self, text: str) -> int:
        try:
            return self.inventory().number_of(text)
        except ConfigError as error:
            raise LookupError(str(error)) from error

    @classmethod
    def _namespace(cls) -> Any:
        """The framework's functions for the device; the only way from here to it."""
        if _FRAMEWORK not in sys.modules:
            import torch  # noqa: F401 (looked up below, where a stand-in may lie)
        return getattr(sys.modules[_FRAMEWORK], cls.device_type)
