"""KV cache events: whoever applies them in order knows the prefix index, and what each block holds."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import (
    AdapterRef,
    AllBlocksCleared,
    BlockHash,
    BlockHashWithGroup,
    BlocksRemoved,
    BlocksStored,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    KVEvent,
    MambaCacheMode,
    MambaSpec,
    SlidingWindowSpec,
    group_key,
    spec_to_wire,
)
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.events import KVEventLog
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256
from hardpoint_scheduling.schedulers.request import LiveRequest
from sched_support import BLOCK, Loop, expected, make_loop, request, spec

ROOT = BlockHash(bytes(32))


class Mirror:
    """What a router keeps: the cached prefixes, and the tokens of each."""

    def __init__(self) -> None:
        self.cached: dict[BlockHashWithGroup, BlocksStored] = {}

    def apply(self, events: Sequence[KVEvent]) -> None:
        for event in events:
            if isinstance(event, AllBlocksCleared):
                self.cached.clear()
            elif isinstance(event, BlocksRemoved):
                for block_hash in event.block_hashes:
                    del self.cached[group_key(block_hash, event.group)]
            else:
                for block_hash in event.block_hashes:
                    key = group_key(block_hash, event.group)
                    assert key not in self.cached, "stored twice"
                    self.cached[key] = event


def index_of(pool: BlockPool) -> set[BlockHashWithGroup]:
    return {key for key, _ in pool._index}


def check_chain(event: BlocksStored, hasher: ChainedHasher) -> None:
    """The event's tokens, hashed behind its parent, give its hashes: a router can rely on them."""
    assert len(event.token_ids) == len(event.block_hashes) * event.block_size
    again = ChainedHasher(hasher._function, event.block_size, event.parent_hash or hasher.root)
    found: list[BlockHash] = []
    again.extend(request("x", [1]), event.token_ids, found)
    if event.block_size == hasher.block_size:
        assert found == event.block_hashes


def live(name: str, tokens: Sequence[int], block_size: int = 4, **fields: Any) -> LiveRequest:
    made = LiveRequest(request(name, tokens, **fields), 1_000)
    ChainedHasher(Sha256(), block_size, ROOT).extend(made.record, made.tokens, made.block_hashes)
    return made


def logged_pool(num_blocks: int, *requests: LiveRequest, sizes: tuple[int, ...] = (4,)) -> BlockPool:
    pool = BlockPool(num_blocks)
    pool.log = KVEventLog({made.request_id: made for made in requests}.get, 4, sizes)
    return pool


def events_of(pool: BlockPool) -> list[KVEvent]:
    assert pool.log is not None
    return pool.log.take()


def store(pool: BlockPool, owner: LiveRequest, blocks: Sequence[int], first: int = 0, group: int = 0) -> None:
    assert pool.log is not None
    pool.log.entering(owner.request_id, owner.block_hashes)
    pool.remember_many(blocks, [group_key(h, group) for h in owner.block_hashes[first : first + len(blocks)]])


def test_blocks_of_one_sequence_come_as_one_event_with_parent_and_tokens() -> None:
    one = live("a", range(3, 16), adapter=AdapterRef("style", 1, "/x"))
    pool = logged_pool(9, one)
    blocks = pool.allocate(3)
    store(pool, one, blocks)
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert (event.block_hashes, event.parent_hash) == (one.block_hashes, None)
    assert event.token_ids.tolist() == list(range(3, 15))
    assert (event.block_size, event.group, event.adapter, event.has_extra_keys) == (4, 0, "style", False)
    assert event.medium == "device"
    assert events_of(pool) == []


def test_later_blocks_name_the_one_before_them() -> None:
    one = live("a", range(3, 19), cache_salt="mine")
    pool = logged_pool(9, one)
    blocks = pool.allocate(4)
    store(pool, one, blocks[:1])
    assert len(events_of(pool)) == 1
    store(pool, one, blocks[1:3], first=1)
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert event.parent_hash == one.block_hashes[0]
    assert event.token_ids.tolist() == list(range(7, 15))
    assert event.has_extra_keys


def test_blocks_that_do_not_follow_each_other_are_told_apart() -> None:
    """Before a window nothing is held, so nothing is told: R3.12, R3.20."""
    one, two = live("a", range(3, 23)), live("b", range(30, 50))
    pool = logged_pool(20, one, two)
    blocks = pool.allocate(6)
    store(pool, one, [0, 0, *blocks[:2]])
    store(pool, two, blocks[2:4], first=1)
    store(pool, one, blocks[4:5], first=4)
    first, second, third = events_of(pool)
    assert isinstance(first, BlocksStored)
    assert isinstance(second, BlocksStored)
    assert isinstance(third, BlocksStored)
    assert (first.parent_hash, first.block_hashes) == (one.block_hashes[1], one.block_hashes[2:4])
    assert (second.parent_hash, second.block_hashes) == (two.block_hashes[0], two.block_hashes[1:3])
    assert (third.parent_hash, third.token_ids.tolist()) == (one.block_hashes[3], list(range(19, 23)))


