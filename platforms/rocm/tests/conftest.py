"""A host's kernel files and a management library, both fabricated by the names their documentation gives."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import write_host
from hardpoint_gpu.host import Host

GIB = 1 << 30
NODES = "sys/class/kfd/kfd/topology/nodes"


def kfd_files(*, xgmi: bool = True) -> dict[str, str]:
    """One processor (node 0) and two devices (nodes 2 and 10, in an order that sorts wrong as text)."""
    files = {
        f"{NODES}/0/properties": "cpu_cores_count 64\nsimd_count 0\n",
        "sys/module/amdgpu/version": "6.10.5",
        "dev/kfd": "",
    }
    for node, minor, version, other in ((2, 128, 90402, 10), (10, 136, 90500, 2)):
        files |= {
            f"{NODES}/{node}/properties": f"cpu_cores_count 0\nsimd_count 1216\ngfx_target_version {version}\n"
            f"location_id {0x0500 + node * 256}\ndomain 0\ndrm_render_minor {minor}\nunique_id {0xABC0 + node}\n",
            f"{NODES}/{node}/mem_banks/0/properties": f"heap_type 1\nsize_in_bytes {192 * GIB}\n",
            f"{NODES}/{node}/mem_banks/1/properties": "heap_type 0\nsize_in_bytes 1\n",
            f"{NODES}/{node}/io_links/0/properties": "type 2\nnode_to 0\n",
            f"{NODES}/{node}/io_links/1/properties": f"type {11 if xgmi else 2}\nnode_to {other}\n",
            f"sys/class/drm/renderD{minor}/device/mem_info_vram_total": str(192 * GIB),
            f"sys/class/drm/renderD{minor}/device/mem_info_vram_used": str(3 * GIB),
            f"sys/class/drm/renderD{minor}/device/numa_node": "1",
            f"dev/dri/renderD{minor}": "",
        }
    return files


@pytest.fixture
def machine(tmp_path: Path) -> Host:
    return write_host(tmp_path, kfd_files())


class AmdSmiError(Exception):
    """As the package raises it, over several lines."""

    def __str__(self) -> str:
        return "Error code:\n\t2 | not supported"


class LinkType(enum.IntEnum):
    AMDSMI_LINK_TYPE_INTERNAL = 0
    AMDSMI_LINK_TYPE_PCIE = 1
    AMDSMI_LINK_TYPE_XGMI = 2


class OldLinkType(enum.IntEnum):
    """The package's earlier name for the kinds, with other numbers."""

    UNDEFINED = 0
    PCIEXPRESS = 1
    XGMI = 2


class MemoryType(enum.IntEnum):
    VRAM = 0


@dataclass
class Card:
    hip: int | None
    gfx: str = "gfx942"
    serial: str = "0x000000000000ABC2"
    uuid: str = ""
    render: int = 128
    used: int = 5 * GIB
    links: dict[int, tuple[int, bool]] = field(default_factory=dict)
    """By HIP number of the other: kind and whether its memory can be reached."""


class RecordingAmdSmi:
    """``lacks`` are functions that fail; ``is_old`` leaves out what the first versions did not have."""

    AmdSmiException = AmdSmiError
    AmdSmiMemoryType = MemoryType
    AmdSmiIoLinkType = OldLinkType

    def __init__(self, *cards: Card, is_old: bool = False) -> None:
        self.cards = cards
        self.sessions = 0
        self.lacks: set[str] = set()
        if not is_old:
            self.AmdSmiLinkType = LinkType
            self.amdsmi_get_gpu_enumeration_info = self._enumeration

    def _fail(self, name: str) -> None:
        assert self.sessions > 0, f"{name} was called outside a session"
        if name in self.lacks:
            raise AmdSmiError()

    def amdsmi_init(self) -> None:
        if "amdsmi_init" in self.lacks:
            raise AmdSmiError()
        self.sessions += 1

    def amdsmi_shut_down(self) -> None:
        self.sessions -= 1

    def amdsmi_get_processor_handles(self) -> list[Card]:
        self._fail("amdsmi_get_processor_handles")
        return list(self.cards)

    def _enumeration(self, card: Card) -> dict[str, Any]:
        self._fail("amdsmi_get_gpu_enumeration_info")
        number = "N/A" if card.hip is None else card.hip
        return {"drm_render": card.render, "hip_id": number, "hip_uuid": card.uuid}

    def amdsmi_get_gpu_asic_info(self, card: Card) -> dict[str, Any]:
        self._fail("amdsmi_get_gpu_asic_info")
        return {"market_name": "AMD Instinct MI300X", "target_graphics_version": card.gfx, "asic_serial": card.serial}

    def amdsmi_get_gpu_driver_info(self, card: Card) -> dict[str, str]:
        self._fail("amdsmi_get_gpu_driver_info")
        return {"driver_name": "amdgpu", "driver_version": "6.10.5"}

    def amdsmi_get_gpu_memory_total(self, card: Card, kind: MemoryType) -> int:
        assert kind is MemoryType.VRAM
        self._fail("amdsmi_get_gpu_memory_total")
        return 192 * GIB

    def amdsmi_get_gpu_memory_usage(self, card: Card, kind: MemoryType) -> int:
        assert kind is MemoryType.VRAM
        return card.used

    def amdsmi_get_gpu_device_bdf(self, card: Card) -> str:
        return f"0000:{card.render - 123:02X}:00.0"

    def amdsmi_topo_get_numa_node_number(self, card: Card) -> int:
        self._fail("amdsmi_topo_get_numa_node_number")
        return 1

    def amdsmi_topo_get_link_type(self, first: Card, second: Card) -> dict[str, int]:
        self._fail("amdsmi_topo_get_link_type")
        return {"hops": 1, "type": first.links[second.hip or 0][0]}

    def amdsmi_is_P2P_accessible(self, first: Card, second: Card) -> bool:
        return first.links[second.hip or 0][1]


@pytest.fixture
def two_cards() -> RecordingAmdSmi:
    """Listed in another order than HIP numbers them."""
    second = Card(1, render=136, uuid="GPU-000000000000abca", gfx="gfx950", links={0: (2, True)})
    return RecordingAmdSmi(second, Card(0, links={1: (2, True)}))
