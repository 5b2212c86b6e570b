"""Block pool, free queue and prefix index (spec 03 section 3.2)."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardpoint.errors import ConfigError, OutOfBlocksError
from hardpoint.interfaces import AllBlocksCleared, BlockHash, BlockHashWithGroup, BlocksRemoved, group_key
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.events import KVEventLog
from hardpoint_scheduling.kv_cache.free_queue import FreeQueue
from hardpoint_scheduling.kv_cache.prefix_index import PrefixIndex


def key(number: int, group: int = 0) -> BlockHashWithGroup:
    return group_key(BlockHash(number.to_bytes(32, "big")), group)


def test_the_queue_hands_out_ids_in_order_and_takes_from_both_ends_and_the_middle() -> None:
    """R3.10."""
    queue = FreeQueue(6)
    assert queue.pop_many(2) == [0, 1]
    queue.remove(4)
    queue.prepend(1)
    queue.append(0)
    assert list(queue) == [1, 2, 3, 5, 0]
    assert len(queue) == 5
    assert 4 not in queue
    queue.check(np.asarray([True, True, True, True, False, True]))


def test_the_queue_refuses_to_be_corrupted() -> None:
    queue = FreeQueue(3)
    with pytest.raises(ValueError, match="already in the free queue"):
        queue.append(1)
    queue.remove(1)
    with pytest.raises(ValueError, match="not in the free queue"):
        queue.remove(1)
    with pytest.raises(OutOfBlocksError, match="3 KV blocks were asked for, but only 2 are free"):
        queue.pop_many(3)
    assert list(queue) == [0, 2]
    with pytest.raises(RuntimeError, match="unreferenced"):
        queue.check(np.asarray([True, True, False]))


def test_an_emptied_queue_can_be_filled_again() -> None:
    queue = FreeQueue(2)
    assert queue.pop_many(2) == [0, 1]
    assert list(queue) == []
    queue.append(1)
    queue.prepend(0)
    assert queue.pop_many(2) == [0, 1]


def test_block_zero_is_the_null_block_and_is_left_alone() -> None:
    """R3.11, P3.11: never handed out, counted, freed or hashed."""
    pool = BlockPool(4)
    assert pool.num_usable == pool.num_free == 3
    assert pool.allocate(3) == [1, 2, 3]
    pool.free([0])
    pool.touch([0])
    pool.remember(0, key(1))
    assert pool.num_free == 0
    assert pool.references(0) == 0
    assert pool.find(key(1)) is None
    pool.check_integrity()


def test_a_pool_needs_room_for_the_null_block() -> None:
    with pytest.raises(ConfigError, match="--num-kv-blocks"):
        BlockPool(0)


def test_the_index_keeps_a_bare_id_until_a_second_block_comes() -> None:
    """R3.13: removing another block's id leaves an entry intact; an emptied map removes the key."""
    index = PrefixIndex()
    index.insert(key(1), 7)
    index.insert(key(1), 7)
    assert list(index) == [(key(1), 7)]
    assert not index.remove(key(1), 8)
    index.insert(key(1), 8)
    assert index.find(key(1)) == 7
    assert not index.remove(key(1), 9)
    assert index.remove(key(1), 7)
    assert index.find(key(1)) == 8
    assert index.remove(key(1), 8)
    assert len(index) == 0
    assert not index.remove(key(1), 8)


def test_equal_blocks_are_not_merged() -> None:
    """R3.14."""
    pool = BlockPool(4)
    first, second = pool.allocate(2)
    pool.remember(first, key(1))
    pool.remember(second, key(1))
    assert pool.find(key(1)) == first
    assert pool.references(first) == pool.references(second) == 1
    pool.check_integrity({"a": [[first, second]]})


def test_groups_do_not_share_index_entries() -> None:
    pool = BlockPool(3)
    block = pool.allocate(1)[0]
    pool.remember(block, key(1, group=0))
    assert pool.find(key(1, group=1)) is None