def test_an_equal_block_adds_nothing_and_only_the_last_to_go_is_told() -> None:
    """R3.13, R3.14."""
    one = live("a", range(3, 7))
    pool = logged_pool(3, one)
    blocks = pool.allocate(2)
    store(pool, one, blocks[:1])
    assert len(events_of(pool)) == 1
    store(pool, one, blocks[1:])
    assert events_of(pool) == []
    pool.forget(blocks[0])
    assert events_of(pool) == []
    pool.forget(blocks[1])
    assert events_of(pool) == [BlocksRemoved(block_hashes=one.block_hashes)]


def test_evictions_come_in_their_order_before_what_replaces_them() -> None:
    """R3.16, R3.20: also where a block's key changes."""
    one, two = live("a", range(3, 15)), live("b", range(40, 52))
    pool = logged_pool(4, one, two)
    blocks = pool.allocate(3)
    store(pool, one, blocks)
    pool.free(reversed(blocks))
    again = pool.allocate(2)
    store(pool, two, again)
    stored, removed, replaced = events_of(pool)
    assert isinstance(stored, BlocksStored)
    assert removed == BlocksRemoved(block_hashes=[one.block_hashes[2], one.block_hashes[1]])
    assert isinstance(replaced, BlocksStored)
    assert replaced.block_hashes == two.block_hashes[:2]
    store(pool, two, again[1:], first=2)
    removed, replaced = events_of(pool)
    assert removed == BlocksRemoved(block_hashes=[two.block_hashes[1]])
    assert isinstance(replaced, BlocksStored)
    assert pool.num_evictions == 2


def test_a_reset_says_that_everything_is_gone() -> None:
    """R3.22: what was not told before it need not be told any more."""
    one = live("a", range(3, 15))
    pool = logged_pool(5, one)
    blocks = pool.allocate(3)
    store(pool, one, blocks)
    assert not pool.reset()
    pool.free(blocks)
    assert pool.reset()
    assert events_of(pool) == [AllBlocksCleared()]


def test_larger_group_blocks_carry_the_tokens_of_the_whole_block() -> None:
    """R11.21: hash blocks of 4, group blocks of 8; and a partial tail tells what it has."""
    one = live("a", range(100, 128))
    pool = logged_pool(9, one, sizes=(4, 8))
    blocks = pool.allocate(3)
    assert pool.log is not None
    pool.log.entering("a", one.block_hashes)
    for block, position in zip(blocks[:2], (1, 3), strict=True):
        pool.remember(block, group_key(one.block_hashes[position], 1))
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert (event.group, event.block_size) == (1, 8)
    assert event.token_ids.tolist() == list(range(100, 116))
    pool.remember(blocks[2], group_key(one.block_hashes[4], 1))
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert event.parent_hash == one.block_hashes[3]
    assert event.token_ids.tolist() == list(range(116, 120))


def test_a_block_nobody_announced_is_told_without_tokens() -> None:
    pool = logged_pool(3)
    (block,) = pool.allocate(1)
    pool.remember(block, group_key(BlockHash(b"x" * 32), 0))
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert event.block_hashes == [b"x" * 32]
    assert len(event.token_ids) == 0
    assert event.token_ids.dtype == np.int32


def test_a_block_entered_late_still_has_its_tokens() -> None:
    """Also when the request ended in between, but nobody is remembered for good."""
    one = live("a", range(3, 15))
    alive = {"a": one}
    pool = BlockPool(9)
    pool.log = KVEventLog(alive.get, 4, (4,))
    blocks = pool.allocate(3)
    store(pool, one, blocks[:1])
    assert len(events_of(pool)) == 1
    del alive["a"]
    store(pool, one, blocks[1:2], first=1)
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert event.token_ids.tolist() == [7, 8, 9, 10]
    events_of(pool)
    store(pool, one, blocks[2:], first=2)
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert (event.parent_hash, len(event.token_ids)) == (one.block_hashes[1], 0)


def test_without_the_setting_nothing_is_collected() -> None:
    loop = make_loop()
    loop.scheduler.add(request("a", range(3, 13)))
    loop.run()
    assert loop.scheduler._state.kv.pool.log is None
    assert list(loop.scheduler.take_events()) == []
    assert loop.scheduler.stats().num_cached_blocks == 3


