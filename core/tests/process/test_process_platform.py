"""R12.29: every process of an instance has the launcher's platform, and one that would not have it stops."""

from __future__ import annotations

import importlib
import logging
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.errors import PluginMismatchError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan, SelectedBy
from hardpoint.plugins.platform_selection import select_platform
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.process import boot
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_platform import FakePlatform, install_fake_platform

ROLES = ({ProcessRole.API}, {ProcessRole.ENGINE}, {ProcessRole.WORKER}, {ProcessRole.ENGINE, ProcessRole.WORKER})
CHILD = """
import sys
from hardpoint.process import boot
from hardpoint.roles import ProcessRole
runtime = boot(bytes.fromhex(sys.argv[1]), {ProcessRole(role) for role in sys.argv[2].split(",")})
platform = runtime.platform
print(type(platform).__module__, type(platform).__qualname__, platform.name, platform.kind, "torch" in sys.modules)
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    level = logging.getLogger("hardpoint").level
    install_fake_platform(tmp_path)
    yield tmp_path
    logging.getLogger("hardpoint").setLevel(level)


@pytest.fixture
def plan(site: Path) -> PluginPlan:
    """What the launcher settled on."""
    found = discover([str(site)])
    made = build_plan(found, PluginSelection())
    name, _ = select_platform(made, installed=found)
    return made.choose("platform", name, SelectedBy.DEFAULT, "available")


@pytest.mark.parametrize("roles", ROLES)
def test_every_process_creates_the_plans_platform(plan: PluginPlan, roles: set[ProcessRole]) -> None:
    """R12.29."""
    done = subprocess.run(
        [sys.executable, "-c", CHILD, plan.to_bytes().hex(), ",".join(roles)],
        capture_output=True,
        text=True,
        check=False,
        timeout=60,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == [FakePlatform.__module__, "FakePlatform", "fake", "out_of_tree", "False"]


@pytest.mark.parametrize("roles", ROLES)
@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("METADATA", "Version: 1.0", "Version: 1.1", r"platform:fake \(.* 1\.0\): version 1\.1 is installed here"),
        ("entry_points.txt", "fake_platform:create", "fake_platform:other", "fake_platform:other here"),
        ("entry_points.txt", "fake = ", "false = ", "platform:fake .* is not installed here"),
    ],
)
def test_a_process_with_another_platform_stops(
    site: Path, plan: PluginPlan, roles: set[ProcessRole], file: str, old: str, new: str, told: str
) -> None:
    """R12.29: before the platform is created, naming the process and what differs."""
    path = next(site.glob("*.dist-info")) / file
    path.write_text(path.read_text().replace(old, new))
    importlib.invalidate_caches()
    with pytest.raises(PluginMismatchError, match=rf"process \d+ .* differs from the plan: .*{told}"):
        boot(plan.to_bytes(), roles, rank=0)
