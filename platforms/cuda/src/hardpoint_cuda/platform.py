"""The CUDA platform. Importing it, probing it and asking it need neither torch nor a device."""

from __future__ import annotations

import os
from collections.abc import Mapping, MutableMapping, Sequence
from functools import partial
from typing import ClassVar

from hardpoint.errors import ConfigError
from hardpoint.interfaces.devices import DeviceMap
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, PlatformKind
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, plugin
from hardpoint_cuda.capabilities import attention_priorities, features, least_block_size, supported_quantization
from hardpoint_cuda.nvml import NvmlLibrary
from hardpoint_gpu.examination import Surroundings, Vendor, examine
from hardpoint_gpu.framework import FrameworkBuild, version_number
from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import DeviceLibrary, GpuFacts, Inventory
from hardpoint_gpu.platform import GpuPlatform
from hardpoint_gpu.settings import GpuOptions

__all__ = ["CudaOptions", "CudaPlatform", "create", "examine_cuda", "probe"]

MASK = "CUDA_VISIBLE_DEVICES"
ORDER = "CUDA_DEVICE_ORDER"
BUS_ORDER = "PCI_BUS_ID"
_OLDEST: tuple[int, int] = (7, 0)

VENDOR = Vendor(
    maker="NVIDIA",
    pci_id="0x10de",
    module="/proc/driver/nvidia/version",
    kernel_driver="nvidia",
    control_nodes=("/dev/nvidiactl", "/dev/nvidia-uvm"),
    masks=(MASK,),
    advice_container="in a container, give it the devices (docker: --gpus all, with the NVIDIA container toolkit); on "
    "the host, run `nvidia-modprobe -u -c=0`",
    advice_nodes="give this user access to /dev/nvidia* (often by the group `video`)",
    advice_framework="install a build with CUDA: pip install torch --index-url https://download.pytorch.org/whl/cu128",
)


class CudaOptions(GpuOptions):
    """Options under ``plugins.platform.cuda``."""


def examine_cuda(
    library: DeviceLibrary, host: Host, build: FrameworkBuild | None, environment: Mapping[str, str]
) -> ProbeResult:
    """The probe, over whatever it is handed."""
    around = Surroundings(
        library=library,
        environment=environment,
        device_map=partial(_device_map, library),
        build=build,
        runtime_fault=runtime_fault,
        further_faults=partial(further_faults, environment),
        host=host,
        elsewhere=f"torch {build.version} is built for ROCm" if build is not None and build.hip is not None else None,
    )
    found = examine(VENDOR, around)
    if host.exists(_mps_control(environment)):
        return ProbeResult(found.status, found.reason, {**found.details, "mps": "its control daemon runs here"})
    return found


def probe() -> ProbeResult:
    """Asks NVML and the kernel's files; no context is created and nothing stays open."""
    return examine_cuda(NvmlLibrary(), Host(), FrameworkBuild.installed(), os.environ)


def runtime_fault(build: FrameworkBuild, inventory: Inventory) -> str | None:
    """Why ``build`` does not run on the driver. Within a major version older drivers carry newer runtimes."""
    if build.cuda is None:
        return f"torch {build.version} is built without CUDA; {VENDOR.advice_framework}"
    limit = inventory.runtime_limit
    if limit is not None and limit[0] < version_number(build.cuda)[0]:
        return (
            f"the driver {inventory.driver_version} carries CUDA up to {limit[0]}.{limit[1]}, and torch "
            f"{build.version} is built for {build.cuda}; update the driver, or install torch for CUDA {limit[0]} "
            f"(https://download.pytorch.org/whl/)"
        )
    return None


