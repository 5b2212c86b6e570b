"""The flat façade over the contracts: every listed name, its own object, and nothing loaded before it is used."""

from __future__ import annotations

import ast
import importlib
import subprocess
import sys
from pathlib import Path

import pytest

import hardpoint.interfaces as facade

STUB = Path(facade.__file__).with_suffix(".pyi")
LISTED = {
    alias.name: str(node.module)
    for node in ast.parse(STUB.read_text(encoding="utf-8")).body
    if isinstance(node, ast.ImportFrom) and node.module != "__future__"
    for alias in node.names
}


@pytest.mark.parametrize("name", sorted(LISTED))
def test_a_name_is_what_its_module_has(name: str) -> None:
    assert getattr(facade, name) is getattr(importlib.import_module(LISTED[name]), name)


def test_the_stub_exports_what_it_imports() -> None:
    (exported,) = [
        ast.literal_eval(node.value)
        for node in ast.parse(STUB.read_text(encoding="utf-8")).body
        if isinstance(node, ast.Assign)
    ]
    assert set(exported) == set(LISTED) == set(facade.__all__)


def test_an_unknown_name_is_an_attribute_error() -> None:
    with pytest.raises(AttributeError, match="no attribute 'Schedular'"):
        getattr(facade, "Schedular")  # noqa: B009


def test_a_contract_costs_its_own_modules_only() -> None:
    code = (
        "import sys; from hardpoint.interfaces import StatLogger, plugin; assert callable(plugin);"
        "print([name for name in sys.modules if name.startswith('hardpoint.interfaces.')])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "hardpoint.interfaces.stat_logger" in done.stdout
    assert "hardpoint.interfaces.attention" not in done.stdout
