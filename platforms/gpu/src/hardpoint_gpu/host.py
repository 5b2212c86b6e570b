"""What the operating system shows of devices without their drivers' libraries: buses and device files. No torch."""

from __future__ import annotations

import enum
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

__all__ = ["Host", "NodeState", "PciDevice"]

_DISPLAY_CLASSES = ("0x03", "0x12")
"""Display controllers, and processing accelerators."""


class NodeState(enum.Enum):
    USABLE = enum.auto()
    MISSING = enum.auto()
    DENIED = enum.auto()


@dataclass(frozen=True, slots=True)
class PciDevice:
    """``driver`` is the kernel driver that holds it, empty for none."""

    address: str
    driver: str


def _may_open(path: Path) -> bool:
    return os.access(path, os.R_OK | os.W_OK)


@dataclass(frozen=True, slots=True)
class Host:
    """Reads below ``root``, so that any machine can be fabricated from a folder of files.

    ``may_open`` says whether this process may read and write a device file; nothing here opens one.
    """

    root: Path = Path("/")
    may_open: Callable[[Path], bool] = _may_open

    def read(self, path: str) -> str | None:
        """A small file's text without blanks around it; None where it cannot be read."""
        try:
            return (self.root / path.lstrip("/")).read_text(encoding="utf-8", errors="replace").strip()
        except OSError:
            return None

    def exists(self, path: str) -> bool:
        return (self.root / path.lstrip("/")).exists()

    def folders(self, path: str) -> list[Path]:
        """Entries of a folder by name; none where it cannot be listed."""
        try:
            return sorted((self.root / path.lstrip("/")).iterdir())
        except OSError:
            return []

    def pci_devices(self, vendor: str) -> list[PciDevice]:
        """Those of ``vendor`` (such as ``0x10de``) that display or compute."""
        found = []
        for folder in self.folders("sys/bus/pci/devices"):
            place = f"sys/bus/pci/devices/{folder.name}"
            is_display = (self.read(f"{place}/class") or "").startswith(_DISPLAY_CLASSES)
            if is_display and self.read(f"{place}/vendor") == vendor:
                driver = folder / "driver"
                found.append(PciDevice(folder.name, driver.resolve().name if driver.exists() else ""))
        return found

    def node_state(self, path: str) -> NodeState:
        place = self.root / path.lstrip("/")
        if not place.exists():
            return NodeState.MISSING
        return NodeState.USABLE if self.may_open(place) else NodeState.DENIED

    def unusable(self, paths: Iterable[str]) -> tuple[str, NodeState] | None:
        """The first device file that cannot be used, and why; None where all can."""
        states = ((path, self.node_state(path)) for path in paths)
        return next(((path, state) for path, state in states if state is not NodeState.USABLE), None)
