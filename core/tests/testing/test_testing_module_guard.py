"""The guard notices what was patched and nothing else."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from hardpoint.testing.module_guard import ModuleGuard

SOURCE = """
counter = 0

def function(): return 1

class Thing:
    limit = 3
    def method(self): return 2
    @property
    def size(self): return 3
    @staticmethod
    def helper(): return 4
"""


class Proxy:
    """Stands for lazily imported objects: looking at it is an error."""

    @property  # type: ignore[misc]
    def __class__(self) -> Any:
        raise RuntimeError("it was looked at")

    def __eq__(self, other: object) -> bool:
        raise RuntimeError("it was compared")

    __hash__ = None  # type: ignore[assignment]


@pytest.fixture
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    folder = tmp_path / "guarded_package"
    folder.mkdir()
    (folder / "__init__.py").touch()
    (folder / "part.py").write_text(SOURCE)
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in ("guarded_package", "guarded_package.part"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    made: Any = importlib.import_module("guarded_package.part")
    made.lazy = Proxy()
    return made


@pytest.fixture
def guard(module: Any) -> ModuleGuard:
    return ModuleGuard(["guarded_package"])


def test_nothing_changed(guard: ModuleGuard, module: Any) -> None:
    """Counters, constants, new names and proxies are nobody's patch (R10.51)."""
    module.counter += 1
    module.Thing.limit = 4
    module.added = lambda: 5
    sys.modules["guarded_package.later"] = ModuleType("guarded_package.later")
    try:
        assert guard.changes() == []
    finally:
        del sys.modules["guarded_package.later"]


@pytest.mark.parametrize(
    ("owner", "name", "value"),
    [
        ("", "function", lambda: 7),
        ("", "Thing", type("Thing", (), {})),
        ("Thing", "method", lambda self: 7),
        ("Thing", "size", property(lambda self: 7)),
        ("Thing", "helper", staticmethod(lambda: 7)),
    ],
)
def test_a_replacement_is_named(guard: ModuleGuard, module: Any, owner: str, name: str, value: Any) -> None:
    """L12.13."""
    setattr(getattr(module, owner) if owner else module, name, value)
    expected = ".".join(part for part in ("guarded_package.part", owner, name) if part)
    assert expected in guard.changes()


def test_a_removal_is_named(guard: ModuleGuard, module: Any) -> None:
    del module.Thing.method
    assert guard.changes() == ["guarded_package.part.Thing.method"]


def test_other_packages_are_no_concern(module: Any) -> None:
    guard = ModuleGuard(["guarded"])
    module.function = lambda: 7
    assert guard.changes() == []


def test_a_self_changing_package_may_change_itself_only(module: Any) -> None:
    guard = ModuleGuard([], self_changing=["guarded_package"])
    module.function = module.Thing.method
    assert guard.changes() == []
    module.function = lambda: 7
    assert guard.changes() == ["guarded_package.part.function"]
