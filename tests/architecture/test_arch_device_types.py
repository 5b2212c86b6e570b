"""The kinds of device ids are types of their own, so that a mix-up fails type checking."""

from __future__ import annotations

from pathlib import Path

import pytest
from mypy import api

from workspace import ROOT

SNIPPET = """
from hardpoint.interfaces import DeviceMap, LogicalDevice, PhysicalDevice, VisibleDevice

def use(devices: DeviceMap, logical: LogicalDevice, visible: VisibleDevice, physical: PhysicalDevice) -> None:
    {line}
"""
SOUND = ("devices.physical_to_visible(devices.logical_to_physical(logical))", "devices.set_assigned([physical])")
MIXED = (
    "devices.logical_to_physical(physical)",
    "devices.logical_to_physical(visible)",
    "devices.logical_to_physical(0)",
    "devices.physical_to_visible(logical)",
    "devices.physical_to_visible(visible)",
    "devices.set_assigned([logical])",
    "devices.set_assigned([visible])",
    "devices.set_assigned([0])",
    "wrong: PhysicalDevice = devices.physical_to_visible(physical)",
)


@pytest.mark.slow
def test_mixing_the_kinds_fails_type_checking(tmp_path: Path) -> None:
    """R12.38, P12.8."""
    lines = dict(enumerate([*SOUND, *MIXED]))
    for number, line in lines.items():
        (tmp_path / f"snippet_{number}.py").write_text(SNIPPET.format(line=line))
    files = [str(tmp_path / f"snippet_{number}.py") for number in lines]
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(tmp_path / "cache")]
    report, errors, _ = api.run([*config, "--no-error-summary", "--follow-imports=silent", *files])
    assert errors == ""
    faulty = {int(line.partition("snippet_")[2].partition(".py")[0]) for line in report.splitlines() if "error" in line}
    assert [lines[number] for number in sorted(set(lines) - faulty)] == list(SOUND), report
