"""Stand-ins for machines with graphics processors: a host's files, a management library, a framework's module."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint_gpu.framework import FrameworkBuild
from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import GpuFacts, Inventory, Link, MemoryReading
from hardpoint_testing_torch.fake_graph_backend import FakeGraph, OperatorRecorder

GIB = 1 << 30
CUDA_BUILD = FrameworkBuild("2.13.0+cu128", cuda="12.8")
ROCM_BUILD = FrameworkBuild("2.13.0+rocm6.4", hip="6.4.43482-0f2d60242")
CPU_BUILD = FrameworkBuild("2.13.0+cpu")


def nobody(path: Path) -> bool:
    """A user who may open nothing."""
    del path
    return False


def everybody(path: Path) -> bool:
    del path
    return True


def write_host(root: Path, files: dict[str, str], *, may_open: Callable[[Path], bool] = everybody) -> Host:
    """A host of these files; a path that ends with a slash is a folder."""
    for name, text in files.items():
        place = root / name.lstrip("/")
        if name.endswith("/"):
            place.mkdir(parents=True, exist_ok=True)
            continue
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_text(text, encoding="utf-8")
    return Host(root, may_open)


def pci_device(address: str, vendor: str, *, device_class: str = "0x030200") -> dict[str, str]:
    """Files of a device on the bus that no driver holds."""
    place = f"sys/bus/pci/devices/{address}"
    return {f"{place}/vendor": vendor, f"{place}/class": device_class}


def hold(root: Path, address: str, driver: str) -> None:
    """Let a kernel driver hold the device on the bus."""
    drivers = root / "sys/bus/pci/drivers" / driver
    drivers.mkdir(parents=True, exist_ok=True)
    (root / "sys/bus/pci/devices" / address / "driver").symlink_to(drivers)


@dataclass
class FabricatedLibrary:
    """Answers from records; ``fault`` is raised instead where it is set. ``num_questions`` counts inventories."""

    devices: tuple[GpuFacts, ...] = ()
    used: int = GIB
    found_links: tuple[Link, ...] = ()
    fault: Exception | None = None
    runtime_limit: tuple[int, int] | None = (12, 8)
    num_questions: int = field(default=0, compare=False)

    def inventory(self) -> Inventory:
        self.num_questions += 1
        if self.fault is not None:
            raise self.fault
        return Inventory(
            library="fabricated", driver_version="1.2", runtime_limit=self.runtime_limit, devices=self.devices
        )

    def memory(self, number: int) -> MemoryReading:
        if self.fault is not None:
            raise self.fault
        found = [one for one in self.devices if one.number == number]
        if not found:
            raise ConfigError(f"device {number} does not exist")
        return MemoryReading(found[0].memory_bytes, self.used)

    def links(self) -> tuple[Link, ...]:
        return self.found_links


def gpu(number: int = 0, **fields: Any) -> GpuFacts:
    """A large device of a recent generation, unless ``fields`` say otherwise."""
    given: dict[str, Any] = {
        "name": "Some Device",
        "uuid": f"GPU-{number:08x}-0000",
        "memory_bytes": 80 * GIB,
        "capability": (9, 0),
        "architecture": "sm_90",
        "bus_id": f"0000:{number:02x}:00.0",
        "nodes": (f"/dev/device{number}",),
    }
    return GpuFacts(number=number, **{**given, **fields})


class RecordingDevice:
    """The framework's module of a device, as far as platforms and graph backends call it; ``calls`` are in order.

    A capture runs the host's part of the call at once, like a real one; ``fail_end`` spoils its end.
    """

    def __init__(self, *, count: int = 2, available: bool = True, fail_end: bool = False) -> None:
        self.calls: list[Any] = []
        self.count, self.available, self.fail_end = count, available, fail_end
        self.capturing = False
        self.reserved, self.peak = 2 * GIB, 3 * GIB
        self.streams: list[str] = ["main"]

    def is_available(self) -> bool:
        return self.available

    def device_count(self) -> int:
        return self.count

    def set_device(self, ordinal: int) -> None:
        self.calls.append(("set_device", ordinal))

    def synchronize(self, ordinal: int | None = None) -> None:
        self.calls.append(("synchronize", ordinal))

    def memory_reserved(self, ordinal: int) -> int:
        del ordinal
        return self.reserved

    def max_memory_reserved(self, ordinal: int) -> int:
        del ordinal
        return self.peak

    def graph_pool_handle(self) -> tuple[int, int]:
        self.calls.append("graph_pool_handle")
        return (0, len(self.calls))

    def is_current_stream_capturing(self) -> bool:
        return self.capturing

    def current_stream(self) -> RecordingStream:
        return RecordingStream(self, self.streams[-1])

    def Stream(self) -> RecordingStream:
        return RecordingStream(self, "side")

    def CUDAGraph(self) -> RecordingGraph | ReplayingGraph:
        return RecordingGraph(self)

    @contextmanager
    def stream(self, stream: RecordingStream) -> Iterator[None]:
        self.streams.append(stream.name)
        try:
            yield
        finally:
            self.streams.pop()


@dataclass
class RecordingStream:
    device: RecordingDevice
    name: str

    def wait_stream(self, other: RecordingStream) -> None:
        self.device.calls.append((self.name, "waits for", other.name))


@dataclass
class RecordingGraph:
    device: RecordingDevice

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        self.device.capturing = True
        self.device.calls.append(("begin", self.device.streams[-1], pool, capture_error_mode))

    def capture_end(self) -> None:
        self.device.capturing = False
        self.device.calls.append("end")
        if self.device.fail_end:
            raise RuntimeError("capture was invalidated")

    def replay(self) -> None:
        self.device.calls.append("replay")

    def reset(self) -> None:
        self.device.calls.append("reset")


class ReplayingDevice(RecordingDevice):
    """Its recordings compute: they repeat the operators that ran while they were made."""

    def CUDAGraph(self) -> ReplayingGraph:
        return ReplayingGraph(self)


class ReplayingGraph:
    """A capture has a beginning and an end here, and a call around it in the fake backend."""

    def __init__(self, device: ReplayingDevice) -> None:
        self.device = device
        self.recorder = OperatorRecorder(forbid_allocation=False)
        self.recording: FakeGraph[None] | None = None

    def capture_begin(self, *, pool: Any, capture_error_mode: str) -> None:
        del pool, capture_error_mode
        self.device.capturing = True
        self.recorder.__enter__()  # type: ignore[no-untyped-call]

    def capture_end(self) -> None:
        self.recorder.__exit__(None, None, None)  # type: ignore[no-untyped-call]
        self.device.capturing = False
        self.recording = FakeGraph(self.recorder.calls, (), None, 0, None)

    def replay(self) -> None:
        assert self.recording is not None
        self.recording.replay()

    def reset(self) -> None:
        self.recording = None