def test_allocating_a_hashed_block_evicts_it() -> None:
    """R3.16."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, key(1))
    pool.free([block])
    assert pool.find(key(1)) == block
    assert pool.allocate(1) == [block]
    assert pool.find(key(1)) is None
    assert pool.key_of(block) is None
    assert pool.references(block) == 1


def test_asking_for_too_many_blocks_changes_nothing() -> None:
    pool = BlockPool(3)
    with pytest.raises(OutOfBlocksError):
        pool.allocate(3)
    assert pool.free_order() == [1, 2]


def test_the_order_of_freed_blocks_is_lifo_without_and_lru_with_a_hash() -> None:
    """R3.17, R3.18, the worked case: b1 b2 b3 hashed, b4 partial, f1 f2 free."""
    pool = BlockPool(7)
    b1, b2, b3, b4 = pool.allocate(4)
    f1, f2 = pool.free_order()
    for number, block in enumerate((b1, b2, b3)):
        pool.remember(block, key(number))
    pool.free(reversed([b1, b2, b3, b4]))
    assert pool.free_order() == [b4, f1, f2, b3, b2, b1]


def test_a_touched_block_cannot_be_evicted() -> None:
    """R3.19."""
    pool = BlockPool(3)
    hashed, other = pool.allocate(2)
    pool.remember(hashed, key(1))
    pool.free([hashed, other])
    pool.touch([hashed])
    pool.touch([hashed])
    assert pool.references(hashed) == 2
    assert pool.allocate(1) == [other]
    with pytest.raises(OutOfBlocksError):
        pool.allocate(1)
    assert pool.find(key(1)) == hashed


def test_a_block_that_carries_a_hash_gives_it_up_for_the_new_one() -> None:
    """R3.20."""
    pool = BlockPool(2)
    (block,) = pool.allocate(1)
    pool.remember(block, key(1))
    pool.remember(block, key(2))
    assert pool.find(key(1)) is None
    assert pool.find(key(2)) == block


def test_freeing_an_unreferenced_block_is_an_error() -> None:
    pool = BlockPool(2)
    with pytest.raises(ValueError, match="nobody refers to it"):
        pool.free([1])


def test_reset_needs_everybody_gone() -> None:
    """R3.22."""
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    pool.remember(block, key(1))
    assert not pool.reset()
    assert pool.find(key(1)) == block
    pool.free([block])
    assert pool.reset()
    assert pool.find(key(1)) is None
    assert pool.num_cached == 0
    pool.check_integrity({})


def test_hits_that_wait_in_the_free_queue_are_counted() -> None:
    """R3.76."""
    pool = BlockPool(5)
    idle, busy = pool.allocate(2)
    pool.remember(idle, key(1))
    pool.free([idle])
    assert pool.count_idle([idle, busy, 0]) == 1


def test_integrity_names_what_is_wrong() -> None:
    pool = BlockPool(4)
    (block,) = pool.allocate(1)
    with pytest.raises(RuntimeError, match=f"block {block} has 1 references, but 0 tables"):
        pool.check_integrity({})
    pool.check_integrity({"a": [[block]]})


def test_integrity_sees_broken_links_and_lost_hashes() -> None:
    pool = BlockPool(6)
    pool._queue._next[2] = 4
    with pytest.raises(RuntimeError, match="links around block"):
        pool.check_integrity()
    pool = BlockPool(6)
    pool._queue._next[5], pool._queue._next[2] = 3, 6
    pool._queue._prev[3], pool._queue._prev[6] = 5, 2
    with pytest.raises(RuntimeError, match="5 blocks counted, 2 reached, 5 linked"):
        pool.check_integrity()
    pool = BlockPool(6)
    pool._keys[3] = key(1)
    with pytest.raises(RuntimeError, match="does not know"):
        pool.check_integrity()
    pool._index.insert(key(2), 3)
    with pytest.raises(RuntimeError, match="carries another hash"):
        pool.check_integrity()
    pool = BlockPool(6)
    pool._references[4] = -1
    with pytest.raises(RuntimeError, match="negative"):
        pool.check_integrity()
    pool._references[4] = 0
    pool._references[0] = 1
    with pytest.raises(RuntimeError, match="null block"):
        pool.check_integrity()


def test_many_at_once_is_each_in_turn() -> None:
    """R3.10, R3.17: batches leave the order that single calls leave."""
    one, many = BlockPool(12), BlockPool(12)
    for pool in (one, many):
        pool.allocate(9)
    keys = [key(number) for number in range(4)]
    for block, block_key in zip((2, 4, 6, 8), keys, strict=True):
        one.remember(block, block_key)
    many.remember_many((2, 4, 6, 8), keys)
    order = (9, 8, 7, 6, 5, 4, 3, 2, 1)
    for block in order:
        one.free([block])
    many.free(order)
    assert one.free_order() == many.free_order() == [1, 3, 5, 7, 9, 10, 11, 8, 6, 4, 2]
    for block in (4, 11, 1):
        one.touch([block])
    many.touch((4, 11, 1))
    assert one.free_order() == many.free_order() == [3, 5, 7, 9, 10, 8, 6, 2]


def test_a_batch_that_fails_leaves_nothing_half_done() -> None:
    pool = BlockPool(6)
    first, second, third = pool.allocate(3)
    with pytest.raises(ValueError, match="block 5 is freed although"):
        pool.free([first, 5, second])
    assert [pool.references(block) for block in (first, second, third)] == [0, 1, 1]
    pool.check_integrity({"a": [[second, third]]})
    queue = FreeQueue(5)
    queue.remove_many([1, 2])
    for batch in (queue.append_many, queue.prepend_many):
        with pytest.raises(ValueError, match="block 4 is already in"):
            batch([1, 4])
        queue.remove(1)
    with pytest.raises(ValueError, match="block 2 is not in"):
        queue.remove_many([3, 2])
    queue.check(np.asarray([True, False, False, False, True]))


def test_without_caching_every_block_is_reused_at_once() -> None:
    """R3.17: nothing carries a hash, so all go to the head."""
    pool = BlockPool(9)
    blocks = pool.allocate(4)
    pool.free(reversed(blocks))
    assert pool.free_order()[:4] == blocks


def test_a_pool_of_a_million_blocks_is_an_ordinary_pool() -> None:
    """R3.10, R3.11."""
    pool = BlockPool(1_000_000)
    blocks = pool.allocate(700)
    assert blocks == list(range(1, 701))
    pool.remember_many(blocks, map(key, range(700)))
    pool.free(reversed(blocks))
    assert pool.num_free == pool.num_usable == 999_999
    assert pool.allocate(1) == [701]
    assert pool.find(key(699)) == 700
    assert pool.num_evictions == 0


def test_evictions_are_counted() -> None:
    """R3.16."""
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    pool.remember_many(blocks[:2], [key(1), key(2)])
    pool.free(blocks)
    pool.allocate(2)
    assert (pool.num_evictions, pool.num_cached) == (1, 1)


class PoolMachine(RuleBasedStateMachine):
    """I3.1-I3.3: pool, queue and index against a model of plain lists, the order of the free blocks included.

    Owners hold lists of blocks; hashes are numbers, in two groups. A mirror applies the events.
    """

    @initialize(num_blocks=st.integers(2, 12))
    def start(self, num_blocks: int) -> None:
        self.pool = BlockPool(num_blocks)
        self.pool.log = KVEventLog(lambda name: None, 4, (4, 4))
        self.owners: dict[int, list[int]] = {}
        self.free_blocks = list(range(1, num_blocks))
        self.keys: dict[int, BlockHashWithGroup] = {}
        self.mirror: set[BlockHashWithGroup] = set()
        self.num_owners = 0
        self.num_evictions = 0

    @rule(count=st.integers(0, 6))
    def allocate(self, count: int) -> None:
        if count > len(self.free_blocks):
            with pytest.raises(OutOfBlocksError):
                self.pool.allocate(count)
            return
        wanted, self.free_blocks = self.free_blocks[:count], self.free_blocks[count:]
        assert self.pool.allocate(count) == wanted
        self.num_evictions += sum(self.keys.pop(block, None) is not None for block in wanted)
        self._own(wanted)

    @precondition(lambda self: self.owners)
    @rule(data=st.data(), numbers=st.lists(st.integers(0, 5), min_size=1, max_size=4), group=st.integers(0, 1))
    def remember(self, data: st.DataObject, numbers: list[int], group: int) -> None:
        blocks = self.owners[data.draw(st.sampled_from(sorted(self.owners)))]
        pairs = list(zip([0, *blocks], [key(number, group) for number in numbers], strict=False))
        self.pool.remember_many([block for block, _ in pairs], [block_key for _, block_key in pairs])
        self.keys.update((block, block_key) for block, block_key in pairs if block)

    @rule(number=st.integers(0, 5), group=st.integers(0, 1), times=st.integers(1, 2))
    def adopt(self, number: int, group: int, times: int) -> None:
        block = self.pool.find(key(number, group))
        assert (block is None) == (key(number, group) not in self.keys.values())
        if block is not None:
            assert self.keys[block] == key(number, group)
            self.pool.touch([block, 0] * times)
            if block in self.free_blocks:
                self.free_blocks.remove(block)
            self._own([block] * times)

    @precondition(lambda self: self.owners)
    @rule(data=st.data())
    def free(self, data: st.DataObject) -> None:
        blocks = self.owners.pop(data.draw(st.sampled_from(sorted(self.owners))))
        self.pool.free([*reversed(blocks), 0])
        held = [block for others in self.owners.values() for block in others]
        for i, block in enumerate(reversed(blocks)):
            if block in held or block in blocks[: len(blocks) - 1 - i]:
                continue
            self.free_blocks.insert(len(self.free_blocks) if block in self.keys else 0, block)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def forget(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        self.pool.forget(block)
        del self.keys[block]

    @rule()
    def reset(self) -> None:
        in_use = any(self.owners.values())
        assert self.pool.reset() is not in_use
        if not in_use:
            self.keys.clear()

    @invariant()
    def everything_adds_up(self) -> None:
        self.pool.check_integrity({str(name): [blocks] for name, blocks in self.owners.items()})
        assert self.pool.free_order() == self.free_blocks
        held = {block for blocks in self.owners.values() for block in blocks}
        assert len(held) + self.pool.num_free + 1 == self.pool.num_blocks
        assert (self.pool.num_cached, self.pool.num_evictions) == (len(set(self.keys.values())), self.num_evictions)
        assert all(self.pool.key_of(block) == self.keys.get(block) for block in range(self.pool.num_blocks))

    @invariant()
    def events_tell_the_index(self) -> None:
        assert self.pool.log is not None
        for event in self.pool.log.take():
            if isinstance(event, AllBlocksCleared):
                self.mirror.clear()
                continue
            found = {group_key(block_hash, event.group) for block_hash in event.block_hashes}
            if isinstance(event, BlocksRemoved):
                assert found <= self.mirror
                self.mirror -= found
            else:
                assert not found & self.mirror
                self.mirror |= found
        assert self.mirror == set(self.keys.values())

    def _own(self, blocks: Sequence[int]) -> None:
        self.owners[self.num_owners] = list(blocks)
        self.num_owners += 1


class LongPoolMachine(PoolMachine):
    """10,000 sequences."""


PoolMachine.TestCase.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)
TestPoolMachine = PoolMachine.TestCase
LongPoolMachine.TestCase.settings = settings(max_examples=10_000, stateful_step_count=25, deadline=None)
TestLongPoolMachine = pytest.mark.slow(pytest.mark.timeout(900)(LongPoolMachine.TestCase))
