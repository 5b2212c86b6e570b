"""Forward context: scoped, nested, restored, and loud outside its scope."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_torch_runtime import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    has_forward_context,
    set_forward_context,
)


def context(num_tokens: int) -> ForwardContext:
    return ForwardContext(attention_metadata=None, slot_mapping={}, kv_caches={}, num_tokens=num_tokens)


def test_reading_outside_a_scope_names_the_setter() -> None:
    """R4.63, P4.10."""
    assert not has_forward_context()
    with pytest.raises(RuntimeError, match="set_forward_context"):
        get_forward_context()


def test_nested_scopes_restore_the_outer_one() -> None:
    """R4.62."""
    outer, inner = context(1), context(2)
    with set_forward_context(outer) as active:
        assert active is outer
        with set_forward_context(inner):
            assert get_forward_context() is inner
        assert get_forward_context() is outer
    assert not has_forward_context()


@given(st.lists(st.booleans(), max_size=8))
def test_any_nesting_with_errors_leaves_the_depth_as_it_was(failures: list[bool]) -> None:
    """R4.62, I4.5: each level raises or not; the level above always gets its own context back."""

    def enter(level: int) -> None:
        if level == len(failures):
            return
        own = context(level)
        with set_forward_context(own):
            if failures[level]:
                with pytest.raises(KeyError), set_forward_context(context(-1)):
                    raise KeyError(level)
            enter(level + 1)
            assert get_forward_context() is own

    enter(0)
    assert not has_forward_context()


def test_the_context_is_frozen() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        context(1).num_tokens = 2  # type: ignore[misc]


def test_batch_descriptors_are_keys() -> None:
    """R4.61: immutable, hashable, compared by value; the adapter count tells graphs apart."""
    assert {BatchDescriptor(8, 2, True): "graph"}[BatchDescriptor(8, 2, True)] == "graph"
    assert BatchDescriptor(8, has_adapter=True, num_adapters=1) != BatchDescriptor(8, has_adapter=True, num_adapters=2)
    assert BatchDescriptor(8).num_rows is None
