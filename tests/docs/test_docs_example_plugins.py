"""Example plugins stand on their own: their tests pass, they are found and selected by name, docs show them."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from doc_blocks import blocks_of
from hardpoint.testing.scaffold import available_kinds
from import_rules import imports_of, module_name
from scratch_install import write_metadata
from workspace import ROOT, read_toml

EXAMPLES = sorted(path.parent for path in ROOT.glob("examples_plugins/*/pyproject.toml"))
EACH = pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
HELLO = ROOT / "examples_plugins/hello_endpoint"
FACADE = ("hardpoint.interfaces", "hardpoint.testing", "hardpoint.errors", "hardpoint.logging")


def project_of(example: Path) -> dict[str, Any]:
    project: dict[str, Any] = read_toml(example / "pyproject.toml")["project"]
    return project


def python(arguments: list[str], *search_path: Path, cwd: Path) -> subprocess.CompletedProcess[str]:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
    environment["PYTHONPATH"] = os.pathsep.join(map(str, search_path))
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, capture_output=True, text=True, timeout=300, check=False
    )


def listed(site: list[Path], folder: Path, endpoints: str) -> dict[str, str]:
    """Names of endpoint plugins and their states, as the command line sees them."""
    done = python(["-m", "hardpoint.cli", "plugins", "list", "--json", "--endpoints", endpoints], *site, cwd=folder)
    assert done.returncode == 0, done.stderr
    kinds = {kind["kind"]: kind["plugins"] for kind in json.loads(done.stdout)["kinds"]}
    return {row["plugin"]["name"]: row["state"] for row in kinds["endpoint"]}


# Kits that compute with torch take half a minute each.
QUICK = ("audit_hooks", "hello_endpoint", "shortest_job_first")
OWN_TESTS = [pytest.param(e, id=e.name, marks=() if e.name in QUICK else pytest.mark.slow) for e in EXAMPLES]


@pytest.mark.parametrize("example", OWN_TESTS)
def test_its_own_tests_pass(example: Path, tmp_path: Path) -> None:
    write_metadata(project_of(example), tmp_path)
    arguments = ["-m", "pytest", "-q", "-p", "no:cacheprovider", str(example / "tests")]
    done = python(arguments, example / "src", tmp_path, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr


@EACH
def test_it_imports_only_what_a_stranger_may(example: Path) -> None:
    for path in sorted(example.rglob("*.py")):
        module = module_name(path, example / "src") if path.is_relative_to(example / "src") else path.stem
        for found in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            if found.top_level == "hardpoint":
                assert found.module == "hardpoint" or found.module.startswith(FACADE), f"{path}:{found.line}"


@EACH
def test_it_is_not_installed_by_default(example: Path) -> None:
    lines = (ROOT / "requirements-dev.txt").read_text(encoding="utf-8")
    assert example.name not in lines
    assert project_of(example)["name"] not in lines


def test_hello_is_active_exactly_when_listed(tmp_path: Path) -> None:
    """R12.48, R12.49: an endpoint needs the operator's permission, and nothing else."""
    write_metadata(project_of(HELLO), tmp_path)
    site = [tmp_path, HELLO / "src"]
    assert listed(site, tmp_path, "openai")["hello"] == "refused"
    assert listed(site, tmp_path, "openai,hello")["hello"] == "active"


def test_hello_stays_small() -> None:
    assert len((HELLO / "src/hello_endpoint/__init__.py").read_text(encoding="utf-8").splitlines()) < 60


@pytest.mark.parametrize(
    ("page", "files"),
    [
        ("write-a-plugin", {"hello_endpoint/src/hello_endpoint/__init__.py"}),
        (
            "write-a-platform",
            {"background_platform/pyproject.toml", "background_platform/src/background_platform/__init__.py"},
        ),
    ],
)
def test_pages_show_examples_as_they_are(page: str, files: set[str]) -> None:
    shown = {block.file: block.text for block in blocks_of(ROOT / f"docs/extend/{page}.md") if block.file is not None}
    assert {*shown} >= files
    for name, text in shown.items():
        assert text == (ROOT / "examples_plugins" / name).read_text(encoding="utf-8"), name


def test_the_introduction_names_every_kind_that_can_be_begun() -> None:
    rows = (ROOT / "docs/extend/write-a-plugin.md").read_text(encoding="utf-8").partition("\n## Kinds\n")[2]
    named = {
        name for row in rows.splitlines() if row.startswith("| ") for name in re.findall(r"`(\w+)`", row.split("|")[2])
    }
    assert {*available_kinds()} <= named


def test_the_introduction_leads_to_files_that_are_there() -> None:
    text = (ROOT / "docs/extend/write-a-plugin.md").read_text(encoding="utf-8")
    paths = re.findall(r"`((?:plugins|platforms)/[\w/]+\.py)`", text)
    assert len(paths) > 5
    assert [path for path in paths if not (ROOT / path).is_file()] == []


@pytest.mark.slow
@pytest.mark.parametrize("example", [HELLO], ids=["hello_endpoint"])
def test_pip_installs_it(example: Path, tmp_path: Path) -> None:
    site = tmp_path / "site"
    arguments = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", str(site), str(example)]
    done = python(arguments, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    states = listed([site], tmp_path, ",".join(project_of(example)["entry-points"].get("hardpoint.endpoint.v1", {})))
    assert "active" in states.values()
