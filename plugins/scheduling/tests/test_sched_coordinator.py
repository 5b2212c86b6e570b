"""Blocks across groups: prefix hits, admission gates, growth (spec 03 sections 3.6 and 3.9)."""

from __future__ import annotations

import time
from collections.abc import Sequence

import pytest

from hardpoint.errors import ConfigError, OutOfBlocksError
from hardpoint.interfaces import BlockHash, KVCacheConfig
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.coordinator import Gates, KVCoordinator, PrefixHit, Segments
from hardpoint_scheduling.kv_cache.full_attention import FullAttentionManager
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from hardpoint_scheduling.views import ReadOnlyView
from sched_support import kv_config, spec

HASHES = [BlockHash(bytes([i]) * 32) for i in range(40)]
OPEN = Gates()


def coordinator(num_blocks: int, *block_sizes: int, max_model_len: int = 1000, **fields: bool) -> KVCoordinator:
    config = kv_config(num_blocks, *block_sizes)
    return KVCoordinator(config, SpecRegistry(), max_model_len=max_model_len, **fields)


def admit(
    kv: KVCoordinator, name: str, tokens: int, gates: Gates = OPEN, **segments: int
) -> Sequence[Sequence[int]] | None:
    fields = {"hit": 0, "external": 0, "new": tokens, "lookahead": 0, "whole": tokens, **segments}
    return kv.allocate_slots(name, Segments(**fields), PrefixHit(0, ((),) * kv.num_groups), gates)


def admit_hit(kv: KVCoordinator, name: str, tokens: int, gates: Gates = OPEN) -> PrefixHit | None:
    hit = kv.find_prefix(HASHES, tokens)
    segments = Segments(hit.num_tokens, 0, tokens - hit.num_tokens, 0, tokens)
    return hit if kv.allocate_slots(name, segments, hit, gates) is not None else None


def test_at_least_one_token_is_computed() -> None:
    """R3.91, P3.1, with the numbers of the specification."""
    kv = coordinator(20, 16)
    admit(kv, "a", 48)
    kv.enter_full_blocks("a", HASHES, 48)
    assert kv.find_prefix(HASHES, 32).num_tokens == 16
    assert kv.find_prefix(HASHES, 33).num_tokens == 32
    assert kv.find_prefix(HASHES, 1).num_tokens == 0


def test_a_hit_ends_at_the_first_miss() -> None:
    """R3.92."""
    kv = coordinator(20)
    admit(kv, "a", 16)
    kv.enter_full_blocks("a", [HASHES[0], HASHES[9], HASHES[2]], 16)
    assert kv.find_prefix(HASHES, 17).num_tokens == 4


def test_without_caching_nothing_is_found() -> None:
    """R3.90."""
    kv = coordinator(20, prefix_caching=False)
    admit(kv, "a", 16)
    kv.enter_full_blocks("a", HASHES, 16)
    assert kv.find_prefix(HASHES, 17) == PrefixHit(0, ((),))


def test_groups_with_different_block_sizes_agree_on_a_hit() -> None:
    """R3.92, R3.15, P3.12, R11.21: two groups, hashes of 4 tokens, blocks of 4 and 8."""
    kv = coordinator(40, 4, 8)
    assert kv.hash_block_size == 4
    tables = admit(kv, "a", 20)
    assert tables is not None
    assert [len(table) for table in tables] == [5, 3]
    kv.enter_full_blocks("a", HASHES, 20)
    hit = kv.find_prefix(HASHES, 21)
    assert hit.num_tokens == 16
    assert [len(blocks) for blocks in hit.blocks] == [4, 2]
    assert kv.covered(17) == 20
    kv.pool.check_integrity(kv.tables())


def test_groups_without_a_common_divisor_use_the_greatest() -> None:
    kv = coordinator(60, 6, 4)
    assert kv.hash_block_size == 2
    admit(kv, "a", 24)
    kv.enter_full_blocks("a", HASHES, 24)
    assert kv.find_prefix(HASHES, 24).num_tokens == 12


def test_a_refusal_changes_nothing() -> None:
    """R3.71."""
    kv = coordinator(6)
    admit(kv, "a", 8)
    kv.enter_full_blocks("a", HASHES, 8)
    before = kv.pool.free_order()
    hit = kv.find_prefix(HASHES, 30)
    assert hit.num_tokens == 8
    assert admit_hit(kv, "b", 30) is None
    assert kv.pool.free_order() == before
    assert kv.pool.references(hit.blocks[0][0]) == 1
    assert not kv.holds("b")


def test_nothing_to_allocate_for_is_an_error() -> None:
    """R3.72."""
    with pytest.raises(ValueError, match="neither new nor external"):
        admit(coordinator(6), "a", 0)


