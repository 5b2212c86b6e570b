"""Size and shape: files a reader can hold in mind, a core that stays small, no import cycles in it."""

from __future__ import annotations

import ast
import io
import tokenize
from pathlib import Path

from import_rules import import_cycles, imports_of, module_name
from workspace import ROOT, all_python_files, core

MAX_FILE_LINES = 600
MAX_CORE_LINES = 7_000


def line_count(path: Path) -> int:
    return len(path.read_text(encoding="utf-8").splitlines())


def source_lines(path: Path) -> int:
    """Lines of code: neither blank nor comment nor docstring, so that explaining the core costs nothing."""
    text = path.read_text(encoding="utf-8")
    prose: set[int] = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant) and isinstance(node.value.value, str):
            prose.update(range(node.lineno, (node.end_lineno or node.lineno) + 1))
    skipped = (tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER)
    code: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type not in skipped:
            code.update(range(token.start[0], token.end[0] + 1))
    return len(code - prose)


def test_prose_and_blank_lines_are_no_source_lines(tmp_path: Path) -> None:
    path = tmp_path / "sample.py"
    path.write_text('"""Doc.\n\nMore."""\n\n# note\nvalue = (\n    1,\n)\n"""About value."""\n')
    assert source_lines(path) == 3


def test_no_file_is_longer_than_the_limit() -> None:
    too_long = {path.relative_to(ROOT).as_posix(): line_count(path) for path in all_python_files()}
    assert {path: lines for path, lines in too_long.items() if lines > MAX_FILE_LINES} == {}


def test_the_core_without_its_test_kit_stays_under_its_budget() -> None:
    kit = core().source / "testing"
    lines = {path: source_lines(path) for path in core().python_files() if not path.is_relative_to(kit)}
    largest = sorted(((count, path.name) for path, count in lines.items()), reverse=True)[:10]
    assert sum(lines.values()) < MAX_CORE_LINES, f"largest files: {largest}"


def core_import_graph() -> dict[str, set[str]]:
    """Module to the core modules it imports when it runs, at once or later."""
    root = core().source.parent
    files = {module_name(path, root): path for path in core().python_files()}
    graph: dict[str, set[str]] = {}
    for module, path in files.items():
        targets = set()
        for found in imports_of(path.read_text(encoding="utf-8"), module, path.name == "__init__.py"):
            submodule = f"{found.module}.{found.name}"
            target = submodule if found.name and submodule in files else found.module
            if target in files and not found.typing_only:
                targets.add(target)
        graph[module] = targets
    return graph


def test_the_core_has_no_import_cycle_deferred_imports_included() -> None:
    assert import_cycles(core_import_graph()) == []


def test_the_graph_sees_the_core() -> None:
    assert "hardpoint" in core_import_graph()
