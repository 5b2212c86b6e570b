"""The plugin keeps the rules of its kind."""

from __future__ import annotations

from hardpoint.testing.hooks_suite import HooksSuite


class TestAudit(HooksSuite):
    plugin = "audit"
