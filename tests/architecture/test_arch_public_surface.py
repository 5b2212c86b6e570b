"""The public surface changes only together with the file that a reviewer reads."""

from __future__ import annotations

import importlib

import pytest

from public_surface import current_members, current_surface, difference, members_of, public_names

ACCEPT = "if intended: python tests/support/public_surface.py --write, and say why in the commit"


def test_the_public_surface_is_the_reviewed_one() -> None:
    assert difference() == [], ACCEPT


@pytest.mark.parametrize("path", current_surface())
def test_every_public_name_exists(path: str) -> None:
    module, _, name = path.rpartition(".")
    assert hasattr(importlib.import_module(module), name)


def test_the_plugin_facade_says_what_it_exports() -> None:
    assert importlib.import_module("hardpoint.interfaces").__all__


def test_an_explicit_list_wins_over_definitions() -> None:
    assert public_names("__all__ = ['A']\nclass A: ...\nclass B: ...\n") == frozenset({"A"})


def test_without_a_list_definitions_and_reexports_count_but_imports_do_not() -> None:
    source = "from a import B as B, C\nimport d\nX = 1\nY: int = 2\n_Z = 3\ndef f(): ...\nclass G: ...\n"
    assert public_names(source) == frozenset({"B", "X", "Y", "f", "G"})


SAMPLE = """
class A(ABC):
    kind: str = ""
    WORD = 1
    _hidden: int = 2
    def __init__(self, a, /, b=1, *, c, d=2): ...
    @property
    def size(self): ...
    async def wait(self, *args, **named): ...
    def _private(self): ...
class _B:
    x: int
def f(a, b=2): ...
"""


def test_members_are_fields_words_properties_and_methods_with_their_parameters() -> None:
    found = ["kind", "WORD", "__init__(a, b=, *, c, d=)", "size", "wait(*args, **named)"]
    assert members_of(SAMPLE, "m") == [*(f"m.A.{name}" for name in found), "m.f(a, b=)"]


def test_what_is_promised_is_among_the_members() -> None:
    """Of each sort one: a method, a hook, a field, a word, a group, a setting, an exit status."""
    assert {
        "hardpoint.interfaces.platform.Platform.describe(device)",
        "hardpoint.interfaces.platform.EngineSettings.worker",
        "hardpoint.interfaces.plugin.ProbeStatus.BROKEN",
        "group hardpoint.platform.v1",
        "setting scheduler.max_num_seqs",
        "setting plugin_policy.strict",
        "exit status 130",
    } <= set(current_members())
    assert any(line.startswith("hardpoint.interfaces.hooks.HookSpecs.request_added(") for line in current_members())
