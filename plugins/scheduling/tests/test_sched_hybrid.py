"""Groups of different kinds, block sizes and hash granularity under one coordinator (spec 03 sections 3.6 and 3.9)."""

from __future__ import annotations

import time

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import BlockHash, KVCacheSpec, MambaCacheMode, MixedSizeSpec
from hardpoint_scheduling.kv_cache.coordinator import UNLIMITED_TOKENS, Gates, KVCoordinator
from kv_support import admit, chunked, coordinator, cross, encoder_only, full, hashes_of, latent, state, window

TOKENS = [i % 250 for i in range(400)]
ALIGN, ALL, NONE = MambaCacheMode.ALIGN, MambaCacheMode.ALL, MambaCacheMode.NONE


def cached(kv: KVCoordinator, *ends: int, name: str = "a") -> list[BlockHash]:
    """Hashes of a request that computed up to each of ``ends`` in turn, a step each, and still holds its blocks."""
    hashes = hashes_of(TOKENS, kv.hash_block_size)
    assert admit(kv, name, ends[0]) is not None
    kv.enter_full_blocks(name, hashes, ends[0])
    for end in ends[1:]:
        kv.begin_step()
        assert kv.grow(name, end) is not None
        kv.enter_full_blocks(name, hashes, end)
    kv.begin_step()
    return hashes


def test_a_hit_is_what_all_groups_have() -> None:
    """R3.92: the state group shortens the hit, and the window group is asked again for the shorter one."""
    kv = coordinator(60, full(), window(6), state(ALIGN, 8))
    hashes = cached(kv, 8, 16, 27)
    hit = kv.find_prefix(hashes, 28)
    assert hit.num_tokens == 16
    keeps, slides, states = hit.blocks
    assert all(keeps)
    assert [bool(block) for block in slides] == [False, False, True, True]
    assert [bool(block) for block in states] == [False, True]
    assert kv.find_prefix(hashes, 16).num_tokens == 8
    assert kv.find_prefix(hashes, 8).num_tokens == 0


def test_groups_shorten_one_another_until_they_agree() -> None:
    """R3.92: neither the first nor the second answer is common; the third is."""
    kv = coordinator(60, full(), window(9), window(5, 8))
    hashes = cached(kv, 32)
    tables = kv.block_ids("a")
    # Blocks of 8 tokens end at 8, 16, 24 and 32; those of 4 tokens are lost so that 32, 24 and 28 fail.
    kv.pool.forget(tables[1][7])
    kv.pool.forget(tables[1][5])
    assert kv.find_prefix(hashes, 40).num_tokens == 16
    kv.pool.forget(tables[2][1])
    assert kv.find_prefix(hashes, 40).num_tokens == 8


def test_hashes_suit_the_groups_that_find_prefixes() -> None:
    """R11.24, R11.21: blocks of 6 and 4 tokens share hashes of 2; a group without prefixes has no say."""
    kv = coordinator(60, full(6), window(30, 4))
    assert kv.hash_block_size == 2
    hashes = cached(kv, 24)
    assert kv.find_prefix(hashes, 24).num_tokens == 12
    assert coordinator(60, full(8), encoder_only(3)).hash_block_size == 8


@pytest.mark.parametrize(
    "other", [cross(), encoder_only(), state(NONE)], ids=["cross", "encoder only", "running state"]
)
def test_one_group_without_prefixes_rules_them_out(other: KVCacheSpec) -> None:
    """R3.90: what such a layer needs of earlier tokens is nowhere."""
    kv = coordinator(60, full(), other)
    assert not kv.prefix_caching
    assert kv.find_prefix(hashes_of(TOKENS, 4), 100) == kv.no_hit()


def test_encoder_tokens_take_blocks_of_their_group_alone() -> None:
    """R3.70, P3.12: 10 decoder tokens, 17 of the encoder; growth concerns the decoder only."""
    kv = coordinator(20, full(), cross(20), encoder_only())
    tables = admit(kv, "a", 10, encoder=17)
    assert [len(table) for table in tables] == [3, 5, 0]
    assert kv.covered(10) == 12
    grown = kv.grow("a", 13)
    assert grown is not None
    assert [len(new) for new in grown] == [1, 0, 0]
    assert admit(kv, "b", 4, encoder=0) is not None
    assert [len(table) for table in kv.block_ids("b")] == [1, 0, 0]
    kv.pool.check_integrity(kv.tables())


