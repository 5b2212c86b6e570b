"""The platforms for graphics processors change nothing for those who have none."""

from __future__ import annotations

from hardpoint.interfaces.plugin import ProbeStatus
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.platform_selection import select_platform
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection


def test_installed_without_a_device_they_are_absent_and_the_processor_is_taken() -> None:
    """R12.25, R12.26: tests hide devices, so that this holds on every machine."""
    found = discover()
    name, probes = select_platform(build_plan(found, PluginSelection()), installed=found)
    answers = {probe.name: probe.result for probe in probes}
    assert name == "cpu"
    for platform in ("cuda", "rocm"):
        assert answers[platform].status is ProbeStatus.ABSENT, answers[platform].reason
        assert "hides all devices" in answers[platform].reason
