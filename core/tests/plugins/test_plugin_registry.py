"""Registries refuse contradictions and list what they know."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import PluginConflictError, PluginNotFoundError
from hardpoint.plugins import Registry


def test_equal_registration_is_silent_and_keeps_the_first_source() -> None:
    """R12.13"""
    registry: Registry[str, tuple[int, ...]] = Registry("layout")
    registry.register("rows", (1, 2), source="acme")
    registry.register("rows", (1, 2), source="other")
    assert (registry.get("rows"), registry.source("rows"), len(registry)) == ((1, 2), "acme", 1)


def test_a_conflict_names_both_sides() -> None:
    registry: Registry[str, int] = Registry("layout")
    registry.register("rows", 1, source="acme")
    with pytest.raises(PluginConflictError, match=r"layout 'rows' .* both acme \(1\) and other \(2\)"):
        registry.register("rows", 2, source="other")
    assert registry.get("rows") == 1


def test_an_unknown_key_lists_the_valid_ones() -> None:
    registry: Registry[str, int] = Registry("layout")
    with pytest.raises(PluginNotFoundError, match="unknown layout 'rows'; registered: none"):
        registry.get("rows")
    registry.register("rows", 1, source="acme")
    registry.register("columns", 2, source="acme")
    with pytest.raises(PluginNotFoundError, match=r"'row' .did you mean 'rows'.*registered: columns, rows"):
        registry.source("row")
    assert "rows" in registry
    assert list(registry) == ["rows", "columns"]
    assert dict(registry.items()) == {"rows": 1, "columns": 2}


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(0, 2))), st.integers(1, 3))
def test_filling_any_number_of_times_gives_equal_registries(entries: list[tuple[str, int]], times: int) -> None:
    """I12.3"""
    once: Registry[str, int] = Registry("thing")
    often: Registry[str, int] = Registry("thing")
    first = dict(reversed(entries))
    for key, value in first.items():
        once.register(key, value, source="acme")
    for _ in range(times):
        for key, value in first.items():
            often.register(key, value, source="acme")
    assert dict(once.items()) == dict(often.items()) == first