def further_faults(environment: Mapping[str, str], devices: Sequence[GpuFacts]) -> str | None:
    """Too old a device, and an order of devices in which numbers mean something else to CUDA than to NVML."""
    for one in devices:
        if one.capability is not None and one.capability < _OLDEST:
            return (
                f"device {one.number} ({one.name}) has compute capability {one.capability[0]}.{one.capability[1]}; "
                f"{_OLDEST[0]}.{_OLDEST[1]} or newer is needed; mask it with {MASK}"
            )
    order = environment.get(ORDER, BUS_ORDER)
    if order != BUS_ORDER and len({one.name for one in devices}) > 1:
        return (
            f"{ORDER}={order!r} numbers these different devices otherwise than the management library does; unset it "
            f"or set it to {BUS_ORDER}"
        )
    return None


class CudaPlatform(GpuPlatform):
    """Devices of NVIDIA; ``library`` and ``environment`` can be fabricated."""

    kind: ClassVar[PlatformKind] = PlatformKind.CUDA
    name: ClassVar[str] = "cuda"
    visibility_variable: ClassVar[str] = MASK
    mask_suppressing_variables: ClassVar[Sequence[str]] = ("RAY_EXPERIMENTAL_NOSET_CUDA_VISIBLE_DEVICES",)
    extra_environment: ClassVar[Sequence[str]] = (ORDER, "CUDA_MPS_PIPE_DIRECTORY", "LD_LIBRARY_PATH")

    def __init__(
        self,
        options: CudaOptions | None = None,
        library: DeviceLibrary | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(options or CudaOptions(), library or NvmlLibrary(), environment)

    def with_device(self, device: DeviceDescription, count: int) -> GpuPlatform:
        """Raises ``ConfigError`` as its base does, and for a device that no start would use."""
        if device.capability is not None and device.capability < _OLDEST:
            major, minor = device.capability
            raise ConfigError(
                f"{device.name!r} has compute capability {major}.{minor}, and no start would use it; describe one of "
                f"{_OLDEST[0]}.{_OLDEST[1]} or newer, as in {self.example!r}"
            )
        return super().with_device(device, count)

    def features(self, device: GpuFacts) -> frozenset[str]:
        partition = {"mig"} if device.parent is not None else set()
        return features(device.capability) | partition

    def attention_priorities(self, device: GpuFacts | None) -> Sequence[str]:
        return attention_priorities(None if device is None else device.capability)

    def check_and_update(self, settings: EngineSettings) -> None:
        super().check_and_update(settings)
        stored = settings.kv_cache_dtype or ""
        least = [least_block_size(one.capability, stored) for one in self._visible()]
        settings.preferred_block_size = max(settings.preferred_block_size or 1, *least, 1)
        fp8 = (settings.kv_cache_dtype or "").startswith("fp8")
        old = [one for one in self._visible() if one.capability is not None and one.capability < (8, 0)]
        if fp8 and old:
            raise ConfigError(
                f"kv_cache_dtype {settings.kv_cache_dtype!r} needs compute capability 8.0, and {old[0].name} has "
                f"{old[0].architecture}; set --kv-cache-dtype auto"
            )

    def quantization(self, device: GpuFacts) -> Sequence[str]:
        return supported_quantization(device.capability)


def keep_order(environment: MutableMapping[str, str]) -> None:
    """Let CUDA number devices as the management library does, unless the operator decided otherwise.

    Its own order is by speed, so that with different devices in one host numbers would mean two things. The driver
    reads the variable when it starts, so this must come before; child processes inherit it.
    """
    environment.setdefault(ORDER, BUS_ORDER)


def _device_map(library: DeviceLibrary, environment: Mapping[str, str]) -> DeviceMap:
    return CudaPlatform(library=library, environment={}).device_map(environment)


def _mps_control(environment: Mapping[str, str]) -> str:
    return f"{environment.get('CUDA_MPS_PIPE_DIRECTORY', '/tmp/nvidia-mps')}/control"


@plugin("platform", options=CudaOptions, probe=probe)
def create(ctx: PluginContext, options: CudaOptions) -> CudaPlatform:
    """Entry point ``hardpoint.platform.v1`` ``cuda``."""
    del ctx
    keep_order(os.environ)
    return CudaPlatform(options)
