"""Managers of layers that give blocks up, keep fixed tables or none (spec 01 section 1.2, spec 03 section 3.2)."""

from __future__ import annotations

import pytest

from hardpoint.errors import ConfigError, OutOfBlocksError
from hardpoint.interfaces import BlockHash, FullAttentionSpec, MambaCacheMode
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.chunked_local import ChunkedLocalManager
from hardpoint_scheduling.kv_cache.cross_attention import CrossAttentionManager
from hardpoint_scheduling.kv_cache.encoder_only import EncoderOnlyManager
from hardpoint_scheduling.kv_cache.full_attention import FullAttentionManager
from hardpoint_scheduling.kv_cache.mamba import (
    AlignedStateManager,
    RunningStateManager,
    StatePerBlockManager,
    state_manager,
)
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from hardpoint_scheduling.kv_cache.sliding_window import SlidingWindowManager
from kv_support import HEADS, chunked, cross, encoder_only, state, window

HASHES = [BlockHash(bytes([i]) * 32) for i in range(40)]


def windowed(tokens: int, num_blocks: int = 30) -> tuple[BlockPool, SlidingWindowManager]:
    pool = BlockPool(num_blocks)
    return pool, SlidingWindowManager(pool, 0, window(tokens))


def aligned(num_blocks: int = 30, drafts: int = 0, checkpoints: int = 0) -> tuple[BlockPool, AlignedStateManager]:
    pool = BlockPool(num_blocks)
    return pool, AlignedStateManager(pool, 0, state(MambaCacheMode.ALIGN, 4, drafts, checkpoints))


def test_blocks_before_the_window_become_the_null_block() -> None:
    """R3.12, R3.77: token 14 reads 9 to 14, so the blocks of tokens 0 to 7 go, last one first."""
    pool, manager = windowed(6)
    blocks = list(manager.allocate("a", 16))
    manager.release_unneeded("a", 14)
    assert list(manager.block_ids("a")) == [0, 0, *blocks[2:]]
    assert pool.free_order()[:2] == [blocks[0], blocks[1]]
    manager.release_unneeded("a", 3)
    manager.release_unneeded("a", 14)
    assert list(manager.block_ids("a")) == [0, 0, *blocks[2:]]
    pool.check_integrity({"a": [manager.block_ids("a")]})
    manager.free("a")
    assert pool.num_free == pool.num_usable


@pytest.mark.parametrize(("tokens", "skipped"), [(1, 10), (2, 9), (5, 9), (6, 8), (9, 8), (10, 7), (41, 0), (99, 0)])
def test_a_window_skips_what_its_first_token_does_not_reach(tokens: int, skipped: int) -> None:
    """R1.34: 40 tokens are computed; token 40 reads back to 40 - window + 1."""
    assert windowed(tokens)[1].num_skipped_blocks(40) == skipped


def test_a_hit_needs_only_the_blocks_of_one_window() -> None:
    """R3.92, R3.12: blocks 2 and 3 of four suffice for a window of 6; shorter hits need what leads up to them."""
    pool, manager = windowed(6)
    blocks = list(manager.allocate("a", 16))
    manager.cache_full_blocks("a", HASHES, 16)
    pool.forget(blocks[1])
    assert list(manager.find_hit(HASHES, 16)) == [0, 0, blocks[2], blocks[3]]
    assert list(manager.find_hit(HASHES, 15)) == [blocks[0]]
    pool.forget(blocks[3])
    assert list(manager.find_hit(HASHES, 16)) == [blocks[0]]
    pool.forget(blocks[0])
    assert list(manager.find_hit(HASHES, 16)) == []


def test_released_and_null_blocks_are_not_entered() -> None:
    """R3.20: masked positions are skipped, those behind them are entered."""
    pool, manager = windowed(4)
    manager.allocate("a", 16)
    manager.release_unneeded("a", 12)
    manager.cache_full_blocks("a", HASHES, 16)
    assert pool.num_cached == 2
    assert list(manager.find_hit(HASHES, 16)) == [0, 0, 0, manager.block_ids("a")[3]]


