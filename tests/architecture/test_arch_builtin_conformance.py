"""L12.23: every plugin shipped here whose kind has a kit is held to it by the tests of its own distribution."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

from hardpoint.testing.kits import kinds_with_kit, kit_of
from workspace import Distribution, plugin_distributions

WITH_KIT = frozenset(kinds_with_kit())


def under_test(folder: Path) -> Iterator[tuple[str, str]]:
    """The base class and the plugin's name of each conformance class below ``folder``."""
    for path in sorted(folder.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef) and node.name.startswith("Test"):
                bases = [ast.unparse(base) for base in node.bases]
                named = [
                    statement.value.value
                    for statement in node.body
                    if isinstance(statement, ast.AnnAssign)
                    and ast.unparse(statement.target) == "plugin"
                    and isinstance(statement.value, ast.Constant)
                ]
                yield from ((base, str(name)) for base in bases for name in named)


def shipped(distribution: Distribution) -> list[tuple[str, str]]:
    """Kind and name of its plugins whose kinds have a kit."""
    return [
        (group.split(".")[1], name)
        for group, names in distribution.entry_points.items()
        for name in names
        if group.split(".")[1] in WITH_KIT
    ]


@pytest.mark.parametrize(
    "distribution", [dist for dist in plugin_distributions() if shipped(dist)], ids=lambda dist: dist.name
)
def test_each_plugin_is_held_to_its_kit(distribution: Distribution) -> None:
    """L12.23."""
    suites = {kind: kit.__name__ for kind in WITH_KIT if (kit := kit_of(kind)) is not None}
    held = {*under_test(distribution.folder / "tests"), *under_test(distribution.source)}
    assert [(kind, name) for kind, name in shipped(distribution) if (suites[kind], name) not in held] == []


def test_classes_kept_with_the_source_are_run() -> None:
    """L12.23: a class beside the plugin counts only where the tests import it."""
    for distribution in plugin_distributions():
        if (distribution.source / "conformance.py").is_file():
            texts = [path.read_text(encoding="utf-8") for path in (distribution.folder / "tests").glob("*.py")]
            kept = ast.parse((distribution.source / "conformance.py").read_text(encoding="utf-8"))
            classes = [node.name for node in kept.body if isinstance(node, ast.ClassDef) and node.name[:4] == "Test"]
            module = f"from {distribution.package}.conformance import"
            assert [name for name in classes if not any(f"{module} {name}" in text for text in texts)] == []
