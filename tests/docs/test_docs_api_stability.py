"""What the page on API stability says is so: its promises have guards, and the tools say the same."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from cli_support import run_process
from doc_blocks import blocks_of
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS
from public_surface import SINGLE_MODULES, current_members, reviewed_members
from workspace import ROOT, root_config

PAGE = ROOT / "docs/extend/api-stability.md"
TEXT = PAGE.read_text(encoding="utf-8")


def facade() -> set[str]:
    """The single modules that plugins may import, as the test of imports lists them."""
    source = (ROOT / "tests/architecture/test_arch_plugin_facade.py").read_text(encoding="utf-8")
    return set(re.findall(r'"(hardpoint[\w.]*)"', source.partition("FACADE = ")[2].partition(")")[0]))


def test_what_plugins_may_import_is_what_is_frozen_and_what_the_page_names() -> None:
    frozen = {
        "hardpoint" + ("" if name == "__init__.py" else "." + name.removesuffix(".py").removesuffix("/__init__"))
        for name in SINGLE_MODULES
    }
    assert facade() == frozen
    assert [name for name in frozen if f"`{name}`" not in TEXT] == []


def test_members_are_frozen() -> None:
    """Each sort of thing that the table sends to the file of members is in it."""
    assert reviewed_members() == current_members()
    lines = "\n".join(reviewed_members())
    for start in (
        "hardpoint.interfaces.",
        "hardpoint.interfaces.hooks.HookSpecs.",
        "group ",
        "setting ",
        "exit status ",
    ):
        assert f"\n{start}" in f"\n{lines}", start
    assert {f"group {spec.group}" for spec in KINDS.values()} <= set(reviewed_members())
    statuses = re.findall(r"exit statuses: (.*?) \|", TEXT)[0]
    assert [f"exit status {status}" in reviewed_members() for status in re.findall(r"\d+", statuses)] == [True] * 4


def test_warnings_are_errors_here() -> None:
    """Nothing of ours uses what is deprecated: a warning about our own names would fail every test."""
    filters: list[str] = root_config()["tool"]["pytest"]["ini_options"]["filterwarnings"]
    assert filters[0] == "error"
    assert [line for line in filters if "hardpoint" in line] == []


def test_deprecations_and_removals_have_their_sort_of_fragment() -> None:
    kinds = (ROOT / "changelog.d/README.md").read_text(encoding="utf-8")
    for kind in re.findall(r"`(?:changelog\.d/<name>)?\.(\w+)\.md`", TEXT):
        assert f"`{kind}`" in kinds
    names = [path.name for path in (ROOT / "changelog.d").glob("*.md") if path.name != "README.md"]
    assert [
        name for name in names if not re.fullmatch(r"[\w-]+\.(added|changed|fixed|removed|security)\.md", name)
    ] == []


@pytest.mark.parametrize("kind", ["scheduler", "hooks"])
def test_new_packages_ask_for_the_range_that_the_page_recommends(tmp_path: Path, kind: str) -> None:
    done = run_process("plugins", "new", kind, "fair", "--into", tmp_path)
    assert done.status == 0, done.err
    (recommended,) = re.findall(r"`(hardpoint-core>=[\d.]+,<[\d.]+)`", TEXT)
    (project,) = tmp_path.rglob("pyproject.toml")
    assert f'"{recommended}"' in project.read_text(encoding="utf-8")


def test_entries_for_two_majors_are_written_as_shown(tmp_path: Path) -> None:
    """The example is a plugin for this core, and one that this core refuses with both versions."""
    (block,) = [block for block in blocks_of(PAGE) if block.language == "toml"]
    folder = tmp_path / "acme_fair-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.3\nName: acme-fair\nVersion: 1.0\n")
    text = re.sub(r'\[project\.entry-points\."(.*?)"\]', r"[\1]", block.text).replace('"', "")
    (folder / "entry_points.txt").write_text(text)
    found = discover([str(tmp_path)])
    assert [(plugin.api_version, plugin.entry_point) for plugin in found.plugins] == [(1, "acme_fair.v1:create")]
    assert [entry.reason for entry in found.refused] == [
        "written for API version 2 of 'scheduler'; this core speaks version 1"
    ]
