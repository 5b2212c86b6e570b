"""Devices as the kernel driver's own files tell of them. Needs neither ROCm's libraries nor any permission.

The driver numbers processors and devices together as *nodes*; HIP numbers the devices among them, in that order.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from hardpoint.errors import ConfigError
from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import GpuFacts, Inventory, LibraryMissing, Link, LinkKind, MemoryReading

__all__ = ["KfdTree", "gfx_name", "gfx_version"]

NODES = "/sys/class/kfd/kfd/topology/nodes"
_XGMI, _PCIE = 11, 2
_FRAMEBUFFERS = (1, 2)
_LINK_FOLDERS = ("io_links", "p2p_links")


def gfx_name(version: int) -> str:
    """``90402`` to ``gfx942``: minor and stepping have two decimal digits each here, one hexadecimal in the name."""
    return f"gfx{version // 10_000}{version // 100 % 100:x}{version % 100:x}"


def gfx_version(name: str) -> tuple[int, int] | None:
    """(major, minor) of an architecture such as ``gfx942``, as HIP tells a capability; None for other texts."""
    digits = name.removeprefix("gfx").partition(":")[0]
    if not name.startswith("gfx") or len(digits) < 3 or not digits[:-2].isdecimal():
        return None
    try:
        return int(digits[:-2]), int(digits[-2], 16)
    except ValueError:
        return None


@dataclass(frozen=True, slots=True)
class _Node:
    number: int
    values: Mapping[str, int]


@dataclass(frozen=True, slots=True)
class KfdTree:
    """The tree below ``host``'s root."""

    host: Host = field(default_factory=Host)

    def inventory(self) -> Inventory:
        release = self.host.read("/sys/module/amdgpu/version") or self.host.read("/proc/sys/kernel/osrelease") or "?"
        devices = tuple(self._facts(number, node) for number, node in enumerate(self._devices()))
        return Inventory(library="the kernel's topology", driver_version=f"amdgpu of {release}", devices=devices)

    def memory(self, number: int) -> MemoryReading:
        nodes = list(self._devices())
        if number >= len(nodes):
            raise ConfigError(f"device {number} does not exist; there are {len(nodes)}")
        place = _drm_folder(nodes[number])
        total = self._number(f"{place}/mem_info_vram_total")
        used = self._number(f"{place}/mem_info_vram_used")
        return MemoryReading(self._memory_bytes(nodes[number]) if total is None else total, used or 0)

    def links(self) -> tuple[Link, ...]:
        nodes = list(self._devices())
        numbers = {node.number: number for number, node in enumerate(nodes)}
        found: dict[tuple[int, int], LinkKind] = {}
        for node in nodes:
            for other, kind in self._links_of(node):
                if other in numbers:
                    pair = (min(numbers[node.number], numbers[other]), max(numbers[node.number], numbers[other]))
                    found[pair] = LinkKind.XGMI if LinkKind.XGMI in (kind, found.get(pair)) else kind
        return tuple(
            # A link between two devices stands in the tree only where they can reach each other's memory.
            Link(first=first, second=second, kind=found.get((first, second), LinkKind.UNKNOWN),
                 is_direct=(first, second) in found)
            for first in range(len(nodes))
            for second in range(first + 1, len(nodes))
        )  # fmt: skip

    def _devices(self) -> Iterator[_Node]:
        folders = [folder for folder in self.host.folders(NODES) if folder.name.isdecimal()]
        if not folders:
            raise LibraryMissing("the kernel driver amdgpu offers no compute devices (/sys/class/kfd is empty)")
        for number in sorted(int(folder.name) for folder in folders):
            values = _values(self.host.read(f"{NODES}/{number}/properties"))
            if values.get("simd_count", 0) > 0:
                yield _Node(number, values)

    def _facts(self, number: int, node: _Node) -> GpuFacts:
        architecture = gfx_name(node.values.get("gfx_target_version", 0))
        place = _drm_folder(node)
        unique, minor = node.values.get("unique_id", 0), node.values.get("drm_render_minor", 0)
        numa = self._number(f"{place}/numa_node")
        return GpuFacts(
            number=number,
            name=self.host.read(f"{place}/product_name") or f"AMD {architecture}",
            uuid=f"GPU-{unique:016x}" if unique else "",
            memory_bytes=self._memory_bytes(node),
            capability=gfx_version(architecture),
            architecture=architecture,
            bus_id=_bus_id(node),
            nodes=(f"/dev/dri/renderD{minor}",) if minor else (),
            numa_node=numa,
        )

    def _memory_bytes(self, node: _Node) -> int:
        total = 0
        for bank in self.host.folders(f"{NODES}/{node.number}/mem_banks"):
            values = _values(self.host.read(f"{NODES}/{node.number}/mem_banks/{bank.name}/properties"))
            total += values.get("size_in_bytes", 0) if values.get("heap_type") in _FRAMEBUFFERS else 0
        return total

    def _links_of(self, node: _Node) -> Iterator[tuple[int, LinkKind]]:
        for folder in _LINK_FOLDERS:
            for link in self.host.folders(f"{NODES}/{node.number}/{folder}"):
                values = _values(self.host.read(f"{NODES}/{node.number}/{folder}/{link.name}/properties"))
                kind = {_XGMI: LinkKind.XGMI, _PCIE: LinkKind.PCIE_HOST}.get(values.get("type", 0), LinkKind.UNKNOWN)
                yield values.get("node_to", node.number), kind

    def _number(self, path: str) -> int | None:
        text = self.host.read(path) or ""
        return int(text) if text.isdecimal() else None


def _drm_folder(node: _Node) -> str:
    return f"/sys/class/drm/renderD{node.values.get('drm_render_minor', 0)}/device"


def _bus_id(node: _Node) -> str:
    location = node.values.get("location_id", 0)
    return f"{node.values.get('domain', 0):04x}:{location >> 8 & 0xFF:02x}:{location >> 3 & 0x1F:02x}.{location & 7}"


def _values(text: str | None) -> dict[str, int]:
    """Lines of a name and a number; others are left out."""
    rows = (line.split() for line in (text or "").splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) == 2 and row[1].isdecimal()}