def test_no_segment_reaches_past_the_context_length() -> None:
    """R3.72: counts are clipped, whichever segment goes too far."""
    for new, external, lookahead in ((30, 0, 0), (4, 30, 0), (8, 0, 30)):
        kv = coordinator(20, max_model_len=12)
        tables = admit(kv, "a", new, external=external, lookahead=lookahead)
        assert tables is not None
        assert len(tables[0]) == 3
    assert coordinator(20, max_model_len=12).end_with_lookahead(11, 5) == 12


def test_external_tokens_need_blocks_too() -> None:
    """R3.70."""
    kv = coordinator(10)
    tables = admit(kv, "a", 2, external=8)
    assert tables is not None
    assert len(tables[0]) == 3


def test_lookahead_gets_blocks_but_never_more_than_the_pool_has() -> None:
    kv = coordinator(4)
    tables = admit(kv, "a", 5, lookahead=3)
    assert tables is not None
    assert len(tables[0]) == 2
    kv.free("a")
    tables = admit(kv, "a", 5, lookahead=1000)
    assert tables is not None
    assert len(tables[0]) == 3


def test_the_whole_sequence_can_be_asked_to_fit() -> None:
    """R3.73, P3.6."""
    kv = coordinator(4)
    assert admit(kv, "a", 4, Gates(full_sequence_must_fit=True), whole=16) is None
    assert admit(kv, "a", 4, Gates(full_sequence_must_fit=True), whole=12) is not None
    assert admit(kv, "b", 4, Gates(), whole=16) is not None


def test_reserved_blocks_stay_free() -> None:
    """R3.74, R3.75."""
    kv = coordinator(5)
    assert admit(kv, "a", 8, Gates(reserved_blocks=3)) is None
    assert admit(kv, "a", 8, Gates(reserved_blocks=2)) is not None
    assert kv.pool.num_free == 2


def test_hits_in_the_free_queue_count_as_consumed() -> None:
    """R3.76."""
    kv = coordinator(4)
    admit(kv, "a", 8)
    kv.enter_full_blocks("a", HASHES, 8)
    kv.free("a")
    assert kv.pool.num_free == 3
    assert admit_hit(kv, "b", 14) is None
    hit = admit_hit(kv, "b", 12)
    assert hit is not None
    assert hit.num_tokens == 8
    assert kv.pool.num_free == 0


def test_growing_beyond_the_pool_is_refused_for_all_groups_together() -> None:
    kv = coordinator(6, 4, 4)
    admit(kv, "a", 8)
    assert kv.grow("a", 9) is None
    assert [len(table) for table in kv.block_ids("a")] == [2, 2]
    kv = coordinator(4)
    admit(kv, "a", 8)
    assert kv.grow("a", 8) == ((),)
    grown = kv.grow("a", 9)
    assert grown is not None
    assert len(grown[0]) == 1
    assert kv.grow("a", 13) is None


def test_the_longest_sequence_follows_from_pool_and_context_length() -> None:
    """R1.35."""
    assert coordinator(4).largest_sequence == 12
    assert coordinator(4, max_model_len=7).largest_sequence == 7
    assert coordinator(7, 4, 8).largest_sequence == 16
    with pytest.raises(ConfigError, match="do not hold a single token"):
        coordinator(2, 4, 4)


def test_common_blocks_are_those_that_every_holder_shares() -> None:
    """R3.97."""
    kv = coordinator(40)
    admit(kv, "a", 12)
    kv.enter_full_blocks("a", HASHES, 12)
    assert kv.num_common_blocks("a") == (0,)
    admit_hit(kv, "b", 9)
    assert kv.num_common_blocks("a") == (2,)
    admit_hit(kv, "c", 5)
    assert kv.num_common_blocks("b") == (1,)
    admit(kv, "d", 5)
    assert kv.num_common_blocks("b") == (0,)


def test_forgotten_blocks_are_not_found_but_stay_allocated() -> None:
    kv = coordinator(10)
    admit(kv, "a", 8)
    kv.enter_full_blocks("a", HASHES, 8)
    kv.forget("a")
    assert kv.find_prefix(HASHES, 9).num_tokens == 0
    assert [len(table) for table in kv.block_ids("a")] == [2]
    kv.free("a")
    kv.free("a")
    assert kv.reset()


def test_a_model_without_kv_has_unlimited_room() -> None:
    kv = KVCoordinator(KVCacheConfig(num_blocks=1, groups=(), tensors=()), SpecRegistry(), max_model_len=50)
    assert admit(kv, "a", 50) == ()
    assert kv.covered(50) > 10**9
    assert kv.largest_sequence == 50
    assert kv.grow("a", 60) == ()


