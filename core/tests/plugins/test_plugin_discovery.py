"""Discovery from metadata alone: groups, versions, doubles, and its cost in file reads."""

from __future__ import annotations

import builtins
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest

from hardpoint.plugins.discovery import discover

if TYPE_CHECKING:
    from .conftest import Site


def test_entry_points_are_found_without_importing_them(site: Site) -> None:
    """R12.1, R12.4: installing suffices; one distribution may serve several kinds."""
    site.install("acme-one", {"scheduler:sjf": "acme_one.a:create", "hooks:audit": "acme_one.b:create"})
    found = site.discover()
    assert [(p.kind, p.name, p.distribution, p.version, p.entry_point) for p in found.plugins] == [
        ("scheduler", "sjf", "acme-one", "1.0", "acme_one.a:create"),
        ("hooks", "audit", "acme-one", "1.0", "acme_one.b:create"),
    ]
    assert found.plugins[0].path.endswith("acme_one-1.0.dist-info")
    assert not any(name.startswith("acme_one") for name in sys.modules)


def test_other_groups_and_names_inside_values_are_ignored(site: Site) -> None:
    site.install("acme", {"console_scripts|acme": "hardpoint.cli:main", "pytest11|x": "acme:x"})
    assert site.discover().plugins == ()
    assert site.discover().refused == ()


@pytest.mark.parametrize(
    ("group", "reason"),
    [
        ("hardpoint.scheduler.v2", "API version 2 of 'scheduler'; this core speaks version 1"),
        ("hardpoint.schedular.v1", "unknown plugin kind 'schedular' (did you mean 'scheduler'?)"),
        ("hardpoint.scheduler", "not of the form hardpoint.<kind>.v<major>"),
    ],
)
def test_foreign_groups_are_refused_with_the_reason(site: Site, group: str, reason: str) -> None:
    """L12.11."""
    site.install("acme", {f"{group}|sjf": "acme_absent:create"})
    found = site.discover()
    assert found.plugins == ()
    assert found.refused[0].distribution == "acme"
    assert reason in found.refused[0].reason


@pytest.mark.parametrize("value", ["no_attribute", "a:b:c", "a b:c", ""])
def test_a_malformed_value_is_refused(site: Site, value: str) -> None:
    site.install("acme", {"hooks:x": value})
    assert "not of the form module:attribute" in site.discover().refused[0].reason


def test_extras_in_a_value_are_accepted(site: Site) -> None:
    site.install("acme", {"hooks:x": "acme.mod:Cls.create [extra]"})
    assert site.discover().plugins[0].entry_point == "acme.mod:Cls.create"


@pytest.mark.parametrize(
    ("requirement", "accepted"),
    [
        ("hardpoint-core>=0.3,<0.5", True),
        ("hardpoint_core[server]==0.4.0", True),
        ("Hardpoint.Core (>=0.4)", True),
        ("hardpoint>=0.5", False),
        ("hardpoint-core<0.4 ; python_version >= '3.0'", False),
        ("hardpoint-core<0.4 ; extra == 'old'", True),
        ("hardpoint-core<0.4 ; python_version < '3.0'", True),
        ("hardpoint-other<0.1", True),
        ("hardpoint-core=oops", False),
    ],
)
def test_the_required_core_range_is_checked_before_import(site: Site, requirement: str, accepted: bool) -> None:
    """L12.11."""
    site.install("acme", {"hooks:x": "acme:create"}, requires=["numpy", requirement])
    found = site.discover(core_version="0.4.0")
    assert bool(found.plugins) is accepted
    if not accepted:
        assert requirement in found.refused[0].reason


def test_a_development_version_of_the_core_counts(site: Site) -> None:
    site.install("acme", {"hooks:x": "acme:create"}, requires=["hardpoint-core>=0.4.0.dev0"])
    assert site.discover(core_version="0.4.0.dev3").plugins


def test_the_first_folder_on_the_path_wins_and_the_double_is_reported(site: Site, tmp_path: Path) -> None:
    other = type(site)(tmp_path / "other")
    first = site.install("acme", {"hooks:new": "acme:create"}, version="2.0")
    second = other.install("Acme", {"hooks:old": "acme:create"}, version="1.0")
    found = discover([str(site.root), str(other.root), str(site.root)])
    assert [(p.name, p.version) for p in found.plugins] == [("new", "2.0")]
    assert found.num_distributions == 1
    assert [(s.used_path, s.shadowed_path, s.same_folder) for s in found.shadowed] == [(str(first), str(second), False)]


def test_stale_metadata_beside_the_real_one_is_reported(site: Site) -> None:
    """L12.2: stale metadata shadows the real entry point."""
    site.install("acme", {"hooks:x": "acme:create"}, version="2.0")
    site.install("acme", {}, version="1.0")
    found = site.discover()
    assert [double.same_folder for double in found.shadowed] == [True]
    assert "installed twice" in site.plan().notices[0]


