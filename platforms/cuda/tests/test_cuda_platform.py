"""The CUDA platform over a fabricated NVML: probe, ids, decisions by compute capability."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from gpu_doubles import CPU_BUILD, CUDA_BUILD, ROCM_BUILD, nobody, write_host
from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineSettings, LogicalDevice, PlatformKind
from hardpoint.interfaces.plugin import PluginContext, ProbeResult, ProbeStatus
from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint_cuda.capabilities import attention_priorities, features, supported_quantization
from hardpoint_cuda.nvml import NvmlLibrary
from hardpoint_cuda.platform import CudaPlatform, create, examine_cuda, keep_order
from hardpoint_gpu.framework import FrameworkBuild

FILES = {
    "proc/driver/nvidia/version": "NVRM version",
    **{f"dev/{name}": "" for name in ("nvidiactl", "nvidia-uvm", "nvidia0", "nvidia1", "nvidia3")},
}
FIRST = LogicalDevice(0)


def answer(double: Any, tmp_path: Path, **changes: Any) -> ProbeResult:
    """The probe's, on a sound machine but for ``changes``."""
    host = write_host(tmp_path, changes.get("files", FILES), may_open=changes.get("may_open", lambda path: True))
    library = NvmlLibrary(lambda: double, host)
    return examine_cuda(library, host, changes.get("build", CUDA_BUILD), changes.get("environment", {}))


class TestProbe:
    def test_sound(self, two_cards: Any, tmp_path: Path) -> None:
        found = answer(two_cards, tmp_path)
        assert found.status is ProbeStatus.AVAILABLE
        assert found.reason == "2 x NVIDIA H100 80GB HBM3 (sm_90, 80 GiB); driver 550.54.14, by NVML 12.550.54"
        assert two_cards.sessions == 0

    @pytest.mark.parametrize(
        ("changes", "status", "reason"),
        [
            ({"build": CPU_BUILD}, ProbeStatus.BROKEN, "2.13.0.cpu is built without CUDA; install a build with CUDA"),
            ({"build": ROCM_BUILD}, ProbeStatus.ABSENT, "is built for ROCm, not for NVIDIA devices"),
            ({"build": None}, ProbeStatus.BROKEN, "torch is not installed"),
            ({"build": FrameworkBuild("2.20", cuda="13.0")}, ProbeStatus.BROKEN, "up to 12.4, and torch 2.20.*13.0"),
            ({"build": FrameworkBuild("2.13", cuda="12.8")}, ProbeStatus.AVAILABLE, ""),
            ({"build": FrameworkBuild("2.1", cuda="11.8")}, ProbeStatus.AVAILABLE, ""),
            ({"may_open": nobody}, ProbeStatus.BROKEN, "may not open /dev/nvidiactl.*group `video`"),
            (
                {"files": {"proc/driver/nvidia/version": ""}},
                ProbeStatus.BROKEN,
                "/dev/nvidiactl is missing.*--gpus all",
            ),
            ({"environment": {"CUDA_VISIBLE_DEVICES": ""}}, ProbeStatus.ABSENT, "hides all devices"),
            ({"environment": {"CUDA_VISIBLE_DEVICES": "GPU-b"}}, ProbeStatus.AVAILABLE, "^1 x"),
            ({"environment": {"CUDA_VISIBLE_DEVICES": "GPU-x"}}, ProbeStatus.BROKEN, "GPU-x.*no UUID begins so"),
        ],
    )
    def test_what_goes_wrong(
        self, two_cards: Any, tmp_path: Path, changes: dict[str, Any], status: ProbeStatus, reason: str
    ) -> None:
        import re

        found = answer(two_cards, tmp_path, **changes)
        assert found.status is status, found.reason
        assert re.search(reason, found.reason), found.reason

    def test_a_loaded_driver_without_the_library(self, two_cards: Any, tmp_path: Path) -> None:
        two_cards.init_fault = 12
        assert answer(two_cards, tmp_path).status is ProbeStatus.BROKEN
        assert answer(two_cards, tmp_path / "other", files={"dev/": ""}).status is ProbeStatus.ABSENT

    def test_an_old_device_is_named(self, two_cards: Any, tmp_path: Path) -> None:
        two_cards.cards[1].capability = (6, 1)
        found = answer(two_cards, tmp_path)
        assert (found.status, "device 1 (NVIDIA H100 80GB HBM3) has compute capability 6.1" in found.reason) == (
            ProbeStatus.BROKEN,
            True,
        )
        masked = answer(two_cards, tmp_path, environment={"CUDA_VISIBLE_DEVICES": "0"})
        assert masked.status is ProbeStatus.AVAILABLE

    def test_another_order_matters_among_different_devices(self, two_cards: Any, tmp_path: Path) -> None:
        environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
        assert answer(two_cards, tmp_path, environment=environment).status is ProbeStatus.AVAILABLE
        two_cards.cards[1].name = "NVIDIA T4"
        found = answer(two_cards, tmp_path, environment=environment)
        assert (found.status, "set it to PCI_BUS_ID" in found.reason) == (ProbeStatus.BROKEN, True)
        assert answer(two_cards, tmp_path).status is ProbeStatus.AVAILABLE

    def test_a_shared_daemon_is_told(self, two_cards: Any, tmp_path: Path) -> None:
        files = {**FILES, "tmp/pipes/control": ""}
        found = answer(two_cards, tmp_path, files=files, environment={"CUDA_MPS_PIPE_DIRECTORY": "/tmp/pipes"})
        assert found.details["mps"] == "its control daemon runs here"
        assert "mps" not in answer(two_cards, tmp_path / "other").details


