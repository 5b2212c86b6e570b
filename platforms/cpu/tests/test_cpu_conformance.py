"""The installed CPU platform is held to the kit, like anybody's."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.platform_suite import PlatformSuite


class TestCpu(PlatformSuite):
    plugin: ClassVar[str | None] = "cpu"
    device_present: ClassVar[bool] = True