def test_a_window_hit_is_adopted_with_its_gaps() -> None:
    """R3.19: the null block is not touched, and what follows is released as usual."""
    pool, manager = windowed(5)
    manager.allocate("a", 12)
    manager.cache_full_blocks("a", HASHES, 12)
    hit = manager.find_hit(HASHES, 12)
    assert list(hit) == [0, 0, manager.block_ids("a")[2]]
    manager.free("a")
    manager.adopt("b", hit)
    assert manager.blocks_needed("b", 20, 0) == 2
    manager.allocate("b", 20)
    manager.release_unneeded("b", 20)
    assert list(manager.block_ids("b"))[:4] == [0, 0, 0, 0]
    assert pool.references(hit[2]) == 0
    with pytest.raises(ValueError, match="already holds blocks"):
        manager.adopt("b", hit)
    pool.check_integrity({"b": [manager.block_ids("b")]})


def test_chunks_forget_those_before_them() -> None:
    """R1.34, R3.12: chunks of 8 tokens; a hit at the end of a chunk needs no block at all."""
    pool = BlockPool(30)
    manager = ChunkedLocalManager(pool, 0, chunked(8))
    assert [manager.num_skipped_blocks(n) for n in (0, 7, 8, 15, 16)] == [0, 0, 2, 2, 4]
    blocks = list(manager.allocate("a", 20))
    manager.cache_full_blocks("a", HASHES, 20)
    assert list(manager.find_hit(HASHES, 20)) == [0, 0, 0, 0, blocks[4]]
    assert list(manager.find_hit(HASHES, 19)) == [0, 0, 0, 0]
    assert list(manager.find_hit(HASHES, 15)) == [0, 0, blocks[2]]
    manager.release_unneeded("a", 17)
    assert list(manager.block_ids("a")) == [0, 0, 0, 0, blocks[4]]
    with pytest.raises(ConfigError, match="no whole number of blocks of 4"):
        ChunkedLocalManager(pool, 0, chunked(6))


def test_encoder_tokens_get_their_blocks_once() -> None:
    """R1.34: as many as the encoder gives, whatever the decoder adds; more than planned is an error."""
    pool = BlockPool(30)
    manager = CrossAttentionManager(pool, 0, cross(20))
    assert manager.blocks_needed("a", 9, 0) == 3
    assert len(manager.allocate("a", 9)) == 3
    assert manager.allocate("a", 17) == ()
    with pytest.raises(ValueError, match="21 encoder tokens; allowed: 20"):
        manager.blocks_needed("b", 21, 0)
    with pytest.raises(ValueError, match="not shared"):
        manager.adopt("b", [1])
    manager.cache_full_blocks("a", HASHES, 9)
    assert list(manager.find_hit(HASHES, 9)) == []
    manager.free("a")
    manager.free("a")
    assert pool.num_free == pool.num_usable


def test_encoder_layers_keep_nothing() -> None:
    """R1.34."""
    pool = BlockPool(2)
    manager = EncoderOnlyManager(pool, 0, encoder_only())
    assert manager.blocks_needed("a", 1000, 0) == 0
    assert manager.allocate("a", 1000) == ()
    assert list(manager.block_ids("a")) == []
    assert pool.num_free == 1


def test_tokens_dealt_out_among_ranks_take_fewer_positions() -> None:
    """R1.34: two ranks hold 4 tokens each per block id."""
    pool = BlockPool(10)
    manager = FullAttentionManager(pool, 0, FullAttentionSpec(block_size=4, context_shards=2, **HEADS))
    assert manager.blocks_needed("a", 17, 0) == 3
    assert len(manager.allocate("a", 8)) == 1


def test_the_mode_chooses_the_manager() -> None:
    """R1.33."""
    pool = BlockPool(10)
    kinds = {mode: type(state_manager(pool, 0, state(mode))) for mode in MambaCacheMode}
    assert kinds == {
        MambaCacheMode.NONE: RunningStateManager,
        MambaCacheMode.ALL: StatePerBlockManager,
        MambaCacheMode.ALIGN: AlignedStateManager,
    }


def test_a_running_state_is_one_block_and_those_of_drafts() -> None:
    """R1.33, P1.5: constant in the length."""
    pool = BlockPool(10)
    manager = state_manager(pool, 0, state(MambaCacheMode.NONE, drafts=2))
    assert manager.blocks_needed("a", 1, 0) == manager.blocks_needed("a", 10_000, 0) == 3
    assert manager.blocks_needed("a", 0, 0) == 0
    assert len(manager.allocate("a", 5)) == 3
    assert manager.allocate("a", 10_000) == ()
    assert not manager.caches_prefixes