def test_a_served_request_is_told_block_by_block() -> None:
    loop = make_loop(kv_events=True)
    prompt = list(range(3, 13))
    loop.scheduler.add(request("a", prompt, max_tokens=6))
    events: list[KVEvent] = []
    while loop.scheduler.has_work():
        loop.step()
        events.extend(loop.scheduler.take_events())
    stored = [event for event in events if isinstance(event, BlocksStored)]
    assert [event.token_ids.tolist() for event in stored] == [prompt[:8], [*prompt[8:], *expected(prompt, 2)]]
    assert stored[1].parent_hash == stored[0].block_hashes[-1]
    for event in stored:
        check_chain(event, loop.scheduler._state.hasher)


PROMPTS = st.lists(st.integers(3, 5), min_size=1, max_size=24)
ACTIONS = st.lists(
    st.one_of(
        st.tuples(st.just("add"), PROMPTS, st.integers(1, 9)),
        st.tuples(st.just("step"), st.integers(1, 4)),
        st.tuples(st.just("abort"), st.integers(0, 9)),
        st.tuples(st.just("reset")),
        st.tuples(st.just("take")),
    ),
    max_size=25,
)


def play(loop: Loop, actions: Sequence[tuple[Any, ...]], mirror: Mirror) -> None:
    scheduler = loop.scheduler
    num_added = 0
    for name, *arguments in [*actions, ("step", 400), ("take",)]:
        if name == "add":
            scheduler.add(request(f"r{num_added}", *arguments))
            num_added += 1
        elif name == "step":
            for _ in range(arguments[0]):
                if scheduler.has_work():
                    loop.step()
        elif name == "abort":
            loop.collect(scheduler.finish([f"r{arguments[0]}"], FinishReason.ABORT))
        elif name == "reset":
            scheduler.reset_prefix_cache()
        else:
            events = scheduler.take_events()
            for event in events:
                if isinstance(event, BlocksStored):
                    check_chain(event, scheduler._state.hasher)
            mirror.apply(events)
            assert set(mirror.cached) == index_of(scheduler._state.kv.pool)


FULL, LARGE = spec(), spec(2 * BLOCK)
WINDOW = SlidingWindowSpec(block_size=BLOCK, sliding_window=7, num_kv_heads=1, head_size=1, dtype="int8")
STATE = MambaSpec(block_size=BLOCK, shapes=((4,),), dtypes=("int8",), mode=MambaCacheMode.ALIGN)
MODELS = st.sampled_from([(FULL,), (FULL, LARGE), (FULL, WINDOW), (FULL, STATE)])


def rebuild(num_blocks: int, specs: Sequence[KVCacheSpec], actions: Sequence[tuple[Any, ...]]) -> None:
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate(specs))
    kv_cache = KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())
    play(make_loop(num_blocks, kv_cache=kv_cache, kv_events=True), actions, Mirror())


@settings(max_examples=40, deadline=None)
@given(st.integers(8, 40), MODELS, ACTIONS)
def test_the_stream_rebuilds_the_index(
    num_blocks: int, specs: Sequence[KVCacheSpec], actions: list[tuple[Any, ...]]
) -> None:
    """I3.3, of the stream: after any workload, whoever applied all events knows exactly the cached blocks."""
    rebuild(num_blocks, specs, actions)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=3_000, deadline=None)
@given(st.integers(8, 40), MODELS, ACTIONS)
def test_the_stream_rebuilds_the_index_at_length(
    num_blocks: int, specs: Sequence[KVCacheSpec], actions: list[tuple[Any, ...]]
) -> None:
    """I3.3, of the stream."""
    rebuild(num_blocks, specs, actions)


def test_a_removed_block_can_be_stored_again() -> None:
    one = live("a", range(3, 7))
    pool = logged_pool(2, one)
    mirror = Mirror()
    for _ in range(3):
        (block,) = pool.allocate(1)
        store(pool, one, [block])
        pool.free([block])
        mirror.apply(events_of(pool))
        assert set(mirror.cached) == index_of(pool)
    assert pool.num_evictions == 2


def test_tokens_are_those_at_the_time_of_storing() -> None:
    """Outputs may grow until the events are taken."""
    one = live("a", range(3, 7))
    pool = logged_pool(2, one)
    store(pool, one, pool.allocate(1))
    one.append(99)
    (event,) = events_of(pool)
    assert isinstance(event, BlocksStored)
    assert event.token_ids.tolist() == list(array("i", range(3, 7)))
