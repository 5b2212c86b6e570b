"""Tiles and splits are read from tables by pure functions; nothing is measured."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_attention.triton.configs import (
    INTERPRETED,
    SPLITS,
    TABLES,
    Phase,
    SizeClass,
    Target,
    choose_splits,
    choose_tiles,
    next_power_of_two,
    size_class,
    target_for,
)
from hardpoint_attention.triton.device import DeviceFacts
from hardpoint_attention.triton.planning import LaunchPlan, LaunchQuestion, plan_fast, plan_fixed

DECODES = LaunchQuestion(
    num_heads=32,
    num_kv_heads=8,
    size=SizeClass.UP_TO_128,
    element_bytes=2,
    num_rows=2,
    num_tokens=2,
    max_query_len=1,
    max_seq_len=8192,
    max_parts=4096,
    device=DeviceFacts(Target.SM_90, 132),
)


def test_every_table_has_an_entry_for_everything() -> None:
    assert set(TABLES) == set(Target) - {Target.INTERPRETER}
    for target in TABLES:
        for size in SizeClass:
            for width in (2, 4):
                for phase in Phase:
                    tiles = choose_tiles(target, size, width, phase)
                    assert tiles.block_m >= 16, "tensor cores take no less"
                    assert tiles.block_m & (tiles.block_m - 1) == tiles.tile & (tiles.tile - 1) == 0
                    assert 16 <= tiles.tile <= 128
                    assert tiles.num_warps in (4, 8)
                    assert 1 <= tiles.num_stages <= 3
                    assert choose_tiles(Target.INTERPRETER, size, width, phase) is INTERPRETED


@pytest.mark.parametrize(
    ("capability", "is_hip", "target"),
    [
        (None, False, Target.INTERPRETER),
        ((8, 0), False, Target.SM_80),
        ((8, 9), False, Target.SM_80),
        ((9, 0), False, Target.SM_90),
        ((10, 0), False, Target.SM_100),
        ((12, 0), False, Target.SM_80),
        ((9, 4), True, Target.GFX942),
    ],
)
def test_devices_find_the_tables_that_fit_them(
    capability: tuple[int, int] | None, is_hip: bool, target: Target
) -> None:
    """The newest consumer devices have as little shared memory as the oldest."""
    assert target_for(capability, is_hip=is_hip) is target


def test_sizes_are_classed_by_what_holds_them() -> None:
    classes = {size: size_class(size, is_latent=False) for size in (8, 64, 65, 80, 128, 129, 256)}
    assert classes == {
        8: SizeClass.UP_TO_64,
        64: SizeClass.UP_TO_64,
        65: SizeClass.UP_TO_128,
        80: SizeClass.UP_TO_128,
        128: SizeClass.UP_TO_128,
        129: SizeClass.UP_TO_256,
        256: SizeClass.UP_TO_256,
    }
    assert size_class(576, is_latent=True) is SizeClass.LATENT


def test_powers_of_two() -> None:
    assert [next_power_of_two(size) for size in (0, 1, 16, 17, 80, 128, 129)] == [16, 16, 16, 32, 128, 128, 256]


def test_few_long_decodes_are_split_and_many_or_short_ones_are_not() -> None:
    """R5.33: by what the host knows."""
    assert plan_fast(DECODES).splits == 16
    assert plan_fast(replace(DECODES, num_rows=64, num_tokens=64)).splits == 1
    assert plan_fast(replace(DECODES, max_seq_len=500)).splits == 1
    assert plan_fast(replace(DECODES, max_seq_len=1024)).splits == 4
    assert plan_fast(replace(DECODES, max_parts=5)).splits == 2, "there is scratch for two tokens in two parts each"


def test_prefills_take_large_blocks_and_whole_keys() -> None:
    prefill = plan_fast(replace(DECODES, max_query_len=100, num_tokens=101))
    assert prefill == LaunchPlan(choose_tiles(Target.SM_90, SizeClass.UP_TO_128, 2, Phase.PREFILL))
    drafts = plan_fast(replace(DECODES, max_query_len=4, num_tokens=8))
    assert drafts.tiles.block_m == 16, "four queries of four heads fill a small block"


@settings(max_examples=60, deadline=None)
@given(
    num_tokens=st.integers(1, 5000),
    programs=st.integers(1, 5000),
    max_seq_len=st.integers(0, 200_000),
    processors=st.integers(1, 300),
    max_parts=st.integers(1, 5000),
)
def test_splits_stay_within_their_bounds(
    num_tokens: int, programs: int, max_seq_len: int, processors: int, max_parts: int
) -> None:
    """R5.33."""
    splits = choose_splits(
        num_tokens=num_tokens, programs=programs, max_seq_len=max_seq_len, processors=processors, max_parts=max_parts
    )
    assert splits in SPLITS
    assert splits == 1 or (splits * num_tokens <= max_parts and splits * 256 <= max_seq_len)
    assert splits == 1 or programs * (splits - 1) <= 2 * processors


@settings(max_examples=40, deadline=None)
@given(
    num_rows=st.integers(1, 300),
    max_query_len=st.integers(1, 300),
    max_seq_len=st.integers(1, 100_000),
    heads=st.sampled_from([(32, 8), (8, 8), (128, 1)]),
)
def test_the_fixed_plan_does_not_depend_on_the_step(
    num_rows: int, max_query_len: int, max_seq_len: int, heads: tuple[int, int]
) -> None:
    """R5.33: batch invariance takes one part."""
    question = replace(DECODES, num_heads=heads[0], num_kv_heads=heads[1])
    step = replace(
        question,
        num_rows=num_rows,
        num_tokens=num_rows * max_query_len,
        max_query_len=max_query_len,
        max_seq_len=max_seq_len,
    )
    assert plan_fixed(step) == plan_fixed(question)
    assert plan_fixed(step).splits == 1
