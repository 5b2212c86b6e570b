"""What a probe answers, for everything that can be wrong with a machine: fabricated files, libraries and builds."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import CPU_BUILD, CUDA_BUILD, GIB, FabricatedLibrary, gpu, hold, nobody, pci_device, write_host
from hardpoint.interfaces.devices import DeviceMap
from hardpoint.interfaces.plugin import ProbeResult, ProbeStatus
from hardpoint_gpu.examination import Surroundings, Vendor, examine, link_table
from hardpoint_gpu.framework import FrameworkBuild
from hardpoint_gpu.inventory import ComputeMode, Inventory, LibraryFault, LibraryMissing, Link, LinkKind

MASK = "ACME_VISIBLE_DEVICES"
VENDOR = Vendor(
    maker="Acme",
    pci_id="0xacme",
    module="/proc/driver/acme",
    kernel_driver="acme",
    control_nodes=("/dev/acmectl",),
    masks=(MASK,),
    advice_container="give the container its devices",
    advice_nodes="join the group acme",
    advice_framework="install another build",
)
FILES = {"proc/driver/acme": "1", "dev/acmectl": "", "dev/device0": "", "dev/device1": ""}
ADDRESS = "0000:01:00.0"


def build_fault(build: FrameworkBuild, inventory: Inventory) -> str | None:
    del inventory
    return None if build.cuda else "built without it"


def asked(tmp_path: Path, library: FabricatedLibrary, **changes: Any) -> ProbeResult:
    """The answer on a sound machine, but for ``changes``."""
    environment = changes.pop("environment", {})
    files = changes.pop("files", FILES)
    around = Surroundings(
        library=library,
        environment=environment,
        device_map=lambda env: DeviceMap(MASK, env, None, library.inventory().number_of),
        build=CUDA_BUILD,
        runtime_fault=build_fault,
        host=write_host(tmp_path, files),
    )
    return examine(VENDOR, replace(around, **changes))


def test_sound_devices_are_available_and_described(tmp_path: Path) -> None:
    found = asked(tmp_path, FabricatedLibrary((gpu(0), gpu(1))))
    assert found.status is ProbeStatus.AVAILABLE
    assert found.reason == "2 x Some Device (sm_90, 80 GiB); driver 1.2, by fabricated"
    assert found.details["runtime_limit"] == "12.8"
    assert found.details["device_1"].startswith("1: Some Device, GPU-00000001")


@pytest.mark.parametrize("value", ["", "-1", "none", "NoDevFiles"])
def test_a_mask_that_hides_everything_means_absent(tmp_path: Path, value: str) -> None:
    """R12.33: launchers of processes without devices set it so."""
    found = asked(tmp_path, FabricatedLibrary((gpu(0),)), environment={MASK: value})
    if value == "NoDevFiles":
        assert (found.status, "'NoDevFiles' is no known device" in found.reason) == (ProbeStatus.BROKEN, True)
    else:
        assert found.status is ProbeStatus.ABSENT
        assert f"{MASK}={value!r} hides all devices" in found.reason


def test_a_host_without_driver_and_device_is_absent(tmp_path: Path) -> None:
    found = asked(tmp_path, FabricatedLibrary(fault=LibraryMissing("no library")), files={"dev/": ""})
    assert found == ProbeResult(ProbeStatus.ABSENT, "no library; no Acme device found")


@pytest.mark.parametrize("fault", [LibraryMissing("no library"), LibraryFault("versions differ")])
def test_a_loaded_driver_without_its_library_is_broken(tmp_path: Path, fault: Exception) -> None:
    """R12.25 as amended: what is there and cannot be used never becomes another platform silently."""
    found = asked(tmp_path, FabricatedLibrary(fault=fault))
    assert found.status is ProbeStatus.BROKEN
    assert str(fault) in found.reason


@pytest.mark.parametrize(("files", "status"), [(FILES, ProbeStatus.BROKEN), ({"dev/": ""}, ProbeStatus.ABSENT)])
def test_a_damaged_library_matters_where_there_are_devices(
    tmp_path: Path, files: dict[str, str], status: ProbeStatus
) -> None:
    """Whatever it raises: hosts without devices go on computing on the processor."""
    found = asked(tmp_path, FabricatedLibrary(fault=AttributeError("no such symbol")), files=files)
    assert found.status is status
    assert "raised AttributeError: no such symbol; install the management library anew" in found.reason


@pytest.mark.parametrize(
    ("driver", "status"), [(None, ProbeStatus.BROKEN), ("acme", ProbeStatus.BROKEN), ("vfio-pci", ProbeStatus.ABSENT)]
)
def test_a_device_on_the_bus_counts_unless_another_driver_holds_it(
    tmp_path: Path, driver: str | None, status: ProbeStatus
) -> None:
    library = FabricatedLibrary(fault=LibraryMissing("no library"))
    files = pci_device(ADDRESS, "0xacme")
    write_host(tmp_path, files)
    if driver is not None:
        hold(tmp_path, ADDRESS, driver)
    found = asked(tmp_path, library, files={})
    assert found.status is status
    assert (ADDRESS in found.reason) == (status is ProbeStatus.BROKEN)


@pytest.mark.parametrize(("vendor", "device_class"), [("0xother", "0x030200"), ("0xacme", "0x020000")])
def test_other_devices_on_the_bus_are_no_sign(tmp_path: Path, vendor: str, device_class: str) -> None:
    files = pci_device(ADDRESS, vendor, device_class=device_class)
    found = asked(tmp_path, FabricatedLibrary(fault=LibraryMissing("no library")), files=files)
    assert found.status is ProbeStatus.ABSENT


@pytest.mark.parametrize(("files", "status"), [(FILES, ProbeStatus.BROKEN), ({}, ProbeStatus.ABSENT)])
def test_a_driver_that_lists_nothing(tmp_path: Path, files: dict[str, str], status: ProbeStatus) -> None:
    """A container without its devices, where the driver of the host is seen."""
    found = asked(tmp_path, FabricatedLibrary(), files=files)
    assert found.status is status
    assert "lists no device" in found.reason
    assert (VENDOR.advice_container in found.reason) == (status is ProbeStatus.BROKEN)


def test_missing_device_files_mean_a_container(tmp_path: Path) -> None:
    files = {name: text for name, text in FILES.items() if name != "dev/device1"}
    found = asked(tmp_path, FabricatedLibrary((gpu(0), gpu(1))), files=files)
    assert found.status is ProbeStatus.BROKEN
    assert found.reason.startswith("/dev/device1 is missing here")
    masked = asked(tmp_path, FabricatedLibrary((gpu(0), gpu(1))), files=files, environment={MASK: "0"})
    assert masked.status is ProbeStatus.AVAILABLE, "files of masked devices are nobody's business"


def test_device_files_that_may_not_be_opened_name_the_group(tmp_path: Path) -> None:
    host = write_host(tmp_path, FILES, may_open=nobody)
    found = asked(tmp_path, FabricatedLibrary((gpu(0),)), host=host)
    assert (found.status, found.reason) == (
        ProbeStatus.BROKEN,
        "this user may not open /dev/acmectl; join the group acme",
    )


@pytest.mark.parametrize(
    ("build", "reason"), [(None, "torch is not installed; install another build"), (CPU_BUILD, "built without it")]
)
def test_a_framework_that_cannot_use_the_device(tmp_path: Path, build: FrameworkBuild | None, reason: str) -> None:
    found = asked(tmp_path, FabricatedLibrary((gpu(0),)), build=build)
    assert (found.status, found.reason) == (ProbeStatus.BROKEN, reason)


def test_a_framework_for_other_devices_means_that_nobody_wants_these(tmp_path: Path) -> None:
    found = asked(tmp_path, FabricatedLibrary((gpu(0),)), elsewhere="torch 2 is built for Emca")
    assert found == ProbeResult(ProbeStatus.ABSENT, "torch 2 is built for Emca, not for Acme devices")


@pytest.mark.parametrize(
    ("mode", "processes", "fault"),
    [
        (ComputeMode.NOBODY, 0, "set to compute for nobody"),
        (ComputeMode.ONE_PROCESS, 1, "one process at a time and has one"),
        (ComputeMode.ONE_PROCESS, 0, None),
        (ComputeMode.ONE_PROCESS, None, None),
        (ComputeMode.SHARED, 3, None),
    ],
)
def test_compute_modes(tmp_path: Path, mode: ComputeMode, processes: int | None, fault: str | None) -> None:
    library = FabricatedLibrary((gpu(0, compute_mode=mode, num_processes=processes),))
    found = asked(tmp_path, library)
    assert found.status is (ProbeStatus.AVAILABLE if fault is None else ProbeStatus.BROKEN)
    assert fault is None or fault in found.reason


def test_further_faults_see_the_visible_devices_only(tmp_path: Path) -> None:
    def fault(devices: Any) -> str | None:
        return f"saw {[one.number for one in devices]}"

    library = FabricatedLibrary((gpu(0), gpu(1)))
    found = asked(tmp_path, library, environment={MASK: "GPU-00000001"}, further_faults=fault)
    assert (found.status, found.reason) == (ProbeStatus.BROKEN, "saw [1]")


def test_a_mask_of_a_device_that_is_not_there_is_broken(tmp_path: Path) -> None:
    found = asked(tmp_path, FabricatedLibrary((gpu(0),)), environment={MASK: "5"})
    assert found.status is ProbeStatus.BROKEN
    assert "device 5 does not exist; there are: 0 (Some Device)" in found.reason


def test_partitions_are_reached_by_name_and_a_divided_device_by_its_first(tmp_path: Path) -> None:
    """Three numbers for two devices and a partition each: partitions come behind all whole devices."""
    whole = (gpu(0, is_divided=True), gpu(1))
    parts = tuple(
        gpu(number, parent=0, uuid=f"MIG-{number}", name="Part", memory_bytes=10 * GIB, nodes=("/dev/device0",))
        for number in (2, 3)
    )
    ask = partial(asked, tmp_path, FabricatedLibrary((*whole, *parts)))
    assert ask().details["device_0"].startswith("2: Part")
    assert ask().details["devices"] == "2"
    named = ask(environment={MASK: "MIG-3,MIG-2"})
    assert [named.details[f"device_{index}"][:7] for index in (0, 1)] == ["3: Part", "2: Part"]
    nothing_made = asked(tmp_path, FabricatedLibrary((gpu(0, is_divided=True),)))
    assert (nothing_made.status, "has none" in nothing_made.reason) == (ProbeStatus.BROKEN, True)


def test_links_are_told_as_text() -> None:
    links = [
        Link(first=0, second=1, kind=LinkKind.NVLINK, is_direct=True),
        Link(first=0, second=2, kind=LinkKind.ACROSS_NODES, is_direct=False),
    ]
    assert link_table(links) == {"0-1": "nvlink", "0-2": "across numa nodes, through the host"}
