"""Devices as the vendor's management library tells of them. It opens no context and ignores masks.

The package ``pynvml`` is imported when something is asked, and the library is shut down again after each answer.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, TypeVar

from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import (
    ComputeMode,
    GpuFacts,
    Inventory,
    LibraryFault,
    LibraryMissing,
    Link,
    LinkKind,
    MemoryReading,
)

__all__ = ["NvmlLibrary"]

_T = TypeVar("_T")

# Of the library's interface, which never renumbers. The package's own constants for peer access are partly tuples.
_PEER_READ, _PEER_WRITE, _PEER_NVLINK, _PEER_OK = 0, 1, 2, 0
_ANCESTORS = {
    0: LinkKind.SAME_BOARD,
    10: LinkKind.PCIE_SWITCH,
    20: LinkKind.PCIE_SWITCH,
    30: LinkKind.PCIE_HOST,
    40: LinkKind.SAME_NODE,
    50: LinkKind.ACROSS_NODES,
}
_COMPUTE_MODES = {1: ComputeMode.ONE_PROCESS, 2: ComputeMode.NOBODY, 3: ComputeMode.ONE_PROCESS}


class _Status(enum.IntEnum):
    NOT_SUPPORTED = 3
    NO_PERMISSION = 4
    NOT_FOUND = 6
    DRIVER_NOT_LOADED = 9
    LIBRARY_NOT_FOUND = 12
    FUNCTION_NOT_FOUND = 13
    GPU_IS_LOST = 15
    VERSION_MISMATCH = 18


_UNTOLD = (_Status.NOT_SUPPORTED, _Status.NOT_FOUND, _Status.FUNCTION_NOT_FOUND, _Status.NO_PERMISSION)
"""What a query answers that this device, driver or user has no answer to."""


def _load() -> Any:
    try:
        return import_module("pynvml")
    except ImportError as error:
        raise LibraryMissing(
            f"the package nvidia-ml-py is not installed ({error}); pip install nvidia-ml-py"
        ) from error


@dataclass(frozen=True, slots=True)
class NvmlLibrary:
    """``load`` yields the package; tests hand in one that answers from a table."""

    load: Callable[[], Any] = _load
    host: Host = field(default_factory=Host)

    def inventory(self) -> Inventory:
        with self._session() as nvml:
            whole = [self._whole(nvml, number) for number in range(nvml.nvmlDeviceGetCount())]
            limit = _told(nvml, nvml.nvmlSystemGetCudaDriverVersion_v2)
            return Inventory(
                library=f"NVML {_text(nvml.nvmlSystemGetNVMLVersion())}",
                driver_version=_text(nvml.nvmlSystemGetDriverVersion()),
                runtime_limit=None if limit is None else (limit // 1000, limit % 1000 // 10),
                devices=(*whole, *self._parts(nvml, whole)),
            )

    def memory(self, number: int) -> MemoryReading:
        known = self.inventory()
        facts = next((one for one in known.devices if one.number == number), None) or known.device(number)
        with self._session() as nvml:
            if facts.parent is None:
                return self._memory(nvml, nvml.nvmlDeviceGetHandleByIndex(number))
            handles = dict(_part_handles(nvml, nvml.nvmlDeviceGetHandleByIndex(facts.parent)))
            return self._memory(nvml, handles[facts.uuid])

    def links(self) -> tuple[Link, ...]:
        with self._session() as nvml:
            handles = [nvml.nvmlDeviceGetHandleByIndex(number) for number in range(nvml.nvmlDeviceGetCount())]
            return tuple(
                _link(nvml, (first, handles[first]), (second, handles[second]))
                for first in range(len(handles))
                for second in range(first + 1, len(handles))
            )

    @contextmanager
    def _session(self) -> Iterator[Any]:
        nvml = self.load()
        try:
            nvml.nvmlInit()
        except nvml.NVMLError as error:
            raise _explained(error) from error
        try:
            yield nvml
        except nvml.NVMLError as error:
            raise _explained(error) from error
        finally:
            nvml.nvmlShutdown()

    def _whole(self, nvml: Any, number: int) -> GpuFacts:
        handle = nvml.nvmlDeviceGetHandleByIndex(number)
        capability = tuple(nvml.nvmlDeviceGetCudaComputeCapability(handle))
        bus_id = _text(nvml.nvmlDeviceGetPciInfo(handle).busId)
        processes = _told(nvml, nvml.nvmlDeviceGetComputeRunningProcesses, handle)
        minor = _told(nvml, nvml.nvmlDeviceGetMinorNumber, handle)
        mode = _told(nvml, nvml.nvmlDeviceGetMigMode, handle)
        compute = _told(nvml, nvml.nvmlDeviceGetComputeMode, handle)
        return GpuFacts(
            number=number,
            name=_text(nvml.nvmlDeviceGetName(handle)),
            uuid=_text(nvml.nvmlDeviceGetUUID(handle)),
            memory_bytes=self._memory(nvml, handle).total,
            capability=(capability[0], capability[1]),
            architecture=f"sm_{capability[0]}{capability[1]}",
            bus_id=bus_id,
            nodes=() if minor is None else (f"/dev/nvidia{minor}",),
            numa_node=self._numa_node(bus_id),
            is_divided=mode is not None and mode[0] == 1,
            compute_mode=_COMPUTE_MODES.get(compute or 0, ComputeMode.SHARED),
            num_processes=None if processes is None else len(processes),
        )

    def _parts(self, nvml: Any, whole: list[GpuFacts]) -> Iterator[GpuFacts]:
        number = len(whole)
        for parent in (one for one in whole if one.is_divided):
            for uuid, handle in _part_handles(nvml, nvml.nvmlDeviceGetHandleByIndex(parent.number)):
                yield GpuFacts(
                    number=number,
                    name=_text(nvml.nvmlDeviceGetName(handle)),
                    uuid=uuid,
                    memory_bytes=self._memory(nvml, handle).total,
                    capability=parent.capability,
                    architecture=parent.architecture,
                    bus_id=parent.bus_id,
                    nodes=parent.nodes,
                    numa_node=parent.numa_node,
                    parent=parent.number,
                )
                number += 1

    def _memory(self, nvml: Any, handle: Any) -> MemoryReading:
        found = _told(nvml, nvml.nvmlDeviceGetMemoryInfo, handle)
        if found is not None:
            # What the driver keeps for itself is neither free nor, by some versions, used.
            return MemoryReading(found.total, found.total - found.free)
        # Devices that share the host's memory have none of their own to tell of.
        lines = (line.split() for line in (self.host.read("/proc/meminfo") or "").splitlines())
        values = {words[0].rstrip(":"): int(words[1]) * 1024 for words in lines if len(words) == 3}
        total, free = values.get("MemTotal", 0), values.get("MemAvailable", 0)
        return MemoryReading(total, max(0, total - free))

    def _numa_node(self, bus_id: str) -> int | None:
        domain, _, rest = bus_id.lower().partition(":")
        text = self.host.read(f"/sys/bus/pci/devices/{domain[-4:]}:{rest}/numa_node") or ""
        return int(text) if text.isdecimal() else None


def _part_handles(nvml: Any, parent: Any) -> Iterator[tuple[str, Any]]:
    """UUIDs and handles of the partitions of a device; places between them may be empty."""
    for place in range(_told(nvml, nvml.nvmlDeviceGetMaxMigDeviceCount, parent) or 0):
        handle = _told(nvml, nvml.nvmlDeviceGetMigDeviceHandleByIndex, parent, place)
        if handle is not None:
            yield _text(nvml.nvmlDeviceGetUUID(handle)), handle


def _link(nvml: Any, first: tuple[int, Any], second: tuple[int, Any]) -> Link:
    def may(what: int) -> bool:
        return bool(_told(nvml, nvml.nvmlDeviceGetP2PStatus, first[1], second[1], what) == _PEER_OK)

    ancestor = _told(nvml, nvml.nvmlDeviceGetTopologyCommonAncestor, first[1], second[1])
    kind = LinkKind.UNKNOWN if ancestor is None else _ANCESTORS.get(ancestor, LinkKind.UNKNOWN)
    return Link(
        first=first[0],
        second=second[0],
        kind=LinkKind.NVLINK if may(_PEER_NVLINK) else kind,
        is_direct=may(_PEER_READ) and may(_PEER_WRITE),
    )


def _told(nvml: Any, query: Callable[..., _T], *arguments: Any) -> _T | None:
    """The answer, or None where there is none to be had."""
    try:
        return query(*arguments)
    except nvml.NVMLError as error:
        if error.value not in _UNTOLD:
            raise
        return None


def _explained(error: Any) -> LibraryMissing | LibraryFault:
    match error.value:
        case _Status.LIBRARY_NOT_FOUND:
            return LibraryMissing(
                "the driver's library libnvidia-ml.so.1 is not here; install the driver, or start the container with "
                "the NVIDIA container toolkit (docker: --gpus all)"
            )
        case _Status.DRIVER_NOT_LOADED:
            return LibraryMissing("the NVIDIA kernel driver is not loaded; install it, or run `modprobe nvidia`")
        case _Status.NO_PERMISSION:
            return LibraryFault(
                "NVML: this user may not open the NVIDIA device files; see the permissions of /dev/nvidia* and, in a "
                "container, give it the devices (docker: --gpus all)"
            )
        case _Status.VERSION_MISMATCH:
            return LibraryFault(
                "NVML: the loaded kernel driver and the driver's library are of different versions, as after an "
                "update; restart the machine or reload the kernel modules"
            )
        case _Status.GPU_IS_LOST:
            return LibraryFault("NVML: a device is lost: it fell off the bus or hangs; restart the machine")
    return LibraryFault(f"NVML: {error}; see whether `nvidia-smi` works")


def _text(value: Any) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
