"""The public surface changes only together with the file that a reviewer reads."""

from __future__ import annotations

import importlib

import pytest

from public_surface import current_surface, difference, public_names

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
