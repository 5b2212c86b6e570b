"""Forward context: scoped, nested, restored, and loud outside its scope."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_torch_runtime import (
    BatchDescriptor,
    ForwardContext,
    get_forward_context,
    has_forward_context,
    set_forward_context,
)
from hardpoint_torch_runtime.forward_context import DataParallelMetadata, GraphMode, LayerTurns


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


@settings(deadline=None)
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


def test_a_context_has_every_field_of_a_step_and_plain_defaults() -> None:
    """R4.60: nothing is compiled, captured, padded or exchanged unless somebody says so."""
    plain = context(3)
    assert plain.graph_mode is GraphMode.NONE
    assert not plain.skips_compiled
    defaults = (plain.batch_descriptor, plain.padding_mask, plain.moe_turns, plain.data_parallel, plain.half_metadata)
    assert defaults == (None,) * 5
    assert (plain.extras, plain.uncompiled_layers) == ({}, {})


def test_two_halves_have_exactly_two_maps_and_none_of_the_whole() -> None:
    """R4.60."""
    halves = ({"layer": 1}, {"layer": 2})
    whole = dataclasses.replace(context(4), attention_metadata={}, half_metadata=halves)
    assert whole.half_metadata == halves
    wrong: Any
    for wrong in ((), ({},), ({}, {}, {})):
        with pytest.raises(ValueError, match=f"half_metadata holds {len(wrong)} maps"):
            dataclasses.replace(whole, half_metadata=wrong)
    for metadata in ({"layer": 3}, None):
        with pytest.raises(ValueError, match="attention_metadata must be empty"):
            dataclasses.replace(whole, attention_metadata=metadata)


def test_layers_take_turns_in_their_order() -> None:
    """R4.67: each name once, the index counts from 0 to their number."""
    turns = LayerTurns(["a", "b"])
    assert turns.index == 0
    assert [turns.take(), turns.take("b")] == ["a", "b"]
    assert turns.index == 2
    turns.check_complete()
    with pytest.raises(RuntimeError, match="all 2 listed ones have had theirs"):
        turns.take()


def test_turns_out_of_order_or_missing_are_found_out() -> None:
    """P4.11: reordered operators, and a forward that ended early."""
    turns = LayerTurns(["a", "b"])
    with pytest.raises(RuntimeError, match=r"turn of layer 'a', but 'b' asks.*named_layers"):
        turns.take("b")
    turns.take("a")
    with pytest.raises(RuntimeError, match="only 1 of 2 listed layers ran; the next one would have been 'b'"):
        turns.check_complete()


@settings(deadline=None)
@given(st.lists(st.integers(0, 50), min_size=1, max_size=4), st.integers(1, 5))
def test_shares_of_ranks_add_up(counts: list[int], size: int) -> None:
    """R4.64: sequence parallelism shares out what data parallelism counts, no rank more than one token ahead."""
    known = DataParallelMetadata(0, tuple(counts), size)
    assert known.max_tokens == max(counts)
    shares = [known.local_tokens[first : first + size] for first in range(0, len(counts) * size, size)]
    assert [sum(share) for share in shares] == counts
    assert all(max(share) - min(share) <= 1 for share in shares)


def test_ranks_that_cannot_be_are_named() -> None:
    with pytest.raises(ValueError, match="data-parallel rank 2 has no entry"):
        DataParallelMetadata(2, (1, 1))
    with pytest.raises(ValueError, match="sequence_parallel_size is 0"):
        DataParallelMetadata(0, (1,), 0)