def test_a_stale_release_without_plugins_ahead_on_the_path_is_reported(site: Site, tmp_path: Path) -> None:
    """L12.2."""
    ahead = type(site)(tmp_path / "ahead")
    ahead.install("acme", {}, version="0.1")
    site.install("acme", {"hooks:x": "acme:create"}, version="1.0")
    found = discover([str(ahead.root), str(site.root)])
    assert found.plugins == ()
    assert found.shadowed[0].distribution == "acme"


def test_a_package_without_metadata_is_not_found_but_the_scan_is_counted(site: Site) -> None:
    """R12.17, P12.5"""
    site.write_module("acme.plugin", "create = None")
    site.install("unrelated", {})
    assert site.discover().plugins == ()
    assert site.discover().num_distributions == 1


def test_incomplete_metadata_is_refused(site: Site) -> None:
    folder = site.install("acme", {"hooks:x": "acme:create"})
    (folder / "METADATA").unlink()
    assert "lacks a name or version" in site.discover().refused[0].reason


def test_leftovers_of_an_interrupted_uninstall_are_ignored(site: Site) -> None:
    folder = site.install("acme", {"hooks:x": "acme:create"})
    folder.rename(folder.with_name("~cme-1.0.dist-info"))
    assert site.discover().num_distributions == 0


def test_egg_info_is_read_too_and_unlistable_path_entries_are_passed_over(site: Site, tmp_path: Path) -> None:
    folder = site.install("acme", {"hooks:x": "acme:create"})
    (folder / "METADATA").rename(folder / "PKG-INFO")
    folder.rename(folder.with_name("acme-1.0-py3.11.egg-info"))
    (tmp_path / "packed.zip").write_bytes(b"")
    found = discover([str(tmp_path / "packed.zip"), str(tmp_path / "missing"), str(site.root)])
    assert [(p.name, p.version) for p in found.plugins] == [("x", "1.0")]


def test_each_metadata_file_is_opened_once(site: Site, monkeypatch: pytest.MonkeyPatch) -> None:
    """L12.8: one scan, not one per group. Only plugin distributions have their METADATA read."""
    for number in range(30):
        site.install(f"plain-{number}", {"console_scripts|x": "a:b"})
    for number in range(5):
        site.install(f"acme-{number}", {f"hooks:x{number}": "a:b", f"scheduler:y{number}": "a:b"})
    opened: Counter[str] = Counter()
    real_open = builtins.open

    def counting_open(file: Any, *args: Any, **kwargs: Any) -> Any:
        opened[Path(file).name] += str(site.root) in str(file)
        return real_open(file, *args, **kwargs)

    monkeypatch.setattr(builtins, "open", counting_open)
    assert len(site.discover().plugins) == 10
    assert opened["entry_points.txt"] == 35
    assert opened["METADATA"] == 5
    assert sum(opened.values()) == 40


def test_importing_the_package_and_discovering_leaves_the_heavy_modules_out() -> None:
    code = (
        "import sys; from hardpoint.plugins.discovery import discover; discover(); from hardpoint.plugins import cli;"
        "print([m for m in ('pydantic', 'pluggy', 'torch', 'numpy', 'importlib.metadata') if m in sys.modules])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


@pytest.mark.parametrize(
    ("group", "requirement", "reason"),
    [
        ("hardpoint.hooks.v" + "1" * 5000, "hardpoint", "not of the form"),
        ("hardpoint.hooks.v1", "hardpoint" + "a" * 60_000 + "; oops", "cannot be read"),
        ("hardpoint.hooks.v1", "hardpoint-core" + " " * 60_000 + "oops;", "cannot be read"),
        ("hardpoint.hooks.v1", "hardpoint; " + "(" * 20_000 + "python_version<'3'" + ")" * 20_000, "cannot be read"),
        ("hardpoint.hooks.v1", "hardpoint" + ">=0.1," * 20_000 + "oops", "cannot be read"),
        ("hardpoint.hooks.v1", "hardpoint==" + "1" * 5000, "cannot be read"),
        ("hardpoint.hooks.v1", "hardpoint" + ".-" * 30_000, "cannot be read"),
    ],
    ids=range(7),
)
def test_enormous_metadata_is_refused_at_once(site: Site, group: str, requirement: str, reason: str) -> None:
    site.install("acme", {f"{group}|x": "acme:create"}, requires=[requirement])
    started = time.monotonic()
    found = site.discover()
    assert time.monotonic() - started < 5
    assert found.plugins == ()
    assert reason in found.refused[0].reason
    assert len(found.refused[0].reason) < 400
