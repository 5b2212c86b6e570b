"""What a vendor's management library tells of the devices of a host: plain records, and the protocol that yields them.

Numbers of devices are physical ids: the library's own order, with partitions of devices numbered behind all whole ones.
"""

from __future__ import annotations

import enum
from typing import Protocol

import msgspec

from hardpoint.errors import ConfigError

__all__ = [
    "ComputeMode",
    "DeviceLibrary",
    "GpuFacts",
    "Inventory",
    "LibraryFault",
    "LibraryMissing",
    "Link",
    "LinkKind",
    "MemoryReading",
]


class LibraryMissing(Exception):
    """There is no such library here: not installed, or its driver is not. The text says what is missing."""


class LibraryFault(Exception):
    """The library is there and refuses. The text says why and what to do."""


class ComputeMode(enum.StrEnum):
    """Who may compute on a device."""

    SHARED = "shared"
    ONE_PROCESS = "one process"
    NOBODY = "nobody"


class LinkKind(enum.StrEnum):
    """How two devices reach each other, the closest first."""

    NVLINK = "nvlink"
    XGMI = "xgmi"
    SAME_BOARD = "same board"
    PCIE_SWITCH = "pcie switch"
    PCIE_HOST = "pcie host bridge"
    SAME_NODE = "same numa node"
    ACROSS_NODES = "across numa nodes"
    UNKNOWN = "unknown"


class GpuFacts(msgspec.Struct, frozen=True, kw_only=True):
    """One device that can be computed on, or a whole one whose partitions can.

    Attributes:
        number: physical id.
        uuid: as the vendor's tools write it (``GPU-...``, ``MIG-...``).
        memory_bytes: of the device, or of the partition.
        capability: (major, minor), or None where the library does not tell.
        architecture: what compilers call it (``sm_90``, ``gfx942``); empty where unknown.
        nodes: device files that a process on it opens.
        numa_node: of the host, None where unknown or where there is only one.
        parent: physical id of the whole device, for a partition.
        is_divided: the device is in partitions: it cannot be used as a whole.
        num_processes: that compute on it now, or None where the library does not tell.
    """

    number: int
    name: str
    uuid: str
    memory_bytes: int
    capability: tuple[int, int] | None = None
    architecture: str = ""
    bus_id: str = ""
    nodes: tuple[str, ...] = ()
    numa_node: int | None = None
    parent: int | None = None
    is_divided: bool = False
    compute_mode: ComputeMode = ComputeMode.SHARED
    num_processes: int | None = None


class Inventory(msgspec.Struct, frozen=True, kw_only=True):
    """All devices of a host, masked ones included, by number. ``runtime_limit`` is the newest runtime (major, minor)
    that the driver carries, or None where drivers state no such thing."""

    library: str
    driver_version: str
    runtime_limit: tuple[int, int] | None = None
    devices: tuple[GpuFacts, ...] = ()

    def device(self, number: int) -> GpuFacts:
        """The device to compute on under this number: of a divided one its first partition.

        Raises ``ConfigError`` for a number that nobody has and for a divided device without partitions.
        """
        found = next((one for one in self.devices if one.number == number), None)
        if found is None:
            known = ", ".join(f"{one.number} ({one.name})" for one in self.devices) or "none"
            raise ConfigError(f"device {number} does not exist; there are: {known}")
        if not found.is_divided:
            return found
        parts = [one for one in self.devices if one.parent == number]
        if not parts:
            raise ConfigError(
                f"device {number} ({found.name}) is set to be used in partitions and has none; create one, or switch "
                "the mode off"
            )
        return parts[0]

    def number_of(self, text: str) -> int:
        """The number of the device whose UUID begins with ``text``, in any case.

        Raises ``LookupError`` where none does, or several do.
        """
        wanted = text.lower()
        found = [one for one in self.devices if one.uuid and one.uuid.lower().startswith(wanted)]
        exact = [one for one in found if one.uuid.lower() == wanted]
        chosen = exact or found
        if len(chosen) != 1:
            seen = ", ".join(one.uuid for one in (found or self.devices)) or "none"
            raise LookupError(f"{'no' if not found else 'more than one'} UUID begins so; UUIDs: {seen}")
        return chosen[0].number


class MemoryReading(msgspec.Struct, frozen=True):
    """Bytes of one device now, of all processes together."""

    total: int
    used: int


class Link(msgspec.Struct, frozen=True, kw_only=True):
    """Between two whole devices, ``first`` below ``second``. ``is_direct``: either can read and write the other's
    memory."""

    first: int
    second: int
    kind: LinkKind
    is_direct: bool


class DeviceLibrary(Protocol):
    """Every method opens the library, asks and closes it: nothing stays open, no device is initialized.

    All raise :class:`LibraryMissing` and :class:`LibraryFault`.
    """

    def inventory(self) -> Inventory: ...

    def memory(self, number: int) -> MemoryReading:
        """Of a device or partition. Raises ``ConfigError`` for a number that nobody has."""

    def links(self) -> tuple[Link, ...]:
        """One per pair of whole devices."""
