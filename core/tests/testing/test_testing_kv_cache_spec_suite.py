"""The kit for KV cache specs accepts a small correct one and rejects each mutant; so does the pool it brings."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint.errors import OutOfBlocksError
from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    AttentionSpec,
    BlockHash,
    BlockHashWithGroup,
    FullAttentionSpec,
    KVCacheManager,
    KVCacheSpec,
    KVSpecRegistration,
    group_key,
)
from hardpoint.testing.block_pool import CheckedBlockPool
from hardpoint.testing.kv_cache_spec_suite import KVCacheSpecSuite
from hardpoint.testing.suite_runner import run_suite


class PlainSpec(AttentionSpec, frozen=True, kw_only=True):
    kind: ClassVar[str] = "plain"


class TableManager(KVCacheManager):
    """Keeps every block to the end."""

    def __init__(self, pool: Any, group: int, spec: KVCacheSpec) -> None:
        self.pool, self.group, self.size = pool, group, spec.block_size
        self.tables: dict[str, list[int]] = {}

    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        held = len(self.tables[request_id]) if request_id in self.tables else num_hit_blocks
        return max(-(-num_tokens // self.size) - held, 0)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return self.pool.find_chain(block_hashes[: max_tokens // self.size], self.group)

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        self.pool.touch(block_ids)
        self.tables[request_id] = list(block_ids)

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        new = list(self.pool.allocate(self.blocks_needed(request_id, num_tokens, 0)))
        self.tables.setdefault(request_id, []).extend(new)
        return new

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        table = self.tables.get(request_id, [])
        for block, block_hash in zip(table[: num_tokens // self.size], block_hashes, strict=False):
            key = self.key(block_hash)
            if self.pool.find(key) is None:
                self.pool.remember(block, key)

    def key(self, block_hash: BlockHash) -> BlockHashWithGroup:
        return group_key(block_hash, self.group)

    def free(self, request_id: str) -> None:
        self.pool.free(reversed(self.tables.pop(request_id, [])))

    def block_ids(self, request_id: str) -> Sequence[int]:
        return tuple(self.tables.get(request_id, ()))


class WindowManager(TableManager):
    """Gives up what lies before a window of eight tokens."""

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        new = super().allocate(request_id, num_tokens)
        table = self.tables[request_id]
        for position in range(max(num_tokens - 8, 0) // self.size):
            self.pool.free([table[position]])
            table[position] = NULL_BLOCK_ID
        return new

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        """Blocks that were given up cannot be entered any more."""

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return ()


def make_suite(
    manager: Any = TableManager, spec_class: type[KVCacheSpec] = PlainSpec, base: Any = None
) -> type[KVCacheSpecSuite]:
    class Suite(KVCacheSpecSuite):
        def create_registration(self) -> KVSpecRegistration:
            return KVSpecRegistration(spec_class, manager, base)

    return Suite


class TestPlain(make_suite(base=AttentionSpec)):  # type: ignore[misc]
    pass


class LongWindowManager(TableManager):
    """Releases what lies before a window of 64 blocks of four tokens."""

    window = 256

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return max(num_computed_tokens - self.window + 1, 0) // self.size

    def release_unneeded(self, request_id: str, num_processed_tokens: int) -> None:
        table = self.tables.get(request_id, [])
        end = self.num_released(num_processed_tokens)
        self.pool.free(reversed(table[:end]))
        table[:end] = [NULL_BLOCK_ID] * len(table[:end])

    def num_released(self, num_processed_tokens: int) -> int:
        return self.num_skipped_blocks(num_processed_tokens)


class ReleasesTooMuch(LongWindowManager):
    """One block of the window goes as well, far behind the beginning of the sequence."""

    def num_released(self, num_processed_tokens: int) -> int:
        skipped = self.num_skipped_blocks(num_processed_tokens)
        return skipped and skipped + 1


class ReleasesInSecret(LongWindowManager):
    """Says that nothing is skipped, and gives it up all the same."""

    keeps_all: ClassVar[bool] = True

    def num_skipped_blocks(self, num_computed_tokens: int) -> int:
        return 0

    def num_released(self, num_processed_tokens: int) -> int:
        return max(num_processed_tokens - self.window, 0) // self.size


class LongWindowSpec(PlainSpec, frozen=True, kw_only=True):
    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        tokens = min(255 + max_in_flight_tokens, max_model_len)
        return -(-tokens // self.block_size) + 1


class Overwrites(TableManager):
    """The latest table replaces the request's older ids."""

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        new = super().allocate(request_id, num_tokens)
        self.tables[request_id] = sorted(self.tables[request_id], reverse=True)
        return new


