"""The core imports what it declares, and names no plugin (import-linter cannot see spelled-out names)."""

from __future__ import annotations

import re
import sys

import pytest
from packaging.requirements import Requirement

from import_rules import imports_of, module_name, string_literals
from workspace import core, plugin_distributions

# Where a distribution's import names differ from its own name. An extra of a requirement counts as declared.
IMPORT_NAMES = {
    "pyzmq": {"zmq"},
    "pyyaml": {"yaml"},
    "importlib-metadata": {"importlib_metadata"},
    "fastapi": {"fastapi", "starlette"},
    "uvicorn": {"uvicorn", "uvloop", "httptools"},
    "pytest-asyncio": {"pytest_asyncio"},
}
TYPING_ONLY = frozenset({"torch"})
EXTRA_FOR_SUBPACKAGE = {"hardpoint.server": "server", "hardpoint.testing": "testing"}
PLUGIN_NAMES = sorted(
    {dist.package for dist in plugin_distributions()} | {dist.name for dist in plugin_distributions()}
)
PLUGIN_NAME = re.compile(r"(?<![\w-])(" + "|".join(map(re.escape, PLUGIN_NAMES)) + r")(?![\w-])")


def declared(extra: str | None = None) -> set[str]:
    project = core().project
    lines = project["dependencies"] if extra is None else project["optional-dependencies"].get(extra, [])
    names = [Requirement(line).name.lower() for line in lines]
    return {import_name for name in names for import_name in IMPORT_NAMES.get(name, {name})}


def core_violations(source: str, module: str, is_package: bool = False) -> list[str]:
    allowed = set(sys.stdlib_module_names) | declared() | {"hardpoint"}
    for subpackage, extra in EXTRA_FOR_SUBPACKAGE.items():
        if module == subpackage or module.startswith(subpackage + "."):
            allowed |= declared(extra)
    found = []
    for imported in imports_of(source, module, is_package):
        if imported.typing_only and imported.top_level in TYPING_ONLY | declared("server"):
            continue
        if imported.top_level not in allowed:
            found.append(f"{module}:{imported.line} imports undeclared {imported.module}")
    for line, text in string_literals(source):
        if match := PLUGIN_NAME.search(text):
            found.append(f"{module}:{line} spells the plugin {match[1]}")
    return found


def test_core_imports_only_what_it_declares_and_names_no_plugin() -> None:
    root = core().source.parent
    violations = [
        violation
        for path in core().python_files()
        for violation in core_violations(
            path.read_text(encoding="utf-8"), module_name(path, root), path.name == "__init__.py"
        )
    ]
    assert violations == []


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("import torch", "hardpoint.interfaces.worker"),
        ("def f():\n    import transformers", "hardpoint.engine.core"),
        ("import_module('torch')", "hardpoint.cli"),
        ("import fastapi", "hardpoint.engine.core"),
        ("if TYPE_CHECKING:\n    import transformers", "hardpoint.rendering.chat"),
        ("import requests", "hardpoint.server.app"),
        ("NAME = 'hardpoint_models.llama'", "hardpoint.config.model"),
        ("HINT = f'pip install hardpoint-torch-runtime {1}'", "hardpoint.plugins.plan"),
    ],
)
def test_each_fault_is_caught(source: str, module: str) -> None:
    assert core_violations(source, module)


@pytest.mark.parametrize(
    ("source", "module"),
    [
        ("if TYPE_CHECKING:\n    import torch", "hardpoint.interfaces.worker"),
        ("if TYPE_CHECKING:\n    from fastapi import APIRouter", "hardpoint.interfaces.endpoint"),
        ("import zmq, yaml, msgspec, numpy as np", "hardpoint.ipc.sockets"),
        ("from fastapi import FastAPI", "hardpoint.server.app"),
        ("HINT = 'pip install hardpoint-core[server]'; METRIC = 'hardpoint_models_total'", "hardpoint.cli"),
    ],
)
def test_what_is_allowed_passes(source: str, module: str) -> None:
    assert core_violations(source, module) == []
