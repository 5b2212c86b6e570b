"""Decisions for devices that are only described."""

from __future__ import annotations

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import DeviceDescription, EngineSettings, LogicalDevice
from hardpoint.testing.doctor_device import FabricatingPlatform, described_on, parse_device
from hardpoint_cuda.platform import CudaOptions, CudaPlatform

GIB = 1 << 30


def on(text: str, count: int = 1) -> tuple[CudaPlatform, DeviceDescription]:
    platform, device = described_on(CudaPlatform(environment={}), parse_device(text).description, count)
    assert isinstance(platform, CudaPlatform)
    return platform, device


@pytest.mark.parametrize(
    ("text", "first", "dtype"),
    [
        ("cuda sm_75 16GiB", "triton", "float16"),
        ("cuda sm_80 80GiB", "flash_attn", "bfloat16"),
        ("cuda sm_90 80GiB", "flash_attn", "bfloat16"),
        ("cuda sm_100 180GiB", "flashinfer", "bfloat16"),
    ],
)
def test_candidates_and_settings_are_those_of_the_described_device(text: str, first: str, dtype: str) -> None:
    """R5.3, R5.16."""
    platform, device = on(text)
    assert platform.attention_candidates()[0] == first
    settings = EngineSettings()
    platform.check_and_update(settings)
    assert settings.dtype == dtype
    assert (device.device_type, device.name) == ("cuda", text)
    assert device.features >= {"cuda", text.split()[1]}


@pytest.mark.parametrize(
    ("text", "dtype", "size"),
    [
        ("cuda sm_90 80GiB", "fp8", 64),
        ("cuda sm_90 80GiB", "float8_e4m3fn", 64),
        ("cuda sm_90 80GiB", None, 16),
        ("cuda sm_90 80GiB", "int8_per_token_head", 16),
        ("cuda sm_100 180GiB", "fp8", 16),
        ("cuda sm_89 24GiB", "fp8", 16),
    ],
)
def test_blocks_are_as_large_as_kernels_need(text: str, dtype: str | None, size: int) -> None:
    """R5.15: the manager's block size comes from what the backends of the device allow."""
    platform, _ = on(text)
    settings = EngineSettings(kv_cache_dtype=dtype)
    platform.check_and_update(settings)
    assert settings.preferred_block_size == size
    assert settings.block_size is None, "left to the rules of all candidates"


def test_there_are_as_many_as_were_asked_for() -> None:
    platform, _ = on("cuda sm_90 80GiB", 2)
    platform.check_and_update(EngineSettings(world_size=2))
    assert platform.describe(LogicalDevice(1)).memory_bytes == 80 * GIB
    assert platform.memory_used(LogicalDevice(1)) == 0
    assert 0 < platform.memory_budget(LogicalDevice(0)) < 80 * GIB
    assert platform.capabilities()["links"] == {} or not platform.capabilities()["links"]
    with pytest.raises(ConfigError, match="3 ranks were asked for, but 2"):
        platform.check_and_update(EngineSettings(world_size=3))


def test_the_platform_itself_stays_as_it_was() -> None:
    here = CudaPlatform(CudaOptions(attention_backends=("mine",)), environment={})
    library = here.library
    assert isinstance(here, FabricatingPlatform)
    made = here.with_device(parse_device("cuda sm_90 80GiB").description, 1)
    assert here.library is library
    assert tuple(made.attention_candidates()) == ("mine",), "what the operator set holds there, too"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("cuda 80GiB", "names no architecture"),
        ("cuda sm_90", "says nothing of its memory"),
        ("cuda sm_61 24GiB", "has compute capability 6.1, and no start would use it; describe one of 7.0 or newer"),
    ],
)
def test_what_a_description_must_say(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=f"{said}.*'cuda sm_90 80GiB'"):
        on(text)
