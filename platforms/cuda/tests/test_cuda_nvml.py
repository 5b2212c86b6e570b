"""What NVML tells becomes records; what it refuses becomes a reason. Nothing stays open."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import write_host
from hardpoint.errors import ConfigError
from hardpoint_cuda import nvml as module
from hardpoint_cuda.nvml import NvmlLibrary
from hardpoint_gpu.inventory import ComputeMode, GpuFacts, LibraryFault, LibraryMissing, Link, LinkKind, MemoryReading

GIB = 1 << 30


def library(double: Any, tmp_path: Path, files: dict[str, str] | None = None) -> NvmlLibrary:
    return NvmlLibrary(lambda: double, write_host(tmp_path, files or {}))


def test_an_inventory_of_whole_devices(two_cards: Any, tmp_path: Path) -> None:
    files = {"sys/bus/pci/devices/0000:2c:00.0/numa_node": "1", "sys/bus/pci/devices/0000:1b:00.0/numa_node": "-1"}
    found = library(two_cards, tmp_path, files).inventory()
    assert (found.library, found.driver_version, found.runtime_limit) == ("NVML 12.550.54", "550.54.14", (12, 4))
    assert found.devices[1] == GpuFacts(
        number=1,
        name="NVIDIA H100 80GB HBM3",
        uuid="GPU-bbbb-2",
        memory_bytes=80 * GIB,
        capability=(9, 0),
        architecture="sm_90",
        bus_id="00000000:2C:00.0",
        nodes=("/dev/nvidia3",),
        numa_node=1,
        num_processes=0,
    )
    assert found.devices[0].numa_node is None, "minus one is what the kernel says where there is no node"
    assert two_cards.sessions == 0


def test_texts_may_be_bytes(two_cards: Any, tmp_path: Path) -> None:
    """Older versions of the package do not decode them."""
    plain = library(two_cards, tmp_path).inventory()
    two_cards.as_bytes = True
    assert library(two_cards, tmp_path).inventory() == plain


def test_partitions_come_behind_all_devices(divided: Any, tmp_path: Path) -> None:
    found = library(divided, tmp_path).inventory()
    rows = [(one.number, one.uuid, one.parent, one.is_divided, one.memory_bytes // GIB) for one in found.devices]
    assert rows == [
        (0, "GPU-a", None, True, 80),
        (1, "GPU-b", None, False, 80),
        (2, "MIG-3", 0, False, 30),
        (3, "MIG-2", 0, False, 20),
    ]
    assert found.devices[3].capability == (8, 0)
    assert found.device(0).uuid == "MIG-3"


def test_memory_counts_what_the_driver_keeps_for_itself(divided: Any, tmp_path: Path) -> None:
    """The double's ``used`` leaves it out, as some versions do."""
    ask = library(divided, tmp_path)
    divided.cards[1].free = 50 * GIB
    assert ask.memory(1) == MemoryReading(80 * GIB, 30 * GIB)
    divided.cards[0].parts[2].free = 5 * GIB
    assert ask.memory(3) == MemoryReading(20 * GIB, 15 * GIB)
    with pytest.raises(ConfigError, match="device 9 does not exist"):
        ask.memory(9)
    assert divided.sessions == 0


def test_a_device_in_the_hosts_memory_has_the_hosts(two_cards: Any, tmp_path: Path) -> None:
    two_cards.cards[0].lacks = frozenset({"nvmlDeviceGetMemoryInfo"})
    files = {"proc/meminfo": "MemTotal: 2048 kB\nMemAvailable: 512 kB\nHugePages_Total: 0\n"}
    ask = library(two_cards, tmp_path, files)
    assert ask.memory(0) == MemoryReading(2048 * 1024, 1536 * 1024)
    assert ask.inventory().devices[0].memory_bytes == 2048 * 1024


@pytest.mark.parametrize(
    "query",
    [
        "nvmlDeviceGetMinorNumber",
        "nvmlDeviceGetMigMode",
        "nvmlDeviceGetComputeMode",
        "nvmlDeviceGetComputeRunningProcesses",
    ],
)
def test_what_a_device_does_not_tell_is_left_open(two_cards: Any, tmp_path: Path, query: str) -> None:
    two_cards.cards[0].lacks = frozenset({query})
    found = library(two_cards, tmp_path).inventory().devices[0]
    assert (found.name, found.compute_mode, found.is_divided) == ("NVIDIA H100 80GB HBM3", ComputeMode.SHARED, False)


