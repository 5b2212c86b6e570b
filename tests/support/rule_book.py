"""Tables of a specification's rules and the tests that cite them.

A test cites a rule by its number (``R12.3``, ``P12.1``, ``I12.7``) in its own source.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from workspace import ROOT

__all__ = ["RuleBook", "files"]

_CITATION = re.compile(r"\b([RPIL]\d+\.\d+)\b")
_SHOWN = 3
_NOTE = "<!-- Written by tests/support/generate_docs.py; change the code it reads, then run it with --write. -->"


@dataclass(frozen=True)
class RuleBook:
    """``rules`` by number, in the order of the page; ``page`` is a path from the repository's root.

    ``complete`` are the specifications all of whose rules have a row, so that another number in a test is an error.
    """

    rules: Mapping[str, str]
    page: str
    title: str
    introduction: tuple[str, ...]
    complete: tuple[int, ...]

    def citations(self) -> Mapping[str, tuple[str, ...]]:
        """Rule to the tests that cite it, as ``path::name``; a file whose first line cites one counts as ``path``.

        Tests of the conformance kit count as well. They come last: they hold others, while the others hold us.
        """
        return {rule: tests for rule, tests in _citations().items() if self.is_ours(rule)}

    def cited(self, text: str | None) -> list[str]:
        """Numbers of rules in ``text`` that are this book's to know, whether there are such rules or not."""
        return [rule for rule in cited(text) if self.is_ours(rule)]

    def is_ours(self, rule: str) -> bool:
        return rule in self.rules or int(rule[1:].split(".")[0]) in self.complete

    def uncited(self) -> list[str]:
        """Rules that no test cites."""
        return [rule for rule in self.rules if rule not in _citations()]

    def render(self) -> str:
        """The page as Markdown, from ``docs/reference``."""
        lines = [
            _NOTE,
            "",
            f"# {self.title}",
            "",
            *self.introduction,
            "",
            "| rule | holds that | tests |",
            "|---|---|---|",
        ]
        for rule, text in self.rules.items():
            tests = _citations().get(rule, ())
            more = " and others" if len(tests) > _SHOWN else ""
            lines.append(f"| {rule} | {text} | {', '.join(map(_link, tests[:_SHOWN]))}{more} |")
        return "\n".join(lines) + "\n"


def cited(text: str | None) -> list[str]:
    """Numbers of rules of any specification in ``text``."""
    return sorted(set(_CITATION.findall(text or "")))


def files() -> list[Path]:
    """Every test, and every conformance class."""
    folders = ("core", "platforms", "plugins", "examples_plugins", "tests")
    tests = [path for folder in folders for path in (ROOT / folder).rglob("test_*.py")]
    kits = [*(ROOT / "core/src/hardpoint/testing").glob("*_suite.py")]
    kits += (ROOT / "plugins/testing_torch/src/hardpoint_testing_torch").glob("*.py")
    return sorted({*tests, *kits})


@cache
def _citations() -> Mapping[str, tuple[str, ...]]:
    found: dict[str, list[str]] = {}
    for path in files():
        source, name = path.read_text(encoding="utf-8"), path.relative_to(ROOT).as_posix()
        if not _CITATION.search(source):
            continue
        tree = ast.parse(source)
        for rule in cited(ast.get_docstring(tree)):
            found.setdefault(rule, []).append(name)
        for text, test in _tests(tree, source):
            for rule in cited(text):
                found.setdefault(rule, []).append(f"{name}::{test}")
    return {rule: tuple(sorted(set(tests), key=_place)) for rule, tests in found.items()}


def _tests(tree: ast.Module, source: str) -> list[tuple[str | None, str]]:
    """Source and name of every test; the rules and invariants of a state machine are tests of their class."""
    found = []
    for node in ast.walk(tree):
        is_test = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef) and node.name.startswith("test")
        is_machine = isinstance(node, ast.ClassDef) and any("StateMachine" in ast.unparse(base) for base in node.bases)
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef) and (is_test or is_machine):
            found.append((ast.get_source_segment(source, node), node.name))
    return found


def _place(test: str) -> tuple[bool, bool, str]:
    """Single tests before files, tests of this project before rules for others."""
    return "/src/" in test, "::" not in test, test


def _link(test: str) -> str:
    path, _, name = test.partition("::")
    return f"[`{name or Path(path).name}`](../../{path})"