def test_growth_gives_up_before_it_takes() -> None:
    """R3.71, R3.77: the block that the window leaves serves the row itself; unsettled tokens keep theirs."""
    kv = coordinator(4, window(4))
    admit(kv, "a", 12)
    assert kv.grow_many(["a"], [13]).num_rows == 0
    assert kv.grow_many(["a"], [13], [3]).num_rows == 0
    growth = kv.grow_many(["a"], [13], [11])
    assert growth.num_rows == 1
    assert kv.pool.num_free == 1
    assert list(kv.block_ids("a")[0])[:2] == [0, 0]


def test_a_refused_row_is_the_first_without_room_in_any_group() -> None:
    """R3.71: no group grows alone."""
    kv = coordinator(8, full(), full())
    for name in ("a", "b"):
        admit(kv, name, 4)
    growth = kv.grow_many(["a", "b"], [8, 8])
    assert growth.num_rows == 1
    assert [len(table) for table in kv.block_ids("b")] == [1, 1]
    assert growth.row(0) == tuple(list(table[1:]) for table in kv.block_ids("a"))


def test_loaded_tokens_outside_the_window_get_no_blocks() -> None:
    """R3.70, R3.12: 40 tokens come from elsewhere; of a window of 6 only the last blocks are needed."""
    kv = coordinator(20, window(6))
    (table,) = admit(kv, "a", 3, external=40)
    assert [bool(block) for block in table] == [False] * 8 + [True] * 3
    assert kv.pool.num_free == 16


def test_a_hit_that_loaded_tokens_overtake_is_not_adopted() -> None:
    """R3.76: blocks outside the window are neither touched nor counted."""
    kv = coordinator(8, window(5))
    hashes = cached(kv, 8)
    kv.free("a")
    hit = kv.find_prefix(hashes, 9)
    assert hit.num_tokens == 8
    (table,) = admit(kv, "b", 4, hit=hit, external=12)
    assert [bool(block) for block in table] == [False] * 4 + [True] * 2
    assert kv.pool.references(hit.blocks[0][1]) == 0


def test_a_state_that_is_loaded_has_its_own_position() -> None:
    """R3.70, R1.33: the state after 12 loaded tokens, and the one the step computes from it."""
    kv = coordinator(20, full(), state(ALIGN, 4, drafts=1))
    tables = admit(kv, "a", 20, external=12)
    assert [bool(block) for block in tables[1]] == [False, False, True, False, False, False, False, True, True]


def test_the_whole_sequence_is_counted_by_the_bound_of_start_up() -> None:
    """R1.35, R3.73: 100 tokens of a windowed layer need 5 blocks, not 25."""
    kv = coordinator(6, window(9), max_in_flight_tokens=8)
    assert kv.largest_sequence == 1000
    gates = Gates(full_sequence_must_fit=True)
    assert admit(kv, "a", 8, gates=gates, whole=100) is not None
    assert admit(kv, "b", 8, gates=gates, whole=100) is None
    assert coordinator(5, window(9), max_in_flight_tokens=8).largest_sequence == 12


def test_blocks_still_needed_follow_the_bound_too() -> None:
    """R3.75: what prefills under way will take at most."""
    kv = coordinator(60, full(), window(5), max_in_flight_tokens=4)
    admit(kv, "a", 4)
    assert kv.blocks_to_grow("a", 40) == 9 + (3 - 1)
    assert kv.blocks_to_grow("a", 4) == 0


