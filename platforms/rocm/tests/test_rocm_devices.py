"""What the kernel's files and AMD SMI tell becomes the same records, and each stands in for the other."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import write_host
from hardpoint.errors import ConfigError
from hardpoint_gpu.host import Host
from hardpoint_gpu.inventory import LibraryFault, LibraryMissing, Link, LinkKind, MemoryReading
from hardpoint_rocm import amdsmi_library as module
from hardpoint_rocm.amdsmi_library import AmdSmiLibrary
from hardpoint_rocm.kfd import KfdTree, gfx_name, gfx_version
from hardpoint_rocm.platform import AmdDevices

GIB = 1 << 30
NODES = "sys/class/kfd/kfd/topology/nodes"


@pytest.mark.parametrize(
    ("number", "name", "version"),
    [
        (90402, "gfx942", (9, 4)),
        (90010, "gfx90a", (9, 0)),
        (90008, "gfx908", (9, 0)),
        (90500, "gfx950", (9, 5)),
        (110000, "gfx1100", (11, 0)),
        (120001, "gfx1201", (12, 0)),
    ],
)
def test_names_of_architectures(number: int, name: str, version: tuple[int, int]) -> None:
    assert gfx_name(number) == name
    assert gfx_version(name) == version
    assert gfx_version(f"{name}:sramecc+:xnack-") == version


@pytest.mark.parametrize("text", ["", "gfx", "gfx9", "sm_90", "gfxabc", "gfx9z0"])
def test_other_texts_are_no_architecture(text: str) -> None:
    assert gfx_version(text) is None


class TestTree:
    def test_devices_in_the_order_of_their_nodes(self, machine: Host) -> None:
        found = KfdTree(machine).inventory()
        assert found.driver_version == "amdgpu of 6.10.5"
        rows = [(one.number, one.architecture, one.uuid, one.bus_id, one.nodes, one.numa_node) for one in found.devices]
        assert rows == [
            (0, "gfx942", "GPU-000000000000abc2", "0000:07:00.0", ("/dev/dri/renderD128",), 1),
            (1, "gfx950", "GPU-000000000000abca", "0000:0f:00.0", ("/dev/dri/renderD136",), 1),
        ]
        assert [one.memory_bytes for one in found.devices] == [192 * GIB] * 2
        assert found.devices[0].name == "AMD gfx942"

    def test_memory_is_read_where_the_driver_keeps_count(self, machine: Host) -> None:
        assert KfdTree(machine).memory(1) == MemoryReading(192 * GIB, 3 * GIB)
        with pytest.raises(ConfigError, match="device 2 does not exist; there are 2"):
            KfdTree(machine).memory(2)

    @pytest.mark.parametrize(("kind", "expected"), [(11, LinkKind.XGMI), (2, LinkKind.PCIE_HOST)])
    def test_links(self, machine: Host, kind: int, expected: LinkKind) -> None:
        for node, other in ((2, 10), (10, 2)):
            write_host(machine.root, {f"{NODES}/{node}/io_links/1/properties": f"type {kind}\nnode_to {other}\n"})
        assert KfdTree(machine).links() == (Link(first=0, second=1, kind=expected, is_direct=True),)

    def test_devices_without_a_link_reach_each_other_through_the_host(self, machine: Host) -> None:
        write_host(machine.root, {f"{NODES}/{node}/io_links/1/properties": "" for node in (2, 10)})
        assert KfdTree(machine).links() == (Link(first=0, second=1, kind=LinkKind.UNKNOWN, is_direct=False),)

    def test_a_host_without_the_driver_has_no_devices(self, tmp_path: Path) -> None:
        with pytest.raises(LibraryMissing, match="offers no compute devices"):
            KfdTree(write_host(tmp_path, {})).inventory()


class TestAmdSmi:
    def test_devices_in_the_order_of_hip(self, two_cards: Any) -> None:
        found = AmdSmiLibrary(lambda: two_cards).inventory()
        assert (found.library, found.driver_version) == ("AMD SMI", "amdgpu 6.10.5")
        rows = [(one.number, one.architecture, one.uuid, one.capability, one.nodes) for one in found.devices]
        assert rows == [
            (0, "gfx942", "GPU-000000000000abc2", (9, 4), ("/dev/dri/renderD128",)),
            (1, "gfx950", "GPU-000000000000abca", (9, 5), ("/dev/dri/renderD136",)),
        ]
        assert two_cards.sessions == 0

    def test_without_numbers_of_hip_the_librarys_own_order_stays(self, two_cards: Any) -> None:
        two_cards.cards[0].hip = None
        found = AmdSmiLibrary(lambda: two_cards).inventory()
        assert [one.architecture for one in found.devices] == ["gfx950", "gfx942"]

    def test_what_a_version_does_not_tell_is_left_open(self, two_cards: Any) -> None:
        two_cards.lacks = {
            "amdsmi_get_gpu_enumeration_info",
            "amdsmi_topo_get_numa_node_number",
            "amdsmi_get_gpu_driver_info",
            "amdsmi_topo_get_link_type",
        }
        ask = AmdSmiLibrary(lambda: two_cards)
        found = ask.inventory()
        assert found.driver_version == "amdgpu unknown"
        assert [(one.numa_node, one.nodes) for one in found.devices] == [(None, ())] * 2
        assert ask.links()[0].kind is LinkKind.UNKNOWN

    def test_memory_and_links(self, two_cards: Any) -> None:
        two_cards.cards[0].used = 9 * GIB
        ask = AmdSmiLibrary(lambda: two_cards)
        assert ask.memory(1) == MemoryReading(192 * GIB, 9 * GIB)
        assert ask.links() == (Link(first=0, second=1, kind=LinkKind.XGMI, is_direct=True),)
        with pytest.raises(ConfigError, match="device 2 does not exist"):
            ask.memory(2)

    def test_kinds_of_links_go_by_name(self, two_cards: Any) -> None:
        """Their numbers changed between versions of the package."""
        del two_cards.AmdSmiLinkType
        two_cards.cards[1].links = {1: (1, False)}
        found = AmdSmiLibrary(lambda: two_cards).links()
        assert found == (Link(first=0, second=1, kind=LinkKind.PCIE_HOST, is_direct=False),)

    def test_a_refusal_is_told_in_one_line(self, two_cards: Any) -> None:
        two_cards.lacks = {"amdsmi_get_gpu_memory_total"}
        with pytest.raises(LibraryFault, match="^AMD SMI: Error code: 2 . not supported; see whether `amd-smi list`"):
            AmdSmiLibrary(lambda: two_cards).inventory()
        assert two_cards.sessions == 0

    @pytest.mark.parametrize("error", [ImportError("no module"), KeyError("libamd_smi.so"), OSError("cannot open")])
    def test_a_package_that_does_not_load_is_missing_and_silent(
        self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], error: Exception
    ) -> None:
        def fail(name: str) -> Any:
            print("Unable to find the library")
            raise error

        monkeypatch.setattr(module, "import_module", fail)
        with pytest.raises(LibraryMissing, match="amdsmi or its library is not installed"):
            AmdSmiLibrary().inventory()
        assert capsys.readouterr().out == ""


class TestBoth:
    def test_the_library_leads_where_it_sees_the_same_devices(self, two_cards: Any, machine: Host) -> None:
        both = AmdDevices(AmdSmiLibrary(lambda: two_cards), KfdTree(machine))
        assert both.inventory().library == "AMD SMI"
        assert both.memory(0) == MemoryReading(192 * GIB, 5 * GIB)

    def test_in_a_container_the_files_lead(self, two_cards: Any, machine: Host) -> None:
        """The library lists the host's devices there, the files those that this process may use."""
        two_cards.cards = two_cards.cards[:1]
        assert (
            AmdDevices(AmdSmiLibrary(lambda: two_cards), KfdTree(machine)).inventory().library.startswith("the kernel")
        )

    def test_the_files_do_where_the_library_is_missing(self, two_cards: Any, machine: Host) -> None:
        two_cards.lacks = {"amdsmi_init"}
        both = AmdDevices(AmdSmiLibrary(lambda: two_cards), KfdTree(machine))
        assert len(both.inventory().devices) == 2
        assert both.links()[0].kind is LinkKind.XGMI

    def test_both_tell_the_same(self, two_cards: Any, machine: Host) -> None:
        pairs = zip(
            AmdSmiLibrary(lambda: two_cards).inventory().devices, KfdTree(machine).inventory().devices, strict=True
        )
        for one, other in pairs:
            assert (one.number, one.uuid, one.architecture, one.capability, one.memory_bytes, one.nodes) == (
                other.number,
                other.uuid,
                other.architecture,
                other.capability,
                other.memory_bytes,
                other.nodes,
            )
