"""The installed CPU platform is held to the kit, like anybody's."""

from __future__ import annotations

import pickle
from typing import ClassVar

import torch

from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint_cpu.platform import CpuOptions, CpuPlatform


class TestCpu(PlatformSuite):
    plugin: ClassVar[str | None] = "cpu"
    device_present: ClassVar[bool] = True


def test_it_and_its_options_survive_pickling() -> None:
    """I12.7, P12.9: with the framework loaded, whose namespace answers for names the platform lacks."""
    options = CpuOptions(block_size=8)
    again = pickle.loads(pickle.dumps(CpuPlatform(options)))  # noqa: S301 (own bytes)
    assert (type(again), again.options, again.host) == (CpuPlatform, options, CpuPlatform(options).host)
    assert pickle.loads(pickle.dumps(CpuPlatform)) is CpuPlatform  # noqa: S301 (own bytes)
    assert again.device_count is torch.cpu.device_count