def test_a_state_is_found_after_its_step_and_never_if_distrusted() -> None:
    """R3.20: keys and values are shared within a step, states are not."""
    kv = coordinator(40, state(ALL))
    hashes = hashes_of(TOKENS, 4)
    admit(kv, "a", 8)
    kv.enter_full_blocks("a", hashes, 8)
    assert kv.find_prefix(hashes, 9).num_tokens == 0
    kv.begin_step()
    assert kv.find_prefix(hashes, 9).num_tokens == 8
    admit(kv, "b", 12)
    kv.enter_full_blocks("b", hashes, 12)
    kv.free("b")
    assert kv.find_prefix(hashes, 13).num_tokens == 12, "the end of a request loses what it computed"
    admit(kv, "c", 16)
    kv.enter_full_blocks("c", hashes, 16)
    kv.forget("c")
    kv.begin_step()
    assert kv.find_prefix(hashes, 17).num_tokens == 12


def test_pages_that_states_leave_are_cleared_for_keys_and_values() -> None:
    """R3.95, R1.48: only where both kinds share memory, only new blocks, each once."""
    kv = coordinator(40, full(), state(ALIGN, 8))
    tables = admit(kv, "a", 12)
    assert kv.take_blocks_to_zero() == list(tables[0])
    kv.grow("a", 13)
    assert kv.take_blocks_to_zero() == list(kv.block_ids("a")[0])[3:]
    assert kv.take_blocks_to_zero() == []
    other = coordinator(40, full(), window(4))
    admit(other, "a", 12)
    assert other.take_blocks_to_zero() == []


def test_common_blocks_are_counted_in_groups_that_keep_them() -> None:
    """R3.97."""
    kv = coordinator(60, full(), window(8))
    hashes = cached(kv, 16)
    admit(kv, "b", 8, hit=kv.find_prefix(hashes, 13))
    assert kv.num_common_blocks("a") == (3, 0)


def test_steps_end_where_states_can_be_found() -> None:
    """R1.33: chunks of a prompt are cut to the last block end they reach."""
    kv = coordinator(60, full(), state(ALIGN, 8))
    assert kv.step_alignment == 8
    assert [kv.aligned_end(0, end) for end in (5, 8, 30)] == [5, 8, 24]
    assert [kv.aligned_end(24, end) for end in (27, 33)] == [27, 32]
    assert coordinator(60, full(), state(ALL, 8)).step_alignment == 1
    assert coordinator(60, state(ALIGN, 8), prefix_caching=False).step_alignment == 1


def test_room_counts_positions_for_guesses() -> None:
    """R3.52: a sure token behind the block is allocated for, whatever positions guesses have there."""
    kv = coordinator(60, state(ALIGN, 4, drafts=2))
    assert kv.tells_guesses_apart
    admit(kv, "a", 4, lookahead=2)
    assert kv.covered(6, 4) == 4
    assert kv.covered(9, 7) == 8
    assert kv.covered(8, 6) == 8
    ends, sure = np.asarray([6, 9, 8], dtype=np.int32), np.asarray([4, 7, 6], dtype=np.int32)
    assert kv.covered_all(ends, sure).tolist() == [4, 8, 8]
    assert kv.covered_all(sure).tolist() == [4, 8, 8]
    assert not coordinator(60, full()).tells_guesses_apart


def test_a_state_under_way_lends_its_position_to_nobody() -> None:
    """R3.77: token 4 is in flight in what was a position for guesses, and the next chunk starts from its state."""
    kv = coordinator(20, state(ALIGN, 4, drafts=1))
    admit(kv, "a", 4)
    assert kv.covered(5, 4) == 4, "the sure token behind the block would not be announced"
    for end in (5, 14):
        assert kv.grow_many(["a"], [end], [4], [end]).num_rows == 1
        (table,) = kv.block_ids("a")
        assert table[1]
    assert [bool(block) for block in table] == [True, True, False, True, True]


def test_layers_of_mixed_sizes_are_managed_like_the_first() -> None:
    """R1.36: one table for all of them."""
    kv = coordinator(60, MixedSizeSpec.of([latent(8), full(8)]), window(4))
    hashes = cached(kv, 16)
    assert kv.group_block_sizes() == (8, 4)
    assert kv.find_prefix(hashes, 17).num_tokens == 16