@pytest.mark.parametrize(
    ("mode", "expected"),
    [(0, ComputeMode.SHARED), (2, ComputeMode.NOBODY), (3, ComputeMode.ONE_PROCESS), (7, ComputeMode.SHARED)],
)
def test_compute_modes(two_cards: Any, tmp_path: Path, mode: int, expected: ComputeMode) -> None:
    two_cards.cards[0].mode = mode
    two_cards.cards[0].processes = 2
    found = library(two_cards, tmp_path).inventory().devices[0]
    assert (found.compute_mode, found.num_processes) == (expected, 2)


@pytest.mark.parametrize(
    ("ancestor", "peers", "kind", "is_direct"),
    [
        (30, (0, 1, 2), LinkKind.NVLINK, True),
        (10, (0, 1), LinkKind.PCIE_SWITCH, True),
        (20, (0,), LinkKind.PCIE_SWITCH, False),
        (30, (), LinkKind.PCIE_HOST, False),
        (40, (), LinkKind.SAME_NODE, False),
        (50, (), LinkKind.ACROSS_NODES, False),
        (0, (), LinkKind.SAME_BOARD, False),
        (99, (), LinkKind.UNKNOWN, False),
    ],
)
def test_links(
    two_cards: Any, tmp_path: Path, ancestor: int, peers: tuple[int, ...], kind: LinkKind, is_direct: bool
) -> None:
    first, second = two_cards.cards
    first.ancestors, first.peers = {second.uuid: ancestor}, {second.uuid: peers}
    assert library(two_cards, tmp_path).links() == (Link(first=0, second=1, kind=kind, is_direct=is_direct),)


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        (12, LibraryMissing, "libnvidia-ml.so.1 is not here.*--gpus all"),
        (9, LibraryMissing, "kernel driver is not loaded.*modprobe nvidia"),
        (4, LibraryFault, "may not open.*--gpus all"),
        (18, LibraryFault, "different versions.*restart"),
        (15, LibraryFault, "lost"),
        (999, LibraryFault, "code 999; see whether `nvidia-smi` works"),
    ],
)
def test_each_refusal_says_what_to_do(
    two_cards: Any, tmp_path: Path, code: int, kind: type[Exception], text: str
) -> None:
    two_cards.init_fault = code
    for ask in (library(two_cards, tmp_path).inventory, library(two_cards, tmp_path).links):
        with pytest.raises(kind, match=text):
            ask()


def test_a_fault_in_the_middle_closes_the_library(two_cards: Any, tmp_path: Path) -> None:
    two_cards.fault = 15
    with pytest.raises(LibraryFault, match="lost"):
        library(two_cards, tmp_path).inventory()
    assert two_cards.sessions == 0


def test_without_the_package_it_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(name: str) -> Any:
        raise ImportError(f"No module named {name!r}")

    monkeypatch.setattr(module, "import_module", fail)
    with pytest.raises(LibraryMissing, match="pip install nvidia-ml-py"):
        NvmlLibrary().inventory()


def test_the_double_speaks_as_the_package_does() -> None:
    """Every name that is called exists there, and the codes are its own."""
    pynvml = pytest.importorskip("pynvml")
    source = Path(module.__file__).read_text(encoding="utf-8")
    names = {
        word.strip("(),:[]") for word in source.replace("(", " ").replace(".", " ").split() if word.startswith("nvml")
    }
    called = {name for name in names if len(name) > 4 and name[4].isupper()}
    assert len(called) > 15
    assert [name for name in sorted(called) if not hasattr(pynvml, name)] == []
    codes = {status.name: status.value for status in module._Status}
    theirs = {name: getattr(pynvml, f"NVML_ERROR_{name}", None) for name in codes}
    theirs["VERSION_MISMATCH"] = pynvml.NVML_ERROR_LIB_RM_VERSION_MISMATCH
    assert codes == theirs
