"""The platform keeps the rules of its kind."""

from __future__ import annotations

from hardpoint.testing.platform_suite import PlatformSuite


class TestBackground(PlatformSuite):
    plugin = "background"
