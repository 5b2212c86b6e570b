"""What the workspace holds, read from disk: the one place where tests learn of folders and distributions."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True, slots=True)
class Distribution:
    """One folder with a ``pyproject.toml``. ``folder`` is absolute; ``package`` is its import name."""

    folder: Path
    name: str
    package: str
    project: dict[str, Any]

    @property
    def relative_folder(self) -> str:
        return self.folder.relative_to(ROOT).as_posix()

    @property
    def source(self) -> Path:
        return self.folder / "src" / self.package

    @property
    def entry_points(self) -> dict[str, dict[str, str]]:
        """Group to name to target, Hardpoint's own groups only."""
        groups: dict[str, dict[str, str]] = self.project.get("entry-points", {})
        return {group: names for group, names in groups.items() if group.startswith("hardpoint.")}

    def python_files(self) -> list[Path]:
        return sorted(self.source.rglob("*.py"))


def read_toml(path: Path) -> dict[str, Any]:
    return tomllib.loads(path.read_text(encoding="utf-8"))


@cache
def root_config() -> dict[str, Any]:
    return read_toml(ROOT / "pyproject.toml")


@cache
def distributions() -> tuple[Distribution, ...]:
    """Every distribution that has code: the core, then platforms, then plugins."""
    found = []
    for folder in (ROOT / "core", *sorted(ROOT.glob("platforms/*")), *sorted(ROOT.glob("plugins/*"))):
        if not (folder / "pyproject.toml").is_file():
            continue
        project = read_toml(folder / "pyproject.toml")["project"]
        package = "hardpoint" if folder.name == "core" else f"hardpoint_{folder.name}"
        found.append(Distribution(folder=folder, name=project["name"], package=package, project=project))
    return tuple(found)


def core() -> Distribution:
    return distributions()[0]


def plugin_distributions() -> tuple[Distribution, ...]:
    """All but the core, platforms included: to the core they are equally foreign."""
    return distributions()[1:]


def all_python_files() -> Iterator[Path]:
    """Sources and tests of the whole workspace."""
    for distribution in distributions():
        yield from sorted(distribution.folder.rglob("*.py"))
    for folder in ("tests", "examples_plugins"):
        yield from sorted((ROOT / folder).rglob("*.py"))
