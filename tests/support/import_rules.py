"""Imports as the syntax tree shows them, so that a rule sees deferred and dynamic imports too."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Import:
    """``name`` is None for ``import module``. ``typing_only`` means under ``if TYPE_CHECKING``."""

    module: str
    name: str | None
    line: int
    typing_only: bool

    @property
    def top_level(self) -> str:
        return self.module.partition(".")[0]


DYNAMIC_IMPORTERS = frozenset({"import_module", "__import__"})


def module_name(path: Path, source_root: Path) -> str:
    """Dotted name of ``path`` below ``source_root`` (the folder that is on ``sys.path``)."""
    parts = path.relative_to(source_root).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imports_of(source: str, module: str = "", is_package: bool = False) -> list[Import]:
    """All imports of ``source``; relative ones are resolved against the dotted name ``module``."""
    package = module if is_package else module.rpartition(".")[0]
    return list(_walk(ast.parse(source), package, typing_only=False))


def _walk(node: ast.AST, package: str, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.If) and _is_type_checking(node.test):
        for guarded in node.body:
            yield from _walk(guarded, package, typing_only=True)
        for other in node.orelse:
            yield from _walk(other, package, typing_only)
        return
    yield from _own_imports(node, package, typing_only)
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, package, typing_only)


def _own_imports(node: ast.AST, package: str, typing_only: bool) -> Iterator[Import]:
    if isinstance(node, ast.Import):
        for alias in node.names:
            yield Import(alias.name, None, node.lineno, typing_only)
    elif isinstance(node, ast.ImportFrom):
        target = _absolute(node.module or "", node.level, package)
        for alias in node.names:
            yield Import(target, alias.name, node.lineno, typing_only)
    elif isinstance(node, ast.Call) and (spelled := _dynamically_imported(node)):
        level = len(spelled) - len(spelled.lstrip("."))
        yield Import(_absolute(spelled.lstrip("."), level, package), None, node.lineno, typing_only)


def _absolute(target: str, level: int, package: str) -> str:
    if level == 0:
        return target
    parents = package.split(".")
    base = parents[: len(parents) - (level - 1)]
    return ".".join([*base, target] if target else base)


def _dynamically_imported(node: ast.Call) -> str | None:
    if called_name(node) not in DYNAMIC_IMPORTERS or not node.args:
        return None
    first = node.args[0]
    return first.value if isinstance(first, ast.Constant) and isinstance(first.value, str) else None


def called_name(node: ast.Call) -> str:
    """Last part of the called name; empty where the callee is itself an expression."""
    if isinstance(node.func, ast.Name):
        return node.func.id
    return node.func.attr if isinstance(node.func, ast.Attribute) else ""


def _is_type_checking(test: ast.expr) -> bool:
    return (isinstance(test, ast.Name) and test.id == "TYPE_CHECKING") or (
        isinstance(test, ast.Attribute) and test.attr == "TYPE_CHECKING"
    )


def declared_source(path: Path) -> str:
    """What a module says of itself to readers and type checkers: its stub where it has one."""
    stub = path.with_suffix(".pyi")
    return (stub if stub.is_file() else path).read_text(encoding="utf-8")


def exported_names(source: str) -> frozenset[str] | None:
    """The literal ``__all__`` of ``source``, or None where there is none to read."""
    for node in ast.parse(source).body:
        if isinstance(node, ast.Assign):
            targets, value = node.targets, node.value
        elif isinstance(node, ast.AnnAssign) and node.value is not None:
            targets, value = [node.target], node.value
        else:
            continue
        if any(isinstance(target, ast.Name) and target.id == "__all__" for target in targets):
            return frozenset(ast.literal_eval(value))
    return None


def string_literals(source: str) -> Iterator[tuple[int, str]]:
    """Line and value of every string constant, docstrings and f-string parts included."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.lineno, node.value


def import_cycles(graph: dict[str, set[str]]) -> list[list[str]]:
    """Strongly connected components of more than one module, and modules that import themselves."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    cycles: list[list[str]] = []

    def visit(node: str) -> None:
        index[node] = low[node] = len(index)
        stack.append(node)
        for target in sorted(graph.get(node, ())):
            if target not in index:
                visit(target)
                low[node] = min(low[node], low[target])
            elif target in stack:
                low[node] = min(low[node], index[target])
        if low[node] == index[node]:
            at = stack.index(node)
            component = stack[at:]
            del stack[at:]
            if len(component) > 1 or node in graph.get(node, ()):
                cycles.append(sorted(component))

    for node in sorted(graph):
        if node not in index:
            visit(node)
    return cycles
