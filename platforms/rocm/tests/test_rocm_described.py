"""Decisions for devices that are only described."""

from __future__ import annotations

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces.platform import LogicalDevice
from hardpoint.testing.doctor_device import described_on, parse_device
from hardpoint_rocm.platform import RocmPlatform


@pytest.mark.parametrize(
    ("text", "candidates", "feature"),
    [
        ("rocm gfx942 192GiB", ("triton", "flash_attn", "torch_reference"), "wave64"),
        ("rocm gfx1100 24GiB", ("triton", "torch_reference"), "wave32"),
    ],
)
def test_candidates_are_those_of_the_described_device(text: str, candidates: tuple[str, ...], feature: str) -> None:
    """R5.3, R5.16."""
    platform, device = described_on(RocmPlatform(environment={}), parse_device(text).description, 1)
    assert tuple(platform.attention_candidates()) == candidates
    assert device.features >= {"rocm", text.split()[1], feature}
    assert platform.describe(LogicalDevice(0)).memory_bytes == device.memory_bytes


def test_an_architecture_of_another_maker_is_refused() -> None:
    with pytest.raises(ConfigError, match="no architecture of this platform; write it as in 'rocm gfx942 192GiB'"):
        described_on(RocmPlatform(environment={}), parse_device("rocm sm_90 80GiB").description, 1)
