"""Prefix hits that end inside a block, and the copies they take (spec 03 section 3.9)."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint.errors import ConfigError
from hardpoint.testing import FakeWorker
from hardpoint_scheduling.kv_cache.coordinator import Gates, KVCoordinator
from hardpoint_scheduling.schedulers.factories import BatchOptions
from kv_support import admit, coordinator, full, hashes_of, latent, window
from sched_support import BLOCK, Loop, expected, kv_config, make_scheduler, request

TOKENS = list(range(100))


def filled(num_tokens: int, *, num_blocks: int = 20) -> KVCoordinator:
    """Blocks of 8 tokens, hashes of 2, one request that computed ``num_tokens`` in an earlier step."""
    kv = coordinator(num_blocks, full(8), tail_unit=2)
    assert kv.hash_block_size == 2
    admit(kv, "a", num_tokens)
    kv.enter_full_blocks("a", hashes_of(TOKENS, 2), num_tokens)
    kv.begin_step()
    return kv


def test_a_hit_may_end_inside_a_block() -> None:
    """R3.92, R3.64: 13 tokens are computed, 12 of them in whole units, 4 of those in the second block."""
    kv = filled(13)
    hit = kv.find_prefix(hashes_of(TOKENS, 2), 40)
    assert (hit.num_tokens, hit.num_tail_tokens) == (12, 4)
    (table,) = kv.block_ids("a")
    assert list(hit.blocks[0]) == list(table)
    assert hit.without_tail().num_tokens == 8
    assert kv.find_prefix(hashes_of([*TOKENS[:10], 77, 78], 2), 40).num_tokens == 8


def test_one_token_is_left_to_compute() -> None:
    """R3.91."""
    kv = filled(12)
    assert kv.find_prefix(hashes_of(TOKENS[:12], 2), 12).num_tokens == 8
    assert kv.find_prefix(hashes_of(TOKENS[:13], 2), 13).num_tokens == 12


def test_the_partial_block_is_copied_and_not_shared() -> None:
    """R3.64, R3.19: whole blocks are adopted, the last one is written by both and therefore copied."""
    kv = filled(13)
    hashes = hashes_of(TOKENS, 2)
    first, source = kv.block_ids("a")[0]
    hit = kv.find_prefix(hashes, 40)
    (table,) = admit(kv, "b", 10, hit=hit)
    assert table[0] == first
    assert table[1] != source
    assert kv.take_block_copies() == [(source, table[1])]
    assert kv.take_block_copies() == []
    assert [kv.pool.references(block) for block in (first, source, table[1])] == [2, 1, 1]
    kv.pool.check_integrity(kv.tables())


def test_a_refusal_copies_nothing() -> None:
    """R3.71."""
    kv = filled(13, num_blocks=4)
    hit = kv.find_prefix(hashes_of(TOKENS, 2), 40)
    assert admit(kv, "b", 20, hit=hit) is None
    assert kv.take_block_copies() == []
    assert admit(kv, "b", 4, hit=hit, gates=Gates(reserved_blocks=1)) is None
    assert admit(kv, "b", 4, hit=hit) is not None


def test_a_block_that_fills_up_gives_up_its_partial_key() -> None:
    """R3.20: one key per block, the latest."""
    kv = filled(13)
    hashes = hashes_of(TOKENS, 2)
    kv.grow("a", 16)
    kv.enter_full_blocks("a", hashes, 16)
    assert kv.pool.num_cached == 2
    assert kv.find_prefix(hashes, 40).num_tokens == 16
    assert kv.find_prefix(hashes[:6], 40).num_tokens == 8


def test_what_a_step_writes_is_copied_in_a_later_one_only() -> None:
    """Copies come before everything else of a step."""
    kv = coordinator(20, full(8), tail_unit=2)
    hashes = hashes_of(TOKENS, 2)
    admit(kv, "a", 13)
    kv.enter_full_blocks("a", hashes, 13)
    assert kv.find_prefix(hashes, 40).num_tokens == 8
    kv.begin_step()
    assert kv.find_prefix(hashes, 40).num_tokens == 12


def test_an_idle_partial_block_can_still_be_copied() -> None:
    """R3.17, R3.76: it waits among the free ones, is not consumed, and may even become the copy."""
    kv = filled(13, num_blocks=4)
    hashes = hashes_of(TOKENS, 2)
    source = list(kv.block_ids("a")[0])[1]
    kv.free("a")
    hit = kv.find_prefix(hashes, 40)
    assert hit.num_tokens == 12
    (table,) = admit(kv, "b", 12, hit=hit)
    assert len(table) == 3
    assert kv.take_block_copies() == [(source, table[1])]


def test_tails_need_one_group_that_keeps_its_blocks() -> None:
    for specs in ((full(8), latent(8)), (window(5, 8),)):
        with pytest.raises(ConfigError, match="leave the tail unit unset"):
            coordinator(40, *specs, tail_unit=2)
    with pytest.raises(ConfigError, match="multiple"):
        coordinator(40, full(8), tail_unit=3)


def test_tokens_are_those_of_a_request_alone() -> None:
    """I3.8: turns of conversations go on inside the block where the one before ended, under pressure."""
    loop = tail_loop(num_blocks=18)
    prompts = {f"turn0-{i}": [*range(3, 4 + i), 60 + i] for i in range(4)}
    for turn in range(1, 4):
        for name, prompt in prompts.items():
            loop.scheduler.add(request(name, prompt, max_tokens=6))
        loop.run()
        for name, prompt in prompts.items():
            assert loop.tokens(name) == expected(prompt, 6)
        prompts = {f"turn{turn}-{i}": [*p, *expected(p, 6), 5] for i, p in enumerate(prompts.values())}
    copies = [step.block_copies for step in loop.steps if step.block_copies is not None]
    assert sum(len(pairs) for pairs in copies) >= 4
    assert all(pairs.dtype == np.int32 and pairs.shape[1] == 2 for pairs in copies)
    assert loop.scheduler.stats().num_free_blocks == 17


def tail_loop(num_blocks: int) -> Loop:
    """A scheduler whose option lets prefixes end anywhere, over the fake worker."""
    worker = FakeWorker(block_size=BLOCK)
    worker.initialize_kv_cache(kv_config(num_blocks))
    return Loop(make_scheduler(num_blocks, options=BatchOptions(tail_unit=1)), worker)


def test_the_options_of_a_scheduler_reach_its_hashes() -> None:
    """R11.24: one group's block size, what divides all, or the unit the operator asks for."""
    two = kv_config(40, 4, 8)
    assert make_scheduler(kv_cache=two)._state.kv.hash_block_size == 4
    assert make_scheduler(kv_cache=two, options=BatchOptions(match_unit=2))._state.kv.hash_block_size == 2
    with pytest.raises(ConfigError, match="leave the tail unit unset"):
        make_scheduler(kv_cache=two, options=BatchOptions(tail_unit=2))
    with pytest.raises(ConfigError, match="does not divide KV blocks of 4"):
        make_scheduler(kv_cache=two, options=BatchOptions(match_unit=3))