def test_manager_keeps_its_tables_append_only() -> None:
    """R3.14: ids handed out stay where they are; the view cannot be written."""
    pool = BlockPool(10)
    manager = FullAttentionManager(pool, 0, spec())
    assert manager.blocks_needed("a", 9, 1) == 2
    first = list(manager.allocate("a", 5))
    view = manager.block_ids("a")
    assert isinstance(view, ReadOnlyView)
    more = list(manager.allocate("a", 13))
    assert list(view) == first + more
    assert manager.allocate("a", 13) == ()
    assert manager.blocks_needed("a", 13, 0) == 0
    assert not hasattr(view, "append")
    with pytest.raises(TypeError):
        view[0] = 1  # type: ignore[index]
    with pytest.raises(ValueError, match="already holds blocks"):
        manager.adopt("a", [1])
    with pytest.raises(OutOfBlocksError):
        manager.allocate("a", 100)
    manager.free("a")
    manager.free("a")
    assert list(manager.block_ids("a")) == []
    assert pool.num_free == 9


def test_partial_blocks_are_not_entered_and_each_block_only_once() -> None:
    """R3.20, R11.5."""
    pool = BlockPool(10)
    manager = FullAttentionManager(pool, 0, spec())
    manager.cache_full_blocks("a", HASHES, 7)
    manager.allocate("a", 12)
    manager.cache_full_blocks("a", HASHES, 7)
    assert pool.num_cached == 1
    manager.cache_full_blocks("a", HASHES[:2], 12)
    assert pool.num_cached == 2
    manager.cache_full_blocks("a", HASHES, 4)
    manager.cache_full_blocks("a", HASHES, 12)
    assert pool.num_cached == 3
    assert list(manager.find_hit(HASHES, 12)) == list(manager.block_ids("a"))


def test_rows_at_a_boundary_grow_together_up_to_the_first_that_is_short() -> None:
    """R3.71, R3.14: the batch call takes as much as row by row calls would, and appends it."""
    for sizes in ((4,), (4, 8)):
        one, many = coordinator(22, *sizes), coordinator(22, *sizes)
        names = ["a", "b", "c", "d"]
        for kv in (one, many):
            for name in names:
                admit(kv, name, 4)
        ends = [8, 4, 17, 8]
        growth = many.grow_many(names, ends)
        alone = [one.grow(name, end) for name, end in zip(names, ends, strict=True)]
        assert growth.num_rows == 4
        taken = [[len(ids) for ids in growth.row(i)] for i in range(4)]
        assert taken == [[len(ids) for ids in blocks] for blocks in alone if blocks is not None]
        for i, name in enumerate(names):
            for ids, table in zip(growth.row(i), many.block_ids(name), strict=True):
                assert list(table)[len(table) - len(ids) :] == list(ids)
        assert many.tables().keys() == one.tables().keys()
        free = many.pool.num_free
        short = many.grow_many(names, [12, 4 * free + 40, 12, 12])
        assert short.num_rows == 1
        assert len(short.ids[0]) == 1
        many.pool.check_integrity(many.tables())
    assert coordinator(4).grow_many([], []).num_rows == 0


def test_a_row_without_blocks_can_grow_in_a_batch() -> None:
    kv = coordinator(10)
    admit(kv, "a", 4)
    growth = kv.grow_many(["a", "new"], [5, 8], processed=[4, 0])
    assert [len(growth.row(i)[0]) for i in range(2)] == [1, 2]
    assert not kv.releases
    kv.release_unneeded("a", 4)
    assert len(kv.block_ids("a")[0]) == 2


def test_full_blocks_of_many_requests_are_entered_like_one_by_one() -> None:
    """R3.20."""
    kv = coordinator(40, 4, 8)
    for name in "ab":
        admit(kv, name, 16)
    other = [BlockHash(bytes([200 + i]) * 32) for i in range(8)]
    kv.enter_full_blocks_many(["a", "b"], [HASHES, other], [16, 9])
    assert kv.find_prefix(HASHES, 17).num_tokens == 16
    assert kv.find_prefix(other, 17).num_tokens == 8


@pytest.mark.timeout(60)
def test_a_batch_at_a_block_boundary_is_cheap() -> None:
    """256 rows that all need a block: a fraction of a millisecond; the bound allows for a busy machine."""
    kv = coordinator(20_000, 16, max_model_len=10_000)
    names = [f"r{i}" for i in range(256)]
    for name in names:
        admit(kv, name, 16)
    times = []
    for turn in range(1, 12):
        start = time.perf_counter()
        growth = kv.grow_many(names, [16 * turn + 1] * 256)
        times.append(time.perf_counter() - start)
        assert growth.num_rows == 256
    assert min(times) < 3e-3