class TestFabricated(PlatformSuite):
    """The kit, over two devices of which nothing is real."""

    @pytest.fixture(autouse=True)
    def double(self, two_cards: Any) -> None:
        self.library = NvmlLibrary(lambda: two_cards)

    def create_platform(self, ctx: PluginContext) -> CudaPlatform:
        return CudaPlatform(library=self.library, environment={"CUDA_VISIBLE_DEVICES": "GPU-bbbb,GPU-aaaa"})


class TestDecisions:
    def test_what_it_is(self, two_cards: Any) -> None:
        on = CudaPlatform(library=NvmlLibrary(lambda: two_cards), environment={})
        assert (on.kind, on.is_cuda, on.device_type) == (PlatformKind.CUDA, True, "cuda")
        found = on.describe(FIRST)
        assert found.capability == (9, 0)
        assert found.features >= {"cuda", "sm_90", "fp8", "tma", "wgmma", "bf16"}
        assert on.attention_candidates() == ("flash_attn", "flashinfer", "triton", "torch_reference")
        assert on.capabilities()["links"] == {"0-1": "nvlink"}
        assert "fp8" in on.capabilities()["quantization"]["0"]

    def test_a_partition_is_described_as_itself(self, divided: Any) -> None:
        on = CudaPlatform(library=NvmlLibrary(lambda: divided), environment={"CUDA_VISIBLE_DEVICES": "MIG-2"})
        found = on.describe(FIRST)
        assert (found.name, "mig" in found.features) == ("NVIDIA A100 MIG 2g", True)
        assert on.devices.logical_to_visible(FIRST) == 0
        assert on.memory_budget(FIRST) < found.memory_bytes

    def test_a_cache_in_eight_bits_needs_a_device_that_reads_it(self, two_cards: Any) -> None:
        on = CudaPlatform(library=NvmlLibrary(lambda: two_cards), environment={})
        settings = EngineSettings(kv_cache_dtype="fp8_e4m3")
        on.check_and_update(settings)
        assert settings.kv_cache_dtype == "fp8_e4m3"
        two_cards.cards[0].capability = (7, 5)
        old = CudaPlatform(library=NvmlLibrary(lambda: two_cards), environment={})
        with pytest.raises(ConfigError, match=r"'fp8_e4m3' needs compute capability 8.0.*sm_75"):
            old.check_and_update(EngineSettings(kv_cache_dtype="fp8_e4m3"))

    def test_the_order_of_devices_is_kept_unless_the_operator_decided(self, monkeypatch: pytest.MonkeyPatch) -> None:
        environment = {"CUDA_DEVICE_ORDER": "FASTEST_FIRST"}
        keep_order(environment)
        assert environment["CUDA_DEVICE_ORDER"] == "FASTEST_FIRST"
        monkeypatch.delenv("CUDA_DEVICE_ORDER", raising=False)
        import os

        monkeypatch.setattr(os, "environ", dict(os.environ))
        create(PluginContext("cuda", 1, frozenset()), CudaPlatform().options)  # type: ignore[arg-type]
        assert os.environ["CUDA_DEVICE_ORDER"] == "PCI_BUS_ID"


LISTS: Mapping[tuple[int, int] | None, str] = {
    None: "triton",
    (6, 1): "torch_reference",
    (7, 0): "triton",
    (7, 5): "triton",
    (8, 0): "flash_attn",
    (8, 9): "flash_attn",
    (9, 0): "flash_attn",
    (10, 0): "flashinfer",
    (10, 3): "flashinfer",
    (12, 0): "flash_attn",
}


@pytest.mark.parametrize("capability", LISTS)
def test_attention_by_capability(capability: tuple[int, int] | None) -> None:
    names = attention_priorities(capability)
    assert names[0] == LISTS[capability]
    assert names[-1] == "torch_reference", "the one that needs nothing but the framework"
    assert len(set(names)) == len(names)


@pytest.mark.parametrize(
    ("capability", "has", "lacks"),
    [
        ((7, 5), {"sm_75", "tensor_cores"}, {"bf16", "fp8", "tma"}),
        ((8, 0), {"sm_80", "bf16", "async_copy"}, {"fp8", "tma"}),
        ((8, 9), {"sm_89", "fp8"}, {"tma", "wgmma"}),
        ((9, 0), {"sm_90", "fp8", "tma", "wgmma"}, {"fp4"}),
        ((10, 0), {"sm_100", "fp4", "tma"}, {"wgmma"}),
        (None, {"cuda"}, {"bf16"}),
    ],
)
def test_features_by_capability(capability: tuple[int, int] | None, has: set[str], lacks: set[str]) -> None:
    found = features(capability)
    assert has <= found
    assert not lacks & found


def test_quantization_by_capability() -> None:
    assert supported_quantization(None) == ()
    assert "fp8" in supported_quantization((8, 9))
    assert "fp8" not in supported_quantization((8, 6))
    assert set(supported_quantization((7, 0))) == {"gguf", "int8", "int4"}