class TakesMore(TableManager):
    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        return super().allocate(request_id, num_tokens + self.size)


class TakesAgain(TableManager):
    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        new = list(self.pool.allocate(max(-(-num_tokens // self.size) // 2, 1)))
        self.tables.setdefault(request_id, []).extend(new)
        return new


class ForgetsHits(TableManager):
    def blocks_needed(self, request_id: str, num_tokens: int, num_hit_blocks: int) -> int:
        return super().blocks_needed(request_id, num_tokens, 0)


class GrowsFirst(TableManager):
    """One block at a time, and what it got before the pool ran dry stays in the table."""

    def allocate(self, request_id: str, num_tokens: int) -> Sequence[int]:
        new = []
        for _ in range(self.blocks_needed(request_id, num_tokens, 0)):
            new += self.pool.allocate(1)
            self.tables.setdefault(request_id, []).append(new[-1])
        return new


class FreesFirstFirst(TableManager):
    def free(self, request_id: str) -> None:
        self.pool.free(self.tables.pop(request_id, []))


class FreesOnce(TableManager):
    def free(self, request_id: str) -> None:
        self.pool.free(reversed(self.tables.pop(request_id)))


class ShowsItsTable(TableManager):
    def block_ids(self, request_id: str) -> Sequence[int]:
        return self.tables.get(request_id, [])


class CachesPartialBlocks(TableManager):
    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        super().cache_full_blocks(request_id, block_hashes, num_tokens + self.size - 1)


class FindsTooMuch(TableManager):
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return self.pool.find_chain(block_hashes, self.group)


class TouchesWhatItFinds(TableManager):
    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        found = super().find_hit(block_hashes, max_tokens)
        self.pool.touch(found)
        return found


class AdoptsWithoutTouching(TableManager):
    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        self.tables[request_id] = list(block_ids)


class EntersOnlyOwnBlocks(TableManager):
    """After an adopted prefix nothing is entered."""

    def adopt(self, request_id: str, block_ids: Sequence[int]) -> None:
        super().adopt(request_id, block_ids)
        self.adopted = request_id

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        if request_id != getattr(self, "adopted", None):
            super().cache_full_blocks(request_id, block_hashes, num_tokens)


class ForgetsWithTheHolder(TableManager):
    def free(self, request_id: str) -> None:
        for block in self.tables.get(request_id, []):
            if self.pool.references[block] == 1:
                self.pool.forget(block)
        super().free(request_id)


class RemembersReused(TableManager):
    """An index of its own, which no eviction reaches."""

    def __init__(self, pool: Any, group: int, spec: KVCacheSpec) -> None:
        super().__init__(pool, group, spec)
        self.index: dict[BlockHash, int] = {}

    def cache_full_blocks(self, request_id: str, block_hashes: Sequence[BlockHash], num_tokens: int) -> None:
        super().cache_full_blocks(request_id, block_hashes, num_tokens)
        table = self.tables.get(request_id, [])
        self.index.update(zip(block_hashes, table[: num_tokens // self.size], strict=False))

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        found = []
        for block_hash in block_hashes[: max_tokens // self.size]:
            if block_hash not in self.index:
                break
            found.append(self.index[block_hash])
        return found


class OneGroupForAll(TableManager):
    def __init__(self, pool: Any, group: int, spec: KVCacheSpec) -> None:
        super().__init__(pool, 0, spec)


class HashesByPosition(TableManager):
    """Any block at the same place counts as equal."""

    def key(self, block_hash: BlockHash) -> BlockHashWithGroup:
        return group_key(BlockHash(block_hash[:1]), self.group)

    def find_hit(self, block_hashes: Sequence[BlockHash], max_tokens: int) -> Sequence[int]:
        return self.pool.find_chain([BlockHash(h[:1]) for h in block_hashes[: max_tokens // self.size]], self.group)


class Leaks(TableManager):
    def free(self, request_id: str) -> None:
        self.pool.free(reversed(self.tables.pop(request_id, [])[1:]))


MANAGERS: dict[type[TableManager], str] = {
    Overwrites: "test_a_table_covers_its_tokens",
    TakesMore: "test_a_table_covers_its_tokens",
    TakesAgain: "test_what_is_asked_twice_is_not_taken_twice",
    ForgetsHits: "test_hits_count_as_held",
    GrowsFirst: "test_a_short_pool_is_left_alone",
    FreesFirstFirst: "test_freeing_gives_back_the_last_block_first",
    Leaks: "test_freeing_gives_back_the_last_block_first",
    FreesOnce: "test_unknown_requests_are_no_error",
    ShowsItsTable: "test_tables_are_read_only_views",
    CachesPartialBlocks: "test_prefixes_are_found_by_others",
    FindsTooMuch: "test_prefixes_are_found_by_others",
    TouchesWhatItFinds: "test_prefixes_are_found_by_others",
    AdoptsWithoutTouching: "test_adopted_blocks_are_shared",
    EntersOnlyOwnBlocks: "test_adopted_blocks_are_shared",
    ForgetsWithTheHolder: "test_cached_blocks_outlive_their_holder_until_reused",
    RemembersReused: "test_cached_blocks_outlive_their_holder_until_reused",
    OneGroupForAll: "test_groups_do_not_share",
    HashesByPosition: "test_random_histories",
}


@pytest.mark.parametrize("mutant", MANAGERS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_manager_fails(mutant: type[TableManager]) -> None:
    assert MANAGERS[mutant] in run_suite(make_suite(mutant), only=MANAGERS[mutant]).failed


class RoundedPages(PlainSpec, frozen=True, kw_only=True):
    @property
    def page_size_bytes(self) -> int:
        return -(-super().page_size_bytes // 512) * 512


class HalfStates(PlainSpec, frozen=True, kw_only=True):
    @property  # type: ignore[misc]
    def tokens_per_state(self) -> Any:
        return 2.0

    @property
    def states_per_block(self) -> int:
        return self.block_size // 2


class MoreThanItsBound(PlainSpec, frozen=True, kw_only=True):
    def max_blocks(self, max_model_len: int, max_in_flight_tokens: int) -> int:
        return max_model_len // self.block_size // 2


class Nameless(AttentionSpec, frozen=True, kw_only=True):
    pass


class Editable(KVCacheSpec, kw_only=True, frozen=True):
    """Looks like a value, but two equal ones differ."""

    kind: ClassVar[str] = "plain"
    head_size: int

    def __hash__(self) -> int:
        return id(self)

    @property
    def heads(self) -> int:
        return 1

    @property
    def content_bytes(self) -> int:
        return self.head_size


class HidesAField(PlainSpec, frozen=True, kw_only=True, omit_defaults=True):
    """Decodes to another class, because its name belongs to someone else."""

    kind: ClassVar[str] = "plain"
    dtype: str = msgspec.field(name="num_kv_heads_dtype")

    @property
    def page_size_bytes(self) -> int:
        return super().page_size_bytes + (id(self) & 0xFF0)


SPECS: dict[type[KVCacheSpec], str] = {
    RoundedPages: "test_pages_add_up",
    HalfStates: "test_a_block_holds_whole_states",
    MoreThanItsBound: "test_no_sequence_holds_more_than_the_bound",
    Nameless: "test_it_registers_a_spec_of_its_own_name",
    Editable: "test_specs_are_values",
    HidesAField: "test_specs_survive_the_wire",
}


@pytest.mark.parametrize("mutant", SPECS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_spec_fails(mutant: type[KVCacheSpec]) -> None:
    assert SPECS[mutant] in run_suite(make_suite(spec_class=mutant), only=SPECS[mutant]).failed


def test_a_grouping_base_must_be_an_ancestor() -> None:
    suite = make_suite(base=FullAttentionSpec)
    assert "test_it_registers_a_spec_of_its_own_name" in run_suite(suite, only="registers").failed


@pytest.mark.slow
def test_managers_that_give_blocks_up_say_so() -> None:
    """The rules for tables hold with null blocks where the declaration allows them, and only there."""
    rules = "covers or freeing or bound or read_only or short"
    honest = type("Honest", (make_suite(WindowManager),), {"keeps_all": False})
    assert run_suite(honest, only=rules).failed == {}
    assert run_suite(make_suite(WindowManager), only="covers").failed


SKIPPED, BOUND = "test_what_is_skipped_can_be_given_up", "test_no_sequence_holds_more_than_the_bound"


def windowed(manager: type[TableManager], *, keeps_all: bool = False) -> type[KVCacheSpecSuite]:
    return type("Windowed", (make_suite(manager, LongWindowSpec),), {"keeps_all": keeps_all})


@pytest.mark.slow
@pytest.mark.parametrize("window", [256, 8_192])
def test_windows_of_any_length_are_seen(window: int) -> None:
    """R3.12: the rules go on until something is skipped."""
    manager = type("Manager", (LongWindowManager,), {"window": window})
    honest = type("Honest", (make_suite(manager),), {"keeps_all": False})
    assert run_suite(honest, only=f"{SKIPPED} or {BOUND}").failed == {}
    told = run_suite(make_suite(manager), only=SKIPPED).failed[SKIPPED]
    assert "set keeps_all = False in the conformance class" in told
    assert "hardpoint.conformance.v1: kv_cache_spec.NAME" in told


@pytest.mark.slow
def test_a_long_window_is_held_to_what_it_says() -> None:
    """R3.12, R1.35."""
    assert run_suite(windowed(LongWindowManager), only=f"{SKIPPED} or {BOUND}").failed == {}
    assert SKIPPED in run_suite(windowed(ReleasesTooMuch), only=SKIPPED).failed
    assert BOUND in run_suite(windowed(TableManager), only=BOUND).failed, "a window is stated, nothing is given up"
    for keeps_all in (True, False):
        in_secret = type("InSecret", (make_suite(ReleasesInSecret),), {"keeps_all": keeps_all})
        assert SKIPPED in run_suite(in_secret, only=SKIPPED).failed


@pytest.mark.slow
def test_specs_with_fields_of_their_own_bring_samples() -> None:
    class Odd(PlainSpec, frozen=True, kw_only=True):
        num_latents: int

    suite = make_suite(spec_class=Odd)
    assert "override create_specs" in run_suite(suite, only="pages").failed["test_pages_add_up"]
    sample = Odd(block_size=4, num_kv_heads=1, head_size=4, dtype="int8", num_latents=2)
    own = type("Own", (suite,), {"create_specs": lambda self: [sample]})
    assert run_suite(own, only="pages or values or wire").failed == {}


def test_the_pool_notices_misuse() -> None:
    pool = CheckedBlockPool(4)
    first, second = pool.allocate(2)
    with pytest.raises(OutOfBlocksError, match="2 blocks were asked for, 1 are free"):
        pool.allocate(2)
    pool.free([first])
    for misuse in (lambda: pool.free([first]), lambda: pool.touch([9]), lambda: pool.remember(first, key_of("x"))):
        with pytest.raises(ValueError, match="block"):
            misuse()
    with pytest.raises(AssertionError, match=f"block {second} has 1 references, but 0 tables"):
        pool.check({})
    pool.free([NULL_BLOCK_ID, second])
    pool.check({"a": [NULL_BLOCK_ID]})


def test_the_pool_hands_out_keyless_blocks_first_and_evicts_the_oldest() -> None:
    pool = CheckedBlockPool(4)
    blocks = list(pool.allocate(3))
    for block in blocks[:2]:
        pool.remember(block, key_of(str(block)))
    pool.free(reversed(blocks))
    assert list(pool.allocate(3)) == [blocks[2], blocks[1], blocks[0]]
    assert pool.evicted == [blocks[1], blocks[0]]
    assert pool.find(key_of(str(blocks[0]))) is None


def key_of(name: str) -> BlockHashWithGroup:
    return group_key(BlockHash(name.encode()), 0)
