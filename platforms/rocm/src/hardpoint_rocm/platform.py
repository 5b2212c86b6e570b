"""The ROCm platform. Importing it, probing it and asking it need neither torch nor a device."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import ClassVar

from hardpoint.errors import ConfigError
from hardpoint.interfaces.devices import DeviceMap, PhysicalDevice
from hardpoint.interfaces.platform import PlatformKind
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, plugin
from hardpoint_gpu.examination import Surroundings, Vendor, examine
from hardpoint_gpu.framework import FrameworkBuild
from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import DeviceLibrary, GpuFacts, Inventory, LibraryMissing, Link, MemoryReading
from hardpoint_gpu.masks import first_set, physical_numbers
from hardpoint_gpu.platform import GpuPlatform
from hardpoint_gpu.settings import GpuOptions
from hardpoint_rocm.amdsmi_library import AmdSmiLibrary
from hardpoint_rocm.capabilities import attention_priorities, features, supported_quantization
from hardpoint_rocm.kfd import KfdTree

__all__ = ["AmdDevices", "RocmOptions", "RocmPlatform", "create", "examine_rocm", "probe"]

MASK = "HIP_VISIBLE_DEVICES"
OTHER_MASK = "CUDA_VISIBLE_DEVICES"
LOWER_MASK = "ROCR_VISIBLE_DEVICES"
_OLDEST = ("gfx600", "gfx601", "gfx602", "gfx700", "gfx701", "gfx702", "gfx703", "gfx704", "gfx705", "gfx801",
           "gfx802", "gfx803", "gfx805", "gfx810")  # fmt: skip

VENDOR = Vendor(
    maker="AMD",
    pci_id="0x1002",
    module="/sys/class/kfd/kfd/topology/nodes",
    kernel_driver="amdgpu",
    control_nodes=("/dev/kfd",),
    masks=(MASK, OTHER_MASK, LOWER_MASK),
    advice_container="in a container, give it the devices (docker: --device /dev/kfd --device /dev/dri)",
    advice_nodes="add this user to the groups `render` and `video` (docker: --group-add render --group-add video)",
    advice_framework="install a build with ROCm: pip install torch --index-url "
    "https://download.pytorch.org/whl/rocm6.4",
)


class RocmOptions(GpuOptions):
    """Options under ``plugins.platform.rocm``."""


@dataclass(frozen=True, slots=True)
class AmdDevices:
    """The management library where it is installed, else the kernel's files, which tell almost the same."""

    library: DeviceLibrary = field(default_factory=AmdSmiLibrary)
    tree: DeviceLibrary = field(default_factory=KfdTree)

    def inventory(self) -> Inventory:
        return self._chosen().inventory()

    def memory(self, number: int) -> MemoryReading:
        return self._chosen().memory(number)

    def links(self) -> tuple[Link, ...]:
        return self._chosen().links()

    def _chosen(self) -> DeviceLibrary:
        # The files first: without the driver nothing needs to be loaded, and the library's own complaint is of no help.
        nodes = self.tree.inventory()
        try:
            # In a container the library lists what the host has, the files what this process may use.
            return self.library if len(self.library.inventory().devices) == len(nodes.devices) else self.tree
        except LibraryMissing:
            return self.tree


def examine_rocm(
    library: DeviceLibrary, host: Host, build: FrameworkBuild | None, environment: Mapping[str, str]
) -> ProbeResult:
    """The probe, over whatever it is handed."""
    around = Surroundings(
        library=library,
        environment=environment,
        device_map=partial(_device_map, library),
        build=build,
        runtime_fault=runtime_fault,
        further_faults=further_faults,
        host=host,
        elsewhere=f"torch {build.version} is built for CUDA" if build is not None and build.cuda is not None else None,
    )
    return examine(VENDOR, around)


def probe() -> ProbeResult:
    """Asks AMD SMI or the kernel's files; no context is created and nothing stays open."""
    return examine_rocm(AmdDevices(), Host(), FrameworkBuild.installed(), os.environ)


def runtime_fault(build: FrameworkBuild, inventory: Inventory) -> str | None:
    """Why ``build`` does not run here. Drivers of ROCm state no newest runtime."""
    del inventory
    if build.hip is None:
        return f"torch {build.version} is built without ROCm; {VENDOR.advice_framework}"
    return None


def further_faults(devices: Sequence[GpuFacts]) -> str | None:
    """Devices for which no version of the runtime in use has kernels."""
    for one in devices:
        if one.architecture in _OLDEST:
            return (
                f"device {one.number} ({one.name}) is of architecture {one.architecture}, which ROCm no longer "
                f"supports; mask it with {MASK}"
            )
    return None


class RocmPlatform(GpuPlatform):
    """Devices of AMD; ``library`` and ``environment`` can be fabricated. The framework calls them by CUDA's names."""

    kind: ClassVar[PlatformKind] = PlatformKind.ROCM
    name: ClassVar[str] = "rocm"
    architecture_prefix: ClassVar[str] = "gfx"
    example: ClassVar[str] = "rocm gfx942 192GiB"
    visibility_variable: ClassVar[str] = MASK
    mask_suppressing_variables: ClassVar[Sequence[str]] = ("RAY_EXPERIMENTAL_NOSET_HIP_VISIBLE_DEVICES",)
    extra_environment: ClassVar[Sequence[str]] = (LOWER_MASK, OTHER_MASK, "HSA_OVERRIDE_GFX_VERSION", "LD_LIBRARY_PATH")

    def __init__(
        self,
        options: RocmOptions | None = None,
        library: DeviceLibrary | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(options or RocmOptions(), library or AmdDevices(), environment)

    def device_map(self, environment: Mapping[str, str], assigned: Sequence[PhysicalDevice] | None = None) -> DeviceMap:
        """HIP's mask, or CUDA's in its place. ROCr's mask comes before either, whose numbers then count what is left.

        Raises ``ConfigError`` for masks that contradict each other.
        """
        value, below = first_set(environment, (MASK, OTHER_MASK)) or "", environment.get(LOWER_MASK, "").strip()
        if below:
            try:
                value = physical_numbers(value, below, self._number_of)
            except (ValueError, LookupError) as error:
                raise ConfigError(f"{MASK}={value!r} after {LOWER_MASK}={below!r}: {error}") from error
        return DeviceMap(MASK, {MASK: value}, assigned, self._number_of)

    def features(self, device: GpuFacts) -> frozenset[str]:
        return features(device.architecture)

    def quantization(self, device: GpuFacts) -> Sequence[str]:
        return supported_quantization(device.architecture)

    def attention_priorities(self, device: GpuFacts | None) -> Sequence[str]:
        return attention_priorities("" if device is None else device.architecture)


def _device_map(library: DeviceLibrary, environment: Mapping[str, str]) -> DeviceMap:
    return RocmPlatform(library=library, environment={}).device_map(environment)


@plugin("platform", options=RocmOptions, probe=probe)
def create(ctx: PluginContext, options: RocmOptions) -> RocmPlatform:
    """Entry point ``hardpoint.platform.v1`` ``rocm``."""
    del ctx
    return RocmPlatform(options)