def test_positions_of_sharded_tokens_span_the_blocks_of_all_ranks() -> None:
    """R1.34, R11.24: two ranks with blocks of 4 tokens fill a position, and its hash, with 8."""
    kv = coordinator(20, full(4, context_shards=2))
    assert (kv.group_block_sizes(), kv.hash_block_size) == ((8,), 8)
    hashes = cached(kv, 17)
    assert [len(table) for table in kv.block_ids("a")] == [3]
    assert kv.find_prefix(hashes, 20).num_tokens == 16
    assert kv.largest_sequence == 19 * 8


def test_a_model_of_encoder_layers_alone_has_unlimited_room() -> None:
    kv = coordinator(1, encoder_only())
    assert admit(kv, "a", 500) is not None
    assert kv.covered(500) == UNLIMITED_TOKENS
    assert kv.largest_sequence == 1000
    assert kv.grow_many(["a"], [700]).row(0) == ((),)
    assert kv.covers_exactly("a", UNLIMITED_TOKENS)


def test_reset_forgets_all_groups_once_nobody_holds_blocks() -> None:
    """R3.22."""
    kv = coordinator(60, full(), window(6), state(ALL, 8))
    hashes = cached(kv, 16)
    assert not kv.reset()
    assert kv.find_prefix(hashes, 17).num_tokens == 16
    kv.free("a")
    assert kv.reset()
    assert kv.find_prefix(hashes, 17).num_tokens == 0


SPECS = st.one_of(
    st.builds(full, st.sampled_from([2, 4, 8])),
    st.builds(window, st.integers(1, 20), st.sampled_from([2, 4, 8])),
    st.builds(lambda n, size: chunked(n * size, size), st.integers(1, 3), st.sampled_from([2, 4, 8])),
    st.builds(state, st.sampled_from(MambaCacheMode), st.sampled_from([4, 8]), st.integers(0, 2), st.integers(0, 1)),
    st.builds(cross, st.just(10)),
)


@settings(max_examples=60, deadline=None)
@given(
    specs=st.lists(SPECS, min_size=1, max_size=3),
    length=st.integers(1, 80),
    in_flight=st.integers(1, 16),
    whole=st.booleans(),
    external=st.integers(0, 40),
)
def test_what_fits_at_start_up_is_admitted_and_reaches_its_end(
    specs: list[KVCacheSpec], length: int, in_flight: int, whole: bool, external: int
) -> None:
    """R1.35: in a pool of exactly the bound, alone, whatever the chunks and loads."""
    bound = sum(spec.max_blocks(length, min(length, in_flight)) for spec in specs)
    kv = coordinator(bound + 1, *specs, max_model_len=length, max_in_flight_tokens=in_flight)
    assert kv.largest_sequence == length
    external = min(external, length - 1)
    new = min(in_flight, length - external)
    gates = Gates(full_sequence_must_fit=whole)
    assert admit(kv, "a", new, gates=gates, external=external, whole=length, encoder=10) is not None
    done = external + new
    while done < length:
        new = min(in_flight, length - done)
        assert kv.grow_many(["a"], [done + new], [done], [done + new]).num_rows == 1
        done += new
    kv.pool.check_integrity(kv.tables())


@pytest.mark.timeout(60)
def test_a_long_cached_prompt_is_found_and_adopted_in_milliseconds() -> None:
    """100,000 tokens in 6,250 blocks; the bound allows for a busy machine, the goal is 10 ms."""
    kv = coordinator(20_000, full(16), window(4_096, 16), max_model_len=200_000)
    hashes = [BlockHash(i.to_bytes(32, "big")) for i in range(6_250)]
    assert admit(kv, "a", 100_000) is not None
    kv.enter_full_blocks("a", hashes, 100_000)
    kv.free("a")
    times = []
    for _ in range(5):
        start = time.perf_counter()
        hit = kv.find_prefix(hashes, 100_001)
        assert admit(kv, "b", 1, hit=hit) is not None
        times.append(time.perf_counter() - start)
        assert hit.num_tokens == 100_000
        kv.free("b")
    assert min(times) < 0.05