def test_a_state_at_every_block_end() -> None:
    """R1.33, P1.5: mode all grows with the length, and one state stands for all tokens before it."""
    pool = BlockPool(20)
    manager = state_manager(pool, 0, state(MambaCacheMode.ALL, drafts=1))
    blocks = list(manager.allocate("a", 13))
    assert len(blocks) == 5
    manager.cache_full_blocks("a", HASHES, 13)
    assert list(manager.find_hit(HASHES, 40)) == [0, 0, blocks[2]]
    manager.release_unneeded("a", 13)
    assert list(manager.block_ids("a")) == [0, 0, 0, *blocks[3:]]
    assert list(manager.find_hit(HASHES, 11)) == [0, blocks[1]]


def test_aligned_states_skip_what_a_step_passes() -> None:
    """R1.33, R3.12: a chunk of 12 tokens leaves one state, and the next step needs that and its own."""
    pool, manager = aligned()
    first = list(manager.allocate("a", 12))
    assert first[:2] == [0, 0]
    manager.cache_full_blocks("a", HASHES, 12)
    manager.release_unneeded("a", 12)
    second = list(manager.allocate("a", 13))
    assert list(manager.block_ids("a")) == [0, 0, first[2], *second]
    assert list(manager.find_hit(HASHES, 40)) == [0, 0, first[2]]
    manager.release_unneeded("a", 14)
    assert list(manager.block_ids("a")) == [0, 0, 0, *second]
    pool.check_integrity({"a": [manager.block_ids("a")]})


def test_a_block_end_that_a_step_passed_has_no_state() -> None:
    """R3.20: entered are ends of steps alone, or another request would start from the state of some other token."""
    pool, manager = aligned()
    manager.allocate("a", 10)
    manager.cache_full_blocks("a", HASHES, 10)
    assert pool.num_cached == 0
    manager.allocate("a", 12)
    manager.cache_full_blocks("a", HASHES, 12)
    assert list(manager.find_hit(HASHES, 40)) == [0, 0, manager.block_ids("a")[2]]


def test_checkpoints_are_states_on_the_way() -> None:
    """R1.33: one more state per long step, at the last block end before its own."""
    _, manager = aligned(checkpoints=1)
    blocks = list(manager.allocate("a", 14))
    assert [bool(block) for block in blocks] == [False, False, True, True]
    manager.cache_full_blocks("a", HASHES, 14)
    assert list(manager.find_hit(HASHES, 40)) == [0, 0, blocks[2]]


def test_positions_of_drafts_move_on_with_the_sequence() -> None:
    """R3.14: the running position takes over the first of them; a long step lends their blocks to its own positions."""
    pool, manager = aligned(drafts=2)
    first = list(manager.allocate("a", 4))
    assert len(first) == 3
    (one_more,) = manager.allocate("a", 5)
    assert list(manager.block_ids("a")) == [*first, one_more]
    manager.release_unneeded("a", 8)
    assert manager.blocks_needed("a", 24, 0) == 1
    new = list(manager.allocate("a", 24))
    table = list(manager.block_ids("a"))
    assert table[0] == 0
    assert table[1] == first[1]
    assert table[2:5] == [0, 0, 0]
    assert {first[2], one_more} < set(new)
    assert sum(map(bool, table)) == 4
    pool.check_integrity({"a": [table]})


def test_drafts_must_not_reach_across_blocks() -> None:
    with pytest.raises(ConfigError, match="set --block-size to more than 4"):
        aligned(drafts=4)


def test_a_short_pool_leaves_aligned_states_as_they_were() -> None:
    """R3.16, R3.71."""
    pool, manager = aligned(num_blocks=5, drafts=1)
    manager.allocate("a", 4)
    others = pool.allocate(2)
    before = list(manager.block_ids("a"))
    with pytest.raises(OutOfBlocksError):
        manager.allocate("a", 40)
    assert list(manager.block_ids("a")) == before
    pool.free(others)
    assert manager.allocate("a", 40)


@pytest.mark.parametrize("step", [1, 3, 4, 9])
def test_no_sequence_holds_more_than_its_bound(step: int) -> None:
    """R1.34, R1.35: at every length, with what is not needed given up before each step."""
    for spec in (window(6), window(1), window(13), chunked(12), *(state(mode, 4) for mode in MambaCacheMode)):
        for drafts in (0, 2) if hasattr(spec, "mode") else (0,):
            one = state(spec.mode, 4, drafts) if hasattr(spec, "mode") else spec
            pool = BlockPool(200)
            manager = SpecRegistry().manager_for(type(one))(pool, 0, one)
            done = 0
            while done < 90:
                manager.release_unneeded("a", done)
                done += step
                manager.allocate("a", done)
                assert pool.num_usable - pool.num_free <= one.max_blocks(done, step), (one, done)
