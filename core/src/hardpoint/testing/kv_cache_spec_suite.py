"""Conformance of the plugin kind ``kv_cache_spec``: derive from :class:`KVCacheSpecSuite` and name your plugin."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.errors import ConfigError, OutOfBlocksError
from hardpoint.interfaces import (
    NULL_BLOCK_ID,
    BlockHash,
    KVCacheManager,
    KVCacheSpec,
    KVSpecRegistration,
    WireSpec,
    spec_from_wire,
    spec_to_wire,
)
from hardpoint.testing.block_pool import CheckedBlockPool
from hardpoint.testing.kv_histories import History, chain
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["KVCacheSpecSuite", "chain"]

_USUAL_FIELDS: dict[str, Any] = {"block_size": 4, "num_kv_heads": 2, "head_size": 8, "dtype": "float16"}
_LONG, _LONGEST = 1_024, 65_536
"""Blocks of a sequence for which nothing is known of a window, and of the longest one in which one is looked for."""
MakeManager = Callable[..., KVCacheManager]


class KVCacheSpecSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.KVCacheSpec` and :class:`~hardpoint.interfaces.KVCacheManager`.

    ``keeps_all`` declares that no block of a live request is given up before its end (False: sliding windows and the
    like, whose tables hold the null block where they gave one up).
    """

    kind: ClassVar[str] = "kv_cache_spec"
    torch_free: ClassVar[bool] = True
    keeps_all: ClassVar[bool] = True

    def create_registration(self) -> KVSpecRegistration:
        """What the factory returns."""
        made: KVSpecRegistration = self.create_plugin(self.context())
        return made

    def create_specs(self) -> Sequence[KVCacheSpec]:
        """Sample specs, the first of them with small blocks; override it where the usual fields do not suffice."""
        spec_class = self.create_registration().spec_class
        names = {field.encode_name for field in msgspec.structs.fields(spec_class)}
        usual = {name: value for name, value in _USUAL_FIELDS.items() if name in names}
        try:
            return [spec_class(**{**usual, "block_size": size}) for size in (4, 16)]
        except TypeError as error:
            raise TypeError(f"{spec_class.__name__} needs more fields ({error}); override create_specs") from error

    def create_pool(self, num_blocks: int) -> Any:
        """The pool under the manager; it must have the names of :class:`CheckedBlockPool` that are not the contract."""
        return CheckedBlockPool(num_blocks)

    @pytest.fixture
    def registration(self) -> KVSpecRegistration:
        return self.create_registration()

    @pytest.fixture
    def spec(self) -> KVCacheSpec:
        return self.create_specs()[0]

    @pytest.fixture
    def pool(self) -> Any:
        return self.create_pool(33)

    @pytest.fixture
    def manager(self, registration: KVSpecRegistration, spec: KVCacheSpec, pool: Any) -> KVCacheManager:
        return registration.manager(pool, 0, spec)

    def test_it_registers_a_spec_of_its_own_name(self, registration: KVSpecRegistration) -> None:
        """R1.60: the name on the wire leads back to the plugin."""
        assert issubclass(registration.spec_class, KVCacheSpec)
        assert registration.spec_class.kind, "the spec class names no kind"
        if self.plugin is not None:
            assert registration.spec_class.kind == self.plugin
        base = registration.grouping_base
        assert base is None or base in registration.spec_class.__mro__, "the grouping base is no ancestor of the spec"

    def test_pages_add_up(self) -> None:
        """R1.35: whole bytes, and twice as many for twice the tokens."""
        for spec in self.create_specs():
            assert isinstance(spec.page_size_bytes, int)
            assert spec.page_size_bytes == spec.heads * spec.states_per_block * spec.content_bytes > 0
            double = msgspec.structs.replace(spec, block_size=2 * spec.block_size)
            if spec.tokens_per_state <= 0:
                assert double.page_size_bytes == spec.page_size_bytes, "a state grows with the block"
                continue
            assert double.page_size_bytes == 2 * spec.page_size_bytes, "bytes do not grow with the block"

    def test_a_block_holds_whole_states(self) -> None:
        """Anything else would round somewhere."""
        for spec in self.create_specs():
            if spec.tokens_per_state == 1 or spec.tokens_per_state <= 0:
                pytest.skip("the spec stores one state per token or per block")
            assert not isinstance(spec.tokens_per_state, float), "a ratio of tokens must be exact"
            with pytest.raises(ConfigError):
                _ = msgspec.structs.replace(spec, block_size=spec.block_size + 1).states_per_block

    def test_specs_are_values(self) -> None:
        """Layers, scheduler and workers compare and hash them."""
        for spec in self.create_specs():
            same = msgspec.structs.replace(spec)
            assert spec == same
            assert hash(spec) == hash(same), "equal specs have different hashes"
            assert spec.slot_key == same.slot_key, "equal specs need different token slots"
            assert spec != msgspec.structs.replace(spec, block_size=2 * spec.block_size)
            with pytest.raises(AttributeError):
                spec.block_size = 1  # type: ignore[misc]

    def test_specs_survive_the_wire(self, registration: KVSpecRegistration) -> None:
        for spec in self.create_specs():
            wire = msgspec.msgpack.decode(msgspec.msgpack.encode(spec_to_wire(spec)), type=WireSpec)
            back = spec_from_wire(wire, {registration.spec_class.kind: registration.spec_class})
            assert type(back) is type(spec)
            assert back == spec
            assert back.page_size_bytes == spec.page_size_bytes, "a property depends on what does not travel"

    def test_a_table_covers_its_tokens(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """R3.15: new ids go to the end, and what was announced is what is taken."""
        self.wants(manager.grows, "tables that grow")
        for num_tokens in (1, spec.block_size, spec.block_size + 1, 3 * spec.block_size, 3 * spec.block_size, 50):
            table, free = list(manager.block_ids("a")), pool.num_free
            needed = manager.blocks_needed("a", num_tokens, 0)
            new = list(manager.allocate("a", num_tokens))
            taken = free - pool.num_free
            assert taken == needed if self.keeps_all else taken <= needed, f"{needed} announced, {taken} taken"
            grown = list(manager.block_ids("a"))
            assert len(grown) * spec.block_size >= num_tokens, f"{len(grown)} blocks for {num_tokens} tokens"
            assert len(grown) == len(table) + len(new), "the ids returned are not those added"
            self.check_kept([*table, *new], grown)
            assert manager.blocks_needed("a", num_tokens, 0) == 0

    def test_fixed_tables_stay_as_they_are(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """Whatever a sequence adds, the first allocation was the last."""
        self.wants(not manager.grows, "tables that do not grow")
        needed, free = manager.blocks_needed("a", 3 * spec.block_size, 0), pool.num_free
        new = list(manager.allocate("a", 3 * spec.block_size))
        assert free - pool.num_free == needed == len(new)
        for num_tokens in (1, 4 * spec.block_size, 50):
            assert manager.blocks_needed("a", num_tokens, 0) == 0
            assert list(manager.allocate("a", num_tokens)) == []
        assert list(manager.block_ids("a")) == new
        pool.check({"a": new})

    def wants(self, has: bool, what: str) -> None:
        """Skip a test for managers that do not have what it is about."""
        if not has:
            pytest.skip(f"the manager does not have {what}")

    def check_kept(self, before: Sequence[int], after: Sequence[int]) -> None:
        """Ids stay, except that a manager which gives blocks up puts the null block there."""
        for old, new in zip(before, after, strict=True):
            assert new == old or (new == NULL_BLOCK_ID and not self.keeps_all), "an id in the table changed"

    def test_what_is_asked_twice_is_not_taken_twice(self, manager: KVCacheManager, spec: KVCacheSpec) -> None:
        first = list(manager.allocate("a", 2 * spec.block_size))
        assert len(first) == len(manager.block_ids("a"))
        for num_tokens in (1, spec.block_size, 2 * spec.block_size):
            assert list(manager.allocate("a", num_tokens)) == []
        assert list(manager.block_ids("a")) == first

    def test_rows_grow_in_their_order(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """R3.71: many rows in one call get what each would get alone, and the first that is short ends it."""
        names = ["a", "b", "c"]
        for name in names[:2]:
            manager.allocate(name, spec.block_size)
        ends = [2 * spec.block_size, spec.block_size, 3 * spec.block_size]
        needed = [manager.blocks_needed(name, end, 0) for name, end in zip(names, ends, strict=True)]
        grown = manager.allocate_many(names, ends, sum(needed) - 1 if needed[2] else sum(needed))
        assert [len(new) for new in grown] == (needed[:2] if needed[2] else needed), "not the rows that fit"
        pool.check({name: manager.block_ids(name) for name in names})
        for name, new in zip(names, grown, strict=False):
            table = list(manager.block_ids(name))
            assert table[len(table) - len(new) :] == list(new), "a row got other ids than were returned"

    def num_blocks_beyond(self, manager: KVCacheManager, spec: KVCacheSpec, least: int) -> int:
        """``least`` blocks or as many more as it takes to get past any window of the spec; tables that grow no further
        have none."""
        if not manager.grows:
            return least
        bound, count = spec.max_blocks(_LONGEST * spec.block_size, spec.block_size), least
        while count < _LONGEST and not manager.num_skipped_blocks(count * spec.block_size):
            count *= 2
        window = count if count < _LONGEST else least
        return max(window, bound + least) if bound < _LONGEST else window

    def test_what_is_skipped_can_be_given_up(
        self, registration: KVSpecRegistration, manager: KVCacheManager, spec: KVCacheSpec
    ) -> None:
        """R3.12, R3.77: only leading blocks are given up, the null block takes their place, once; however long the
        window."""
        count = self.num_blocks_beyond(manager, spec, _LONG if manager.grows else 6)
        length = count * spec.block_size
        # Two sequences, and what a few of drafts take.
        pool = self.create_pool(2 * count + 65)
        manager = registration.manager(pool, 0, spec)
        manager.allocate("a", length)
        before = list(manager.block_ids("a"))
        for processed in (1, 3 * spec.block_size, 6 * spec.block_size, length // 2, length, length):
            skipped = manager.num_skipped_blocks(processed)
            assert 0 <= skipped * spec.block_size <= processed, "a token that is not computed yet is skipped"
            self.check_claim(skipped, processed)
            manager.release_unneeded("a", processed)
            table = list(manager.block_ids("a"))
            self.check_kept(before, table)
            assert not any(table[:skipped]), "a skipped block is still held"
            assert table[skipped:] == before[skipped:], "a block that later tokens read was given up"
            pool.check({"a": table})
        manager.release_unneeded("nobody", length)
        manager.allocate("b", length)
        manager.release_unneeded_many(["a", "nobody", "b"], [length] * 3)
        assert list(map(bool, manager.block_ids("b"))) == list(map(bool, table)), "rows give up what one would alone"
        pool.check({name: manager.block_ids(name) for name in "ab"})

    def check_claim(self, skipped: int, processed: int) -> None:
        assert not (skipped and self.keeps_all), (
            f"{skipped} blocks are skipped after {processed} tokens although the spec keeps them all; where that is "
            "meant, set keeps_all = False in the conformance class, and name it as an entry point of the group "
            f"hardpoint.conformance.v1: kv_cache_spec.{self.plugin or 'NAME'}"
        )

    def test_hits_count_as_held(self, manager: KVCacheManager, spec: KVCacheSpec) -> None:
        """R3.70: admission asks before anything is adopted."""
        self.wants(manager.caches_prefixes, "prefixes")
        whole = manager.blocks_needed("new", 4 * spec.block_size, 0)
        with_hits = manager.blocks_needed("new", 4 * spec.block_size, 3)
        assert with_hits == whole - 3 if self.keeps_all else 0 < with_hits <= whole

    def test_a_short_pool_is_left_alone(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """R3.16: all or nothing."""
        manager.allocate("a", spec.block_size)
        held, length = list(manager.block_ids("a")), 20 * spec.block_size
        needed = manager.blocks_needed("a", length, 0)
        self.wants(needed > 0, "tables that grow")
        others = pool.allocate(pool.num_free - needed + 1)
        with pytest.raises(OutOfBlocksError):
            manager.allocate("a", length)
        assert list(manager.block_ids("a")) == held, "the table changed although there was no room"
        pool.check({"others": others, "a": held})

    def test_freeing_gives_back_the_last_block_first(
        self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any
    ) -> None:
        """R3.17: the head of a sequence is what others share, so it is evicted last."""
        manager.allocate("a", 5 * spec.block_size)
        held = [block for block in manager.block_ids("a") if block != NULL_BLOCK_ID]
        pool.freed.clear()
        manager.free("a")
        assert pool.freed == held[::-1]
        assert list(manager.block_ids("a")) == []
        pool.check({})

    def test_unknown_requests_are_no_error(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """Ends reach a manager more than once, and for requests that never got a block."""
        manager.free("nobody")
        manager.cache_full_blocks("nobody", chain("x", 2), 2 * spec.block_size)
        assert list(manager.block_ids("nobody")) == []
        manager.allocate("a", 1)
        manager.free("a")
        manager.free("a")
        pool.check({})

    def test_tables_are_read_only_views(self, manager: KVCacheManager, spec: KVCacheSpec) -> None:
        manager.allocate("a", 2 * spec.block_size)
        before = list(manager.block_ids("a"))
        view: Any = manager.block_ids("a")
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            view[0] = 7
        with contextlib.suppress(AttributeError, TypeError, ValueError):
            view.append(7)
        assert list(manager.block_ids("a")) == before, "a reader of the table changed it"

    def test_prefixes_are_found_by_others(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """R3.20, R3.91: whole blocks, not more than asked for, and looking changes nothing."""
        self.wants(manager.caches_prefixes, "prefixes")
        size, hashes = spec.block_size, chain("abcdef", 4)
        self.compute(manager, "a", hashes, [*range(size, 4 * size, size), 3 * size + 1])
        references = dict(pool.references)
        held = list(manager.block_ids("a"))
        found = list(manager.find_hit(hashes, 4 * size))
        assert self.known(found, held) == 3, "the three complete blocks were not all found"
        assert len(manager.find_hit(hashes, 3 * size - 1)) == 2, "a block beyond the tokens asked for"
        assert list(manager.find_hit(hashes, 0)) == list(manager.find_hit([], 4 * size)) == []
        assert not any(manager.find_hit(chain("other", 4), 4 * size)), "a block with other content is offered"
        assert pool.references == references, "looking for a prefix took part in it"

    def compute(self, manager: KVCacheManager, name: str, hashes: Sequence[BlockHash], ends: Sequence[int]) -> None:
        """Let a request compute up to each of ``ends`` in turn."""
        for end in ends:
            manager.allocate(name, end)
            if end is ends[-1]:
                # The last step's blocks come in a batch, with those of somebody who has none.
                manager.cache_full_blocks_many(["nobody", name], [hashes, hashes], [end, end])
            else:
                manager.cache_full_blocks(name, hashes, end)

    def known(self, found: Sequence[int], held: Sequence[int]) -> int:
        """Length of a hit, each of whose blocks must be the holder's or the null block."""
        for block, other in zip(found, held, strict=False):
            assert block == other or (block == NULL_BLOCK_ID and not self.keeps_all), "another block than its holder's"
        return len(found)

    def test_adopted_blocks_are_shared(self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any) -> None:
        """R3.19: both hold them, and neither's end takes them from the other."""
        self.wants(manager.caches_prefixes, "prefixes")
        size, hashes = spec.block_size, chain("abcdef", 5)
        self.compute(manager, "a", hashes, [size, 2 * size, 3 * size])
        hit = list(manager.find_hit(hashes, 3 * size))
        manager.adopt("b", hit)
        assert list(manager.block_ids("b")) == hit
        pool.check({name: manager.block_ids(name) for name in "ab"})
        new = list(manager.allocate("b", 5 * size))
        assert not set(new) & set(hit) - {NULL_BLOCK_ID}
        manager.cache_full_blocks("b", hashes, 5 * size)
        manager.free("a")
        pool.check({"b": manager.block_ids("b")})
        assert self.known(manager.find_hit(hashes, 5 * size), manager.block_ids("b")) == 5, (
            "blocks behind an adopted prefix were not entered"
        )

    def test_cached_blocks_outlive_their_holder_until_reused(
        self, manager: KVCacheManager, spec: KVCacheSpec, pool: Any
    ) -> None:
        """R3.22: free blocks keep what they hold; new content ends that."""
        self.wants(manager.caches_prefixes, "prefixes")
        size, hashes = spec.block_size, chain("abcdef", 3)
        self.compute(manager, "a", hashes, [size, 2 * size, 3 * size])
        manager.free("a")
        revived = list(manager.find_hit(hashes, 3 * size))
        assert len(revived) == 3, "the prefix was forgotten with its holder"
        manager.adopt("b", revived)
        pool.check({"b": manager.block_ids("b")})
        manager.free("b")
        pool.allocate(pool.num_free)
        assert not any(manager.find_hit(hashes, 3 * size)), "a block with other content is still offered"

    def test_groups_do_not_share(self, registration: KVSpecRegistration, spec: KVCacheSpec, pool: Any) -> None:
        """R11.2: equal hashes in two groups are other bytes."""
        first, second = (registration.manager(pool, group, spec) for group in range(2))
        hashes = chain("abcdef", 3)
        self.wants(first.caches_prefixes, "prefixes")
        self.compute(first, "a", hashes, [n * spec.block_size for n in (1, 2, 3)])
        assert not any(second.find_hit(hashes, 3 * spec.block_size))
        assert list(second.block_ids("a")) == []

    def test_managers_say_what_they_keep(self, manager: KVCacheManager, spec: KVCacheSpec) -> None:
        """What the rules of this kit, and a scheduler, rely on."""
        assert self.keeps_all or not manager.keeps_all, "the manager keeps all blocks, its conformance class denies it"
        if not manager.caches_prefixes:
            manager.allocate("a", 2 * spec.block_size)
            manager.cache_full_blocks("a", chain("ab", 2), 2 * spec.block_size)
            assert list(manager.find_hit(chain("ab", 2), 2 * spec.block_size)) == [], "a prefix is found after all"

    def test_no_sequence_holds_more_than_the_bound(self, registration: KVSpecRegistration, spec: KVCacheSpec) -> None:
        """R1.35: start-up sizing relies on it."""
        probe = registration.manager(self.create_pool(33), 0, spec)
        count = self.num_blocks_beyond(probe, spec, 20)
        longest, step = count * spec.block_size + 3, max(3, count // 64) * spec.block_size
        bound = spec.max_blocks(longest, step)
        pool = self.create_pool(bound + 1)
        manager, before = registration.manager(pool, 0, spec), 0
        for num_tokens in (*range(step, longest, step), longest) if bound else ():
            manager.release_unneeded("a", before)
            manager.allocate("a", num_tokens)
            before = num_tokens
            assert sum(block != NULL_BLOCK_ID for block in manager.block_ids("a")) <= bound

    @pytest.mark.parametrize("seed", range(6))
    def test_random_histories(self, registration: KVSpecRegistration, spec: KVCacheSpec, seed: int) -> None:
        """I3.1 to I3.3: references add up, and no hit ever holds other content than its hash stands for."""
        pool = self.create_pool(24)
        history = History(registration.manager(pool, 0, spec), pool, spec.block_size, np.random.default_rng(seed))
        for _ in range(300):
            history.step()
        for name in list(history.lengths):
            history.end(name)
        assert pool.num_free == 23, "blocks leaked"
