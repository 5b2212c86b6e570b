"""The ROCm platform over fabricated machines: probe, ids under three masks, decisions by architecture."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import CPU_BUILD, CUDA_BUILD, ROCM_BUILD, nobody, write_host
from hardpoint.errors import ConfigError
from hardpoint.interfaces import LogicalDevice, PlatformKind
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, ProbeStatus
from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint_gpu.host import Host
from hardpoint_rocm.capabilities import attention_priorities, features, supported_quantization
from hardpoint_rocm.kfd import KfdTree
from hardpoint_rocm.platform import RocmOptions, RocmPlatform, create, examine_rocm

FIRST, SECOND = LogicalDevice(0), LogicalDevice(1)


def answer(host: Host, **changes: Any) -> ProbeResult:
    """The probe's, with the kernel's files as the only source."""
    return examine_rocm(KfdTree(host), host, changes.get("build", ROCM_BUILD), changes.get("environment", {}))


class TestProbe:
    def test_sound(self, machine: Host) -> None:
        found = answer(machine)
        assert found.status is ProbeStatus.AVAILABLE
        assert found.reason.startswith(
            "1 x AMD gfx942 (gfx942, 192 GiB), 1 x AMD gfx950 (gfx950, 192 GiB); driver amdgpu"
        )

    @pytest.mark.parametrize(
        ("changes", "status", "reason"),
        [
            ({"build": CPU_BUILD}, ProbeStatus.BROKEN, "built without ROCm; install a build with ROCm"),
            ({"build": CUDA_BUILD}, ProbeStatus.ABSENT, "is built for CUDA, not for AMD devices"),
            ({"build": None}, ProbeStatus.BROKEN, "torch is not installed"),
            ({"environment": {"HIP_VISIBLE_DEVICES": "-1"}}, ProbeStatus.ABSENT, "HIP_VISIBLE_DEVICES='-1' hides"),
            ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, ProbeStatus.ABSENT, "CUDA_VISIBLE_DEVICES='' hides"),
            ({"environment": {"ROCR_VISIBLE_DEVICES": "1"}}, ProbeStatus.AVAILABLE, "^1 x AMD gfx950"),
            ({"environment": {"HIP_VISIBLE_DEVICES": "7"}}, ProbeStatus.BROKEN, "device 7 does not exist"),
        ],
    )
    def test_what_goes_wrong(self, machine: Host, changes: dict[str, Any], status: ProbeStatus, reason: str) -> None:
        found = answer(machine, **changes)
        assert found.status is status, found.reason
        assert re.search(reason, found.reason), found.reason

    def test_the_group_is_named_where_files_may_not_be_opened(self, machine: Host) -> None:
        found = answer(Host(machine.root, nobody))
        assert (found.status, "may not open /dev/kfd; add this user to the groups `render`" in found.reason) == (
            ProbeStatus.BROKEN,
            True,
        )

    def test_a_container_without_its_device_files(self, machine: Host) -> None:
        (machine.root / "dev/dri/renderD136").unlink()
        found = answer(machine)
        assert found.status is ProbeStatus.BROKEN
        assert found.reason.startswith("/dev/dri/renderD136 is missing here")
        assert answer(machine, environment={"HIP_VISIBLE_DEVICES": "0"}).status is ProbeStatus.AVAILABLE

    def test_a_host_without_devices_is_absent(self, tmp_path: Path) -> None:
        assert answer(write_host(tmp_path, {})).status is ProbeStatus.ABSENT

    def test_an_old_device_is_named(self, machine: Host) -> None:
        place = "sys/class/kfd/kfd/topology/nodes/2/properties"
        write_host(machine.root, {place: "simd_count 4\ngfx_target_version 80003\ndrm_render_minor 128\n"})
        found = answer(machine)
        assert (found.status, "architecture gfx803" in found.reason) == (ProbeStatus.BROKEN, True)


class TestFabricated(PlatformSuite):
    """The kit, over two devices of which nothing is real."""

    @pytest.fixture(autouse=True)
    def files(self, machine: Host) -> None:
        self.host = machine

    def create_platform(self, ctx: PluginContext) -> RocmPlatform:
        return RocmPlatform(library=KfdTree(self.host), environment={})


class TestMasks:
    @pytest.mark.parametrize(
        ("environment", "physical", "visible"),
        [
            ({}, [0, 1], [0, 1]),
            ({"HIP_VISIBLE_DEVICES": "1,0"}, [1, 0], [0, 1]),
            ({"CUDA_VISIBLE_DEVICES": "1,0"}, [1, 0], [0, 1]),
            ({"HIP_VISIBLE_DEVICES": "0,1", "CUDA_VISIBLE_DEVICES": "1,0"}, [0, 1], [0, 1]),
            ({"ROCR_VISIBLE_DEVICES": "1,0"}, [1, 0], [0, 1]),
            ({"ROCR_VISIBLE_DEVICES": "1,0", "HIP_VISIBLE_DEVICES": "1,0"}, [0, 1], [0, 1]),
            ({"HIP_VISIBLE_DEVICES": "GPU-000000000000abca,GPU-000000000000abc2"}, [1, 0], [0, 1]),
            ({"ROCR_VISIBLE_DEVICES": "GPU-000000000000abca,0", "HIP_VISIBLE_DEVICES": "0,1"}, [1, 0], [0, 1]),
        ],
    )
    def test_three_masks_make_one_map(
        self, machine: Host, environment: Mapping[str, str], physical: list[int], visible: list[int]
    ) -> None:
        """R12.31, R12.32, R12.34."""
        devices = RocmPlatform(library=KfdTree(machine), environment=environment).devices
        assert [devices.logical_to_physical(device) for device in (FIRST, SECOND)] == physical
        assert [devices.logical_to_visible(device) for device in (FIRST, SECOND)] == visible

    def test_masks_that_contradict_each_other(self, machine: Host) -> None:
        """R12.37."""
        with pytest.raises(ConfigError, match=r"HIP_VISIBLE_DEVICES='2' after ROCR_VISIBLE_DEVICES='1'.*counts beyond"):
            RocmPlatform(
                library=KfdTree(machine), environment={"ROCR_VISIBLE_DEVICES": "1", "HIP_VISIBLE_DEVICES": "2"}
            )


class TestDecisions:
    def test_what_it_is(self, machine: Host) -> None:
        on = RocmPlatform(library=KfdTree(machine), environment={})
        assert (on.kind, on.is_rocm, on.is_cuda, on.device_type) == (PlatformKind.ROCM, True, False, "cuda")
        found = on.describe(FIRST)
        assert found.capability == (9, 4)
        assert found.features == {"rocm", "gfx942", "matrix_cores", "fp8_fnuz", "wave64"}
        assert "fp8" in on.capabilities()["quantization"]["1"]
        assert on.attention_candidates() == ("triton", "flash_attn", "torch_reference")

    def test_the_factory_gives_the_platform(self) -> None:
        made = create(PluginContext("rocm", 1, frozenset()), RocmOptions(block_size=64))
        assert (made.kind, made.options.block_size) == (PlatformKind.ROCM, 64)


@pytest.mark.parametrize(
    ("architecture", "names"),
    [
        ("gfx942", ("triton", "flash_attn", "torch_reference")),
        ("gfx950:sramecc+:xnack-", ("triton", "flash_attn", "torch_reference")),
        ("gfx90a", ("triton", "flash_attn", "torch_reference")),
        ("gfx1100", ("triton", "torch_reference")),
        ("", ("triton", "torch_reference")),
    ],
)
def test_attention_by_architecture(architecture: str, names: tuple[str, ...]) -> None:
    assert attention_priorities(architecture) == names


@pytest.mark.parametrize(
    ("architecture", "has", "lacks"),
    [
        ("gfx950", {"rocm", "gfx950", "fp8", "matrix_cores", "wave64"}, {"fp8_fnuz"}),
        ("gfx90a", {"gfx90a", "matrix_cores"}, {"fp8", "fp8_fnuz"}),
        ("gfx1201", {"fp8", "wave32"}, {"matrix_cores", "wave64"}),
        ("", {"rocm"}, {"fp8"}),
    ],
)
def test_features_by_architecture(architecture: str, has: set[str], lacks: set[str]) -> None:
    found = features(architecture)
    assert has <= found
    assert not lacks & found


def test_quantization_by_architecture() -> None:
    assert supported_quantization("") == ()
    assert "fp8" in supported_quantization("gfx942:sramecc+")
    assert "fp8" not in supported_quantization("gfx90a")
