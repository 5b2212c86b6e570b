"""What `hardpoint plugins new` writes installs, is found and passes at once, for every kind with a kit."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from hardpoint.testing.kits import kinds_with_kit
from hardpoint.testing.scaffold import Blueprint, available_kinds, write_package
from scratch_install import write_metadata

EACH = pytest.mark.parametrize("kind", available_kinds())


def hardpoint(*arguments: object, site: Path | None = None, status: int = 0) -> str:
    environment = {name: value for name, value in os.environ.items() if not name.startswith("HARDPOINT_")}
    if site is not None:
        environment["PYTHONPATH"] = str(site)
    command = [sys.executable, "-m", "hardpoint.cli", *map(str, arguments)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == status, done.stdout + done.stderr
    return done.stdout + done.stderr


def name_for(kind: str) -> str:
    return f"acme-{kind.replace('_', '-')}"


def scaffold(kind: str, folder: Path) -> tuple[Path, dict[str, Any]]:
    hardpoint("plugins", "new", kind, name_for(kind), "--into", folder)
    (package,) = folder.iterdir()
    project: dict[str, Any] = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    return package, project


def install(package: Path, project: dict[str, Any], site: Path) -> None:
    """What an installer would leave behind, without the time it takes."""
    site.mkdir()
    for entry in (package / "src").iterdir():
        (site / entry.name).symlink_to(entry)
    write_metadata(project, site)


def test_every_kit_has_a_template() -> None:
    assert set(available_kinds()) == set(kinds_with_kit())


def test_models_are_named_by_architecture(tmp_path: Path) -> None:
    told = hardpoint("plugins", "new", "model", "AcmeForCausalLM", "--into", tmp_path)
    assert "hardpoint plugins manifest hardpoint-acmeforcausallm" in told
    package = tmp_path / "hardpoint-acmeforcausallm"
    project = tomllib.loads((package / "pyproject.toml").read_text())["project"]
    assert project["entry-points"]["hardpoint.model.v1"] == {"AcmeForCausalLM": "hardpoint_acmeforcausallm:create"}
    assert "class TestAcmeForCausalLM(" in (package / "src/hardpoint_acmeforcausallm/conformance.py").read_text()


@pytest.mark.parametrize(
    ("kind", "name"), [("attention_backend", "attention"), ("worker", "torch"), ("scheduler", "scheduler")]
)
def test_no_class_hides_what_it_derives_from(kind: str, name: str, tmp_path: Path) -> None:
    blueprint = Blueprint.of(kind, name, "hardpoint-acme-names")
    code = (write_package(blueprint, tmp_path) / blueprint.code).read_text()
    classes = [node.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ClassDef)]
    imported = {
        alias.name for node in ast.walk(ast.parse(code)) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    assert not imported.intersection(classes)


# The whole kit of every kind takes minutes; these few show in the fast tier that the way works.
QUICK = ("endpoint", "hash", "hooks", "stat_logger")
RATED = [pytest.param(kind, marks=() if kind in QUICK else pytest.mark.slow) for kind in available_kinds()]


@pytest.mark.parametrize("kind", RATED)
def test_a_fresh_package_passes_its_kit(kind: str, tmp_path: Path) -> None:
    package, project = scaffold(kind, tmp_path / "work")
    install(package, project, tmp_path / "site")
    told = hardpoint("plugins", "test", project["name"], "--json", site=tmp_path / "site")
    report = json.loads(told)
    assert report["refused"] == []
    (verdict,) = report["verdicts"]
    assert (verdict["kind"], verdict["name"]) == (kind, name_for(kind))
    assert verdict["broken"] == []
    assert verdict["note"] == "", "the package must bring what its kit needs"
    # A template claims little, and a kit asks nothing of what is not claimed; yet it must not run empty.
    assert len(verdict["kept"]) > len(verdict["not_claimed"]) / 2


@EACH
def test_a_fresh_package_is_tidy(kind: str, tmp_path: Path) -> None:
    """The linter and the formatter have nothing to say, and nothing was left to fill in."""
    package = write_package(Blueprint.of(kind, name_for(kind)), tmp_path)
    ruff = [sys.executable, "-m", "ruff"]
    settings = ["--no-cache", "--isolated", "--line-length", "120", str(package)]
    for command in (["check", "--ignore", "E501", "--select", "E,F,I,UP,B"], ["format", "--check"]):
        done = subprocess.run([*ruff, *command, *settings], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
    assert "$" not in "".join(path.read_text() for path in package.rglob("*.*") if path.is_file())


@pytest.mark.parametrize(("kind", "kit"), [("hash", None), ("custom_op", "hardpoint-testing-torch")])
def test_a_fresh_package_says_what_its_tests_need(kind: str, kit: str | None, tmp_path: Path) -> None:
    _, project = scaffold(kind, tmp_path / "work")
    core, *further = project["optional-dependencies"]["test"]
    assert core.startswith("hardpoint-core[server,testing]>=")
    assert [line.partition(">=")[0] for line in further] == ([] if kit is None else [kit])


@pytest.mark.slow
@pytest.mark.parametrize("kind", [*QUICK, "attention_backend"])
def test_pip_installs_a_fresh_package(kind: str, tmp_path: Path) -> None:
    package, project = scaffold(kind, tmp_path / "work")
    site = tmp_path / "site"
    arguments = ["-m", "pip", "install", "-q", "--no-deps", "--no-build-isolation", "--target", site, package]
    subprocess.run([sys.executable, *map(str, arguments)], check=True, timeout=120)
    assert name_for(kind) in hardpoint("plugins", "list", site=site)
    assert "1 of 1 plugins keep the rules" in hardpoint("plugins", "test", project["name"], site=site)


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("no_kind", "x"), "kinds with a kit and a template here: "),
        (("hsh", "x"), "did you mean 'hash'"),
        (("hash", "1x"), "must begin with a letter"),
        (("hash", "../x"), "must begin with a letter"),
        (("hash", "x."), "end with a letter or digit"),
        (("hash", "x-"), "end with a letter or digit"),
        (("hash", "x_"), "end with a letter or digit"),
        (("hash", "x", "--distribution", "acme."), "the distribution name 'acme.' must"),
        (("hash", "x", "--distribution", "class"), "a word of Python's own; choose another --distribution"),
        (("hash", "x", "--distribution", "pytest"), "can be imported here already"),
        (("hash", "x", "--into", "/proc/nowhere"), "cannot be written"),
    ],
)
def test_what_cannot_be_written_is_refused(arguments: tuple[str, ...], told: str, tmp_path: Path) -> None:
    into = () if "--into" in arguments else ("--into", tmp_path)
    assert told in hardpoint("plugins", "new", *arguments, *into, status=1)
    assert [*tmp_path.iterdir()] == []


@pytest.mark.parametrize("name", ["class", "none", "True", "a..b", "a-1.b_2"])
def test_whatever_the_name_the_files_compile(name: str, tmp_path: Path) -> None:
    hardpoint("plugins", "new", "hash", name, "--into", tmp_path)
    files = [*tmp_path.rglob("*.py")]
    assert any(path.name.startswith("test_") for path in files)
    for path in files:
        compile(path.read_text(), str(path), "exec")


def test_a_package_is_never_overwritten(tmp_path: Path) -> None:
    hardpoint("plugins", "new", "hash", "twice", "--into", tmp_path)
    marked = tmp_path / "hardpoint-twice/src/hardpoint_twice/__init__.py"
    marked.write_text("# mine\n")
    assert "is there already" in hardpoint("plugins", "new", "hash", "twice", "--into", tmp_path, status=1)
    assert marked.read_text() == "# mine\n"
