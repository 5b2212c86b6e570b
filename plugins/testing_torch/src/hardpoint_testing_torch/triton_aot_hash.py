"""Names what a compilation depends on, so that its result need not be found twice.

Sources count by their meaning: line numbers, comments and docstrings change nothing. Nothing here compiles, so that it
works in a process that interprets its kernels as well.
"""

from __future__ import annotations

import ast
import hashlib
import inspect
import json
import textwrap
from collections.abc import Iterator
from functools import cache
from types import FunctionType, ModuleType
from typing import Any

import triton

from hardpoint_testing_torch.triton_aot import KernelCase, Target

__all__ = ["case_hash", "case_hashes"]

_HASH_LENGTH = 20
_RECIPE = 2
"""Counts the ways in which the worker has turned a case into a compilation: results of an earlier one are stale."""


def case_hashes(cases: tuple[KernelCase, ...]) -> dict[str, dict[str, str]]:
    """By case and target."""
    return {case.name: {target.name: case_hash(case, target) for target in case.all_targets} for case in cases}


def case_hash(case: KernelCase, target: Target) -> str:
    """Of sources, those they call, settings, Triton's version and target."""
    settings = {
        "sources": _sources(_plain(case.function)),
        "signature": dict(case.signature),
        "constexprs": {name: _constant(value) for name, value in case.constexprs.items()},
        "divisible": sorted(case.divisible_by_16),
        "options": {name: repr(value) for name, value in case.options.items()},
        "warps": case.num_warps,
        "stages": case.num_stages,
        "recipe": _RECIPE,
        "target": target.name,
        "triton": triton.__version__,
    }
    text = json.dumps(settings, sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:_HASH_LENGTH]


@cache
def _sources(function: FunctionType) -> dict[str, str]:
    """The source of a kernel and of all it refers to, by qualified name; constants by value."""
    found: dict[str, str] = {}
    _collect(function, found)
    return found


def _collect(function: Any, sources: dict[str, str]) -> None:
    plain = _plain(function)
    name = f"{plain.__module__}.{plain.__qualname__}"
    if name in sources:
        return
    tree = ast.parse(textwrap.dedent(inspect.getsource(plain)))
    definition = tree.body[0]
    if isinstance(definition, ast.FunctionDef):
        definition.decorator_list = []
        if len(definition.body) > 1 and ast.get_docstring(definition, clean=False) is not None:
            del definition.body[0]
    sources[name] = ast.unparse(tree)
    for label, value in _references(plain, tree):
        if _is_kernel(value):
            _collect(value, sources)
        elif _is_constant(value):
            sources[f"{name}: {label}"] = _constant(value)


def _references(function: FunctionType, tree: ast.AST) -> Iterator[tuple[str, Any]]:
    """What a kernel's names and dotted names stand for, as far as they are its module's or an enclosing scope's."""
    scope = {**function.__globals__, **inspect.getclosurevars(function).nonlocals}
    for node in ast.walk(tree):
        if isinstance(node, ast.Name) and node.id in scope:
            yield node.id, scope[node.id]
        elif isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name):
            owner = scope.get(node.value.id)
            if isinstance(owner, ModuleType) and not owner.__name__.startswith("triton"):
                yield f"{node.value.id}.{node.attr}", getattr(owner, node.attr, None)


def _plain(function: Any) -> FunctionType:
    """The Python function below all wrappers of Triton."""
    while not isinstance(function, FunctionType):
        function = function.fn
    return function


def _is_kernel(value: Any) -> bool:
    inner = getattr(value, "fn", None)
    if inner is None or isinstance(value, ModuleType | type):
        return False
    return not _plain(value).__module__.startswith("triton.")


def _is_constant(value: Any) -> bool:
    return isinstance(value, bool | int | float | str) or type(value).__name__ == "constexpr"


def _constant(value: Any) -> str:
    if getattr(value, "fn", None) is not None:
        return json.dumps(_sources(_plain(value)), sort_keys=True)
    return repr(getattr(value, "value", value))
