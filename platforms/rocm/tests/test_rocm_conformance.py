"""The installed ROCm platform is held to the kit, like anybody's; with a device also to the part that binds one."""

from __future__ import annotations

import pickle
from typing import ClassVar

import pytest

from hardpoint.interfaces.plugin import ProbeStatus
from hardpoint.plugins.plan import PlannedPlugin
from hardpoint.testing.platform_suite import PlatformSuite
from hardpoint_rocm.platform import RocmOptions, RocmPlatform, probe


class TestRocm(PlatformSuite):
    plugin: ClassVar[str | None] = "rocm"
    device_present: ClassVar[bool] = probe().status is ProbeStatus.AVAILABLE

    @pytest.mark.slow
    def test_importing_it_changes_nothing(self, planned: PlannedPlugin) -> None:
        super().test_importing_it_changes_nothing(planned)


def test_it_and_its_options_survive_pickling() -> None:
    """I12.7, P12.9."""
    options = RocmOptions(block_size=32)
    again = pickle.loads(pickle.dumps(RocmPlatform(options, environment={})))  # noqa: S301 (own bytes)
    assert (type(again), again.options) == (RocmPlatform, options)
