"""Devices as ROCm's management library tells of them; the package ``amdsmi`` is imported when something is asked."""

from __future__ import annotations

import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from importlib import import_module
from typing import Any, TypeVar

from hardpoint.errors import ConfigError
from hardpoint_gpu.inventory import GpuFacts, Inventory, LibraryFault, LibraryMissing, Link, LinkKind, MemoryReading
from hardpoint_rocm.kfd import gfx_version

__all__ = ["AmdSmiLibrary"]

_T = TypeVar("_T")
_KINDS = (("XGMI", LinkKind.XGMI), ("PCI", LinkKind.PCIE_HOST), ("INTERNAL", LinkKind.SAME_BOARD))


def _load() -> Any:
    try:
        # Without the library it wraps, the package says so on standard output, which is not its own.
        with redirect_stdout(io.StringIO()):
            return import_module("amdsmi")
    except (ImportError, KeyError, OSError, AttributeError) as error:
        raise LibraryMissing(
            f"the package amdsmi or its library is not installed ({type(error).__name__}: {error}); install the "
            "amdsmi that came with ROCm (/opt/rocm/share/amd_smi)"
        ) from error


@dataclass(frozen=True, slots=True)
class AmdSmiLibrary:
    """``load`` yields the package; tests hand in one that answers from a table."""

    load: Callable[[], Any] = _load

    def inventory(self) -> Inventory:
        with self._session() as smi:
            handles = _ordered(smi)
            driver = _told(smi, smi.amdsmi_get_gpu_driver_info, handles[0]) if handles else None
            devices = tuple(_facts(smi, number, handle) for number, handle in enumerate(handles))
        version = "unknown" if driver is None else driver.get("driver_version", "unknown")
        return Inventory(library="AMD SMI", driver_version=f"amdgpu {version}", devices=devices)

    def memory(self, number: int) -> MemoryReading:
        with self._session() as smi:
            handles = _ordered(smi)
            if number >= len(handles):
                raise ConfigError(f"device {number} does not exist; there are {len(handles)}")
            kind = smi.AmdSmiMemoryType.VRAM
            return MemoryReading(
                smi.amdsmi_get_gpu_memory_total(handles[number], kind),
                smi.amdsmi_get_gpu_memory_usage(handles[number], kind),
            )

    def links(self) -> tuple[Link, ...]:
        with self._session() as smi:
            handles = _ordered(smi)
            return tuple(
                _link(smi, (first, handles[first]), (second, handles[second]))
                for first in range(len(handles))
                for second in range(first + 1, len(handles))
            )

    @contextmanager
    def _session(self) -> Iterator[Any]:
        smi = self.load()
        try:
            smi.amdsmi_init()
        except smi.AmdSmiException as error:
            raise LibraryMissing(
                f"AMD SMI does not start: {_message(error)}; see whether `amd-smi list` works"
            ) from error
        try:
            yield smi
        except smi.AmdSmiException as error:
            raise LibraryFault(f"AMD SMI: {_message(error)}; see whether `amd-smi list` works") from error
        finally:
            smi.amdsmi_shut_down()


def _ordered(smi: Any) -> list[Any]:
    """Handles by HIP's number; in the library's own order where it does not tell one."""
    handles = smi.amdsmi_get_processor_handles()
    by_number: dict[int, Any] = {}
    for handle in handles:
        number = _enumeration(smi, handle).get("hip_id")
        if isinstance(number, int):
            by_number[number] = handle
    if len(by_number) < len(handles):
        return list(handles)
    return [by_number[number] for number in sorted(by_number)]


def _enumeration(smi: Any, handle: Any) -> dict[str, Any]:
    # Not in the library's first versions.
    query = getattr(smi, "amdsmi_get_gpu_enumeration_info", None)
    found = None if query is None else _told(smi, query, handle)
    return {} if found is None else found


def _facts(smi: Any, number: int, handle: Any) -> GpuFacts:
    asic, place = smi.amdsmi_get_gpu_asic_info(handle), _enumeration(smi, handle)
    architecture = str(asic.get("target_graphics_version", ""))
    serial = str(asic.get("asic_serial", "")).removeprefix("0x").lower()
    uuid = str(place.get("hip_uuid") or "") or (f"GPU-{serial}" if serial and serial != "n/a" else "")
    minor = place.get("drm_render")
    numa = _told(smi, smi.amdsmi_topo_get_numa_node_number, handle)
    return GpuFacts(
        number=number,
        name=str(asic.get("market_name", "AMD device")),
        uuid=uuid if uuid.startswith("GPU-") or not uuid else f"GPU-{uuid}",
        memory_bytes=smi.amdsmi_get_gpu_memory_total(handle, smi.AmdSmiMemoryType.VRAM),
        capability=gfx_version(architecture),
        architecture=architecture,
        bus_id=str(_told(smi, smi.amdsmi_get_gpu_device_bdf, handle) or "").lower(),
        nodes=(f"/dev/dri/renderD{minor}",) if isinstance(minor, int) else (),
        numa_node=numa if isinstance(numa, int) else None,
    )


def _link(smi: Any, first: tuple[int, Any], second: tuple[int, Any]) -> Link:
    found = _told(smi, smi.amdsmi_topo_get_link_type, first[1], second[1])
    reaches = _told(smi, smi.amdsmi_is_P2P_accessible, first[1], second[1])
    kind = LinkKind.UNKNOWN
    if found is not None:
        # Numbers of the kinds were changed once; their names were not.
        kinds = getattr(smi, "AmdSmiLinkType", None) or smi.AmdSmiIoLinkType
        name = next((member.name for member in kinds if int(member) == found["type"]), "")
        kind = next((ours for part, ours in _KINDS if part in name), LinkKind.UNKNOWN)
    return Link(first=first[0], second=second[0], kind=kind, is_direct=bool(reaches))


def _told(smi: Any, query: Callable[..., _T], *arguments: Any) -> _T | None:
    """The answer, or None where this device or version has none."""
    try:
        return query(*arguments)
    except smi.AmdSmiException:
        return None


def _message(error: Any) -> str:
    return " ".join(str(error).split())
