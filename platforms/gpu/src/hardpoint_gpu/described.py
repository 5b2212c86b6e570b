"""Devices that are only described, in the place of those that a management library tells of."""

from __future__ import annotations

from dataclasses import dataclass

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_gpu.inventory import GpuFacts, Inventory, Link, MemoryReading

__all__ = ["DescribedDevices", "facts_of"]


def facts_of(device: DeviceDescription, number: int, *, architecture_prefix: str, example: str) -> GpuFacts:
    """Raises ``ConfigError`` for a description without an architecture of the platform's kind, or without memory."""
    architectures = [name for name in device.features if name.startswith(architecture_prefix)]
    if len(architectures) != 1 or device.capability is None:
        raise ConfigError(f"{device.name!r} names no architecture of this platform; write it as in {example!r}")
    if device.memory_bytes <= 0:
        raise ConfigError(f"{device.name!r} says nothing of its memory; write it as in {example!r}")
    return GpuFacts(
        number=number,
        name=device.name,
        uuid=f"GPU-described-{number}",
        memory_bytes=device.memory_bytes,
        capability=device.capability,
        architecture=architectures[0],
    )


@dataclass(frozen=True, slots=True)
class DescribedDevices:
    """A management library of a host with ``devices``, in none of which anything lies, and no links."""

    devices: tuple[GpuFacts, ...]

    def inventory(self) -> Inventory:
        return Inventory(library="a description", driver_version="", devices=self.devices)

    def memory(self, number: int) -> MemoryReading:
        return MemoryReading(self.inventory().device(number).memory_bytes, 0)

    def links(self) -> tuple[Link, ...]:
        return ()
