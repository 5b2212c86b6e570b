"""The probe of a platform: whether its devices are there and can be used, without opening or initializing one.

*Absent* is a host without such devices. Whatever is there and cannot be used is *broken*, with what to do about it:
nobody wants to learn from the bill that the processor did the work.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hardpoint.errors import ConfigError
from hardpoint.interfaces.devices import DeviceMap, LogicalDevice
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint_gpu.framework import FrameworkBuild
from hardpoint_gpu.host import Host, NodeState
from hardpoint_gpu.inventory import ComputeMode, DeviceLibrary, GpuFacts, Inventory, LibraryFault, LibraryMissing, Link
from hardpoint_gpu.masks import hides_everything

__all__ = ["Surroundings", "Vendor", "examine", "link_table", "visible_devices"]

_GIB = 1 << 30


@dataclass(frozen=True, slots=True)
class Vendor:
    """What differs between vendors.

    Attributes:
        maker: in messages.
        pci_id: vendor number on the bus.
        module: file that is there while the kernel driver is loaded.
        kernel_driver: its name on the bus.
        control_nodes: device files that every process needs besides those of its devices.
        masks: variables that hide devices, the first one that counts.
        advice_container: how a container is given devices.
        advice_nodes: what to do where device files may not be opened.
        advice_framework: how to install a framework built for these devices.
    """

    maker: str
    pci_id: str
    module: str
    kernel_driver: str
    control_nodes: Sequence[str]
    masks: Sequence[str]
    advice_container: str
    advice_nodes: str
    advice_framework: str


@dataclass(frozen=True, slots=True)
class Surroundings:
    """What a probe asks; every part can be fabricated. ``build`` is None where no framework is installed."""

    library: DeviceLibrary
    environment: Mapping[str, str]
    device_map: Callable[[Mapping[str, str]], DeviceMap]
    build: FrameworkBuild | None
    runtime_fault: Callable[[FrameworkBuild, Inventory], str | None]
    """Why the build cannot run on what the inventory says of the driver, or None."""
    further_faults: Callable[[Sequence[GpuFacts]], str | None] = field(default=lambda devices: None)
    host: Host = field(default_factory=Host)
    elsewhere: str | None = None
    """What the framework was built for, if for other devices than these: nobody means to compute on these then."""


def examine(vendor: Vendor, around: Surroundings) -> ProbeResult:
    """Look at everything in the order in which it goes wrong."""
    for name in vendor.masks:
        value = around.environment.get(name)
        if hides_everything(value):
            return _absent(f"{name}={value!r} hides all devices; unset it or list devices there")
    if around.elsewhere is not None:
        return _absent(f"{around.elsewhere}, not for {vendor.maker} devices")
    trace = _trace(vendor, around.host)
    try:
        inventory = around.library.inventory()
    except LibraryMissing as error:
        return (
            _absent(f"{error}; no {vendor.maker} device found") if trace is None else _broken(f"{trace}, but {error}")
        )
    except LibraryFault as error:
        return _absent(str(error)) if trace is None else _broken(str(error))
    except Exception as error:
        # Not a word about devices: on a host that has none, a damaged package is nobody's concern.
        fault = f"asking for them raised {type(error).__name__}: {error}; install the management library anew"
        return (
            _absent(f"no {vendor.maker} device found, and {fault}") if trace is None else _broken(f"{trace}, {fault}")
        )
    if not inventory.devices:
        fault = f"the driver ({inventory.driver_version}) lists no device"
        return _absent(fault) if trace is None else _broken(f"{fault}; {vendor.advice_container}")
    try:
        devices = visible_devices(inventory, around.device_map(around.environment))
    except (ConfigError, RuntimeError) as error:
        return _broken(str(error))
    for fault in _faults(vendor, around, inventory, devices):
        return _broken(fault, _facts(inventory, devices))
    return ProbeResult(ProbeStatus.AVAILABLE, _summary(inventory, devices), _facts(inventory, devices))


def visible_devices(inventory: Inventory, devices: DeviceMap) -> tuple[GpuFacts, ...]:
    """The devices that this process may use, by logical number. Raises ``ConfigError`` as the map does."""
    most = len(inventory.devices)
    try:
        devices.logical_to_physical(LogicalDevice(most))
    except ConfigError:
        numbers = _masked_numbers(devices, most)
    else:
        # Nothing masks them. Partitions are reached by name only, or as the first one of their device.
        numbers = [one.number for one in inventory.devices if one.parent is None]
    return tuple(inventory.device(number) for number in numbers)


def _masked_numbers(devices: DeviceMap, most: int) -> list[int]:
    numbers: list[int] = [devices.logical_to_physical(LogicalDevice(0))]
    for index in range(1, most):
        try:
            numbers.append(devices.logical_to_physical(LogicalDevice(index)))
        except ConfigError:
            break
    return numbers


def _trace(vendor: Vendor, host: Host) -> str | None:
    """A sign that a device of the vendor is in the machine, or None. One that another driver holds (a virtual
    machine's, a display's) is none."""
    if host.exists(vendor.module):
        return f"the {vendor.maker} driver is loaded"
    free = [one for one in host.pci_devices(vendor.pci_id) if one.driver in ("", vendor.kernel_driver)]
    return f"{len(free)} {vendor.maker} devices are on the bus ({free[0].address})" if free else None


def _faults(vendor: Vendor, around: Surroundings, inventory: Inventory, devices: Sequence[GpuFacts]) -> Iterator[str]:
    nodes = [*vendor.control_nodes, *(node for one in devices for node in one.nodes)]
    unusable = around.host.unusable(nodes)
    if unusable is not None:
        path, state = unusable
        if state is NodeState.DENIED:
            yield f"this user may not open {path}; {vendor.advice_nodes}"
        else:
            yield f"{path} is missing here, though the driver lists the device; {vendor.advice_container}"
    build = around.build
    if build is None:
        yield f"torch is not installed; {vendor.advice_framework}"
    else:
        fault = around.runtime_fault(build, inventory)
        if fault is not None:
            yield fault
    for one in devices:
        if one.compute_mode is ComputeMode.NOBODY:
            yield f"device {one.number} ({one.name}) is set to compute for nobody; set its compute mode to default"
        if one.compute_mode is ComputeMode.ONE_PROCESS and one.num_processes:
            yield (
                f"device {one.number} ({one.name}) computes for one process at a time and has one; stop that process, "
                "mask the device, or set its compute mode to default"
            )
    fault = around.further_faults(devices)
    if fault is not None:
        yield fault


def _summary(inventory: Inventory, devices: Sequence[GpuFacts]) -> str:
    counts: dict[str, int] = {}
    for one in devices:
        label = f"{one.name} ({one.architecture or 'unknown architecture'}, {one.memory_bytes / _GIB:.0f} GiB)"
        counts[label] = counts.get(label, 0) + 1
    listed = ", ".join(f"{count} x {label}" for label, count in counts.items())
    return f"{listed}; driver {inventory.driver_version}, by {inventory.library}"


def _facts(inventory: Inventory, devices: Sequence[GpuFacts]) -> dict[str, str]:
    facts = {"library": inventory.library, "driver": inventory.driver_version, "devices": str(len(devices))}
    if inventory.runtime_limit is not None:
        facts["runtime_limit"] = ".".join(map(str, inventory.runtime_limit))
    for index, one in enumerate(devices):
        facts[f"device_{index}"] = f"{one.number}: {one.name}, {one.uuid}, {one.bus_id}".rstrip(", ")
    return facts


def link_table(links: Sequence[Link]) -> dict[str, str]:
    """Pairs of devices as text for diagnosis."""
    return {
        f"{link.first}-{link.second}": f"{link.kind.value}{'' if link.is_direct else ', through the host'}"
        for link in links
    }


def _absent(reason: str) -> ProbeResult:
    return ProbeResult(ProbeStatus.ABSENT, reason)


def _broken(reason: str, facts: Mapping[str, str] | None = None) -> ProbeResult:
    return ProbeResult(ProbeStatus.BROKEN, reason, facts or {})
