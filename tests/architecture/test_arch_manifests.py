"""Every distribution with plugins ships a manifest, and it says what the code declares."""

from __future__ import annotations

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from hardpoint.plugins.manifest import MANIFEST_FILE
from hardpoint.testing.manifest_writer import manifests_of
from workspace import Distribution, plugin_distributions

WITH_PLUGINS = [dist for dist in plugin_distributions() if set(dist.entry_points) - {"hardpoint.conformance.v1"}]


@pytest.mark.parametrize("dist", WITH_PLUGINS, ids=lambda dist: dist.name)
def test_the_manifest_is_in_step_with_the_code(dist: Distribution) -> None:
    path = dist.source / MANIFEST_FILE
    ((written, text),) = manifests_of(dist.name).items()
    assert written.resolve() == path.resolve(), f"{dist.name} has plugins outside of its package {dist.package}"
    advice = f"run `hardpoint plugins manifest {dist.name}`"
    assert path.is_file(), f"{path} is missing; {advice}"
    assert path.read_text(encoding="utf-8") == text, f"{path} is stale; {advice}"


def test_no_manifest_lies_where_nothing_keeps_it_in_step() -> None:
    owned = {dist.source / MANIFEST_FILE for dist in WITH_PLUGINS}
    stray = [path for dist in plugin_distributions() for path in dist.folder.rglob(MANIFEST_FILE) if path not in owned]
    assert stray == []


def test_wheels_carry_the_manifest(tmp_path: Path) -> None:
    (dist,) = [dist for dist in WITH_PLUGINS if dist.name == "hardpoint-serving"]
    build = [sys.executable, "-m", "hatchling", "build", "-t", "wheel", "-d", str(tmp_path)]
    subprocess.run(build, cwd=dist.folder, check=True, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        assert f"{dist.package}/{MANIFEST_FILE}" in archive.namelist()
