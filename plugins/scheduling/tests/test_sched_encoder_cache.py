"""The encoder cache: capacity in embeddings, sharing by content, eviction of idle outputs (R3.46, R3.78)."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from hardpoint.errors import ConfigError
from hardpoint.interfaces import Feature
from hardpoint_scheduling.kv_cache.encoder_cache import EncoderCache, EncoderItem

CAT, DOG, OWL = EncoderItem("cat", 4), EncoderItem("dog", 5), EncoderItem("owl", 3)


def test_an_output_is_encoded_once_and_shared_by_content() -> None:
    """R3.46: whoever shows the same content again takes no room and makes nobody encode it again."""
    cache = EncoderCache(10)
    assert cache.allocate("a", CAT)
    assert not cache.allocate("b", CAT)
    assert (cache.num_used, cache.num_available, len(cache)) == (4, 6, 1)
    cache.free("a")
    assert cache.num_used == 4
    cache.free("b")
    assert (cache.num_used, cache.num_available) == (0, 10)
    assert "cat" in cache
    assert not cache.allocate("c", CAT)
    assert cache.take_freed() == []


def test_room_is_asked_for_as_a_whole() -> None:
    """R3.46: items chosen by one decision cannot each claim the same room; an idle hit is room nobody can win."""
    cache = EncoderCache(9)
    assert cache.can_allocate([CAT, DOG])
    assert not cache.can_allocate([CAT, DOG, OWL])
    assert cache.can_allocate([CAT, CAT, DOG])
    cache.allocate("a", CAT)
    cache.free("a")
    assert cache.can_allocate([EncoderItem("big", 9)])
    assert not cache.can_allocate([CAT, EncoderItem("big", 6)])
    assert cache.can_allocate([CAT, DOG])
    assert len(cache) == 1
    assert cache.take_freed() == []


def test_the_output_idle_for_longest_goes_first_and_only_as_many_as_needed() -> None:
    cache = EncoderCache(12)
    for name, item in (("a", CAT), ("b", DOG), ("c", OWL)):
        cache.allocate(name, item)
    for name in ("b", "a", "c"):
        cache.free(name)
    assert cache.allocate("d", EncoderItem("new", 5))
    assert cache.take_freed() == ["dog"]
    assert cache.take_freed() == []
    assert cache.allocate("e", EncoderItem("newer", 5))
    assert cache.take_freed() == ["cat", "owl"]


def test_what_a_request_refers_to_is_never_evicted() -> None:
    cache = EncoderCache(8)
    cache.allocate("a", CAT)
    assert not cache.can_allocate([DOG])
    with pytest.raises(ValueError, match="needs 5 embeddings, but 4 of 8 are available"):
        cache.allocate("b", DOG)
    assert "cat" in cache
    assert not cache.holds("b", "dog")
    cache.check_integrity()


def test_one_request_may_show_equal_content_twice() -> None:
    cache = EncoderCache(4)
    assert cache.allocate("a", CAT)
    assert not cache.allocate("a", CAT)
    cache.free_item("a", "cat")
    assert cache.holds("a", "cat")
    assert cache.num_used == 4
    cache.free_item("a", "cat")
    assert not cache.holds("a", "cat")
    assert cache.num_used == 0
    cache.free_item("a", "cat")
    cache.free("a")
    cache.check_integrity()


def test_the_end_of_a_request_gives_up_everything_and_its_last_item_goes_first() -> None:
    """R3.78."""
    cache = EncoderCache(9)
    cache.allocate("a", CAT)
    cache.allocate("a", DOG)
    cache.free("a")
    assert cache.num_available == 9
    cache.allocate("b", EncoderItem("new", 1))
    assert cache.take_freed() == ["dog"]


def test_an_evicted_output_that_is_needed_again_is_encoded_again() -> None:
    cache = EncoderCache(5)
    cache.allocate("a", CAT)
    cache.free("a")
    cache.allocate("b", DOG)
    cache.free("b")
    assert cache.allocate("c", CAT)
    assert cache.take_freed() == ["cat", "dog"]


def test_a_distrusted_output_leaves_with_its_references() -> None:
    cache = EncoderCache(9)
    cache.allocate("a", CAT)
    cache.allocate("a", DOG)
    cache.allocate("b", CAT)
    cache.discard("cat")
    cache.discard("cat")
    assert not cache.holds("a", "cat")
    assert not cache.holds("b", "cat")
    assert cache.holds("a", "dog")
    assert cache.take_freed() == ["cat"]
    assert cache.allocate("a", CAT)
    cache.check_integrity()


def test_reset_needs_everybody_gone() -> None:
    """R3.22, of encoder outputs."""
    cache = EncoderCache(9)
    cache.allocate("a", CAT)
    cache.allocate("a", EncoderItem("empty", 0))
    assert not cache.reset()
    cache.free("a")
    assert cache.reset()
    assert len(cache) == 0
    assert sorted(cache.take_freed()) == ["cat", "empty"]


def test_sizes_come_from_the_feature() -> None:
    plain = Feature(modality="image", content_hash="x", offset=3, length=7)
    fewer = Feature(modality="image", content_hash="x", offset=3, length=7, num_encoder_tokens=5)
    assert EncoderItem.of(plain) == EncoderItem("x", 7)
    assert EncoderItem.of(fewer) == EncoderItem("x", 5)


def test_a_cache_without_room_takes_nothing() -> None:
    cache = EncoderCache(0)
    assert not cache.can_allocate([OWL])
    assert cache.can_allocate([])
    with pytest.raises(ConfigError, match="-1 embeddings"):
        EncoderCache(-1)


def test_integrity_names_what_is_wrong() -> None:
    def broken() -> EncoderCache:
        cache = EncoderCache(9)
        cache.allocate("a", CAT)
        cache.allocate("b", DOG)
        cache.free("b")
        return cache

    cache = broken()
    cache._references["cat"] = 2
    with pytest.raises(RuntimeError, match="reference counts"):
        cache.check_integrity()
    cache = broken()
    cache._idle.clear()
    with pytest.raises(RuntimeError, match="idle outputs"):
        cache.check_integrity()
    cache = broken()
    cache._num_stored = 3
    with pytest.raises(RuntimeError, match="3 embeddings counted, 9 stored"):
        cache.check_integrity()
    cache = broken()
    cache.capacity = 5
    with pytest.raises(RuntimeError, match="room for 5"):
        cache.check_integrity()
    cache = broken()
    cache._held["c"] = {"ghost": 1}
    with pytest.raises(RuntimeError, match="'ghost'"):
        cache.check_integrity()


REQUESTS, CONTENTS = ("a", "b", "c"), {f"item{size}{letter}": size for size in (0, 1, 3, 5) for letter in "xy"}


class EncoderCacheMachine(RuleBasedStateMachine):
    """Against a model of plain counts, and a worker that keeps exactly what it is told."""

    @initialize(capacity=st.integers(0, 12))
    def start(self, capacity: int) -> None:
        self.cache = EncoderCache(capacity)
        self.held: dict[tuple[str, str], int] = {}
        self.worker: set[str] = set()

    @rule(request=st.sampled_from(REQUESTS), content=st.sampled_from(sorted(CONTENTS)))
    def allocate(self, request: str, content: str) -> None:
        item = EncoderItem(content, CONTENTS[content])
        needed = {name for _, name in self.held} | {content}
        fits = sum(CONTENTS[name] for name in needed) <= self.cache.capacity
        assert self.cache.can_allocate([item]) is fits
        if not fits:
            with pytest.raises(ValueError, match="embeddings"):
                self.cache.allocate(request, item)
            return
        encodes = self.cache.allocate(request, item)
        self.worker.difference_update(self.cache.take_freed())
        assert encodes is (content not in self.worker)
        self.worker.add(content)
        self.held[request, content] = self.held.get((request, content), 0) + 1

    @precondition(lambda self: self.held)
    @rule(data=st.data())
    def free_item(self, data: st.DataObject) -> None:
        place = data.draw(st.sampled_from(sorted(self.held)))
        self.cache.free_item(*place)
        self.held[place] -= 1
        if self.held[place] == 0:
            del self.held[place]

    @rule(request=st.sampled_from(REQUESTS))
    def free(self, request: str) -> None:
        self.cache.free(request)
        self.held = {place: count for place, count in self.held.items() if place[0] != request}

    @rule(content=st.sampled_from(sorted(CONTENTS)))
    def discard(self, content: str) -> None:
        self.cache.discard(content)
        self.held = {place: count for place, count in self.held.items() if place[1] != content}

    @rule()
    def reset(self) -> None:
        assert self.cache.reset() is (not self.held)

    @invariant()
    def adds_up(self) -> None:
        self.cache.check_integrity()
        self.worker.difference_update(self.cache.take_freed())
        assert self.worker == {name for name in CONTENTS if name in self.cache}
        assert self.cache.num_used == sum(CONTENTS[name] for name in {name for _, name in self.held})
        for request in REQUESTS:
            assert all(self.cache.holds(request, name) is ((request, name) in self.held) for name in CONTENTS)


class LongEncoderCacheMachine(EncoderCacheMachine):
    """10,000 sequences."""


EncoderCacheMachine.TestCase.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
TestEncoderCacheMachine = EncoderCacheMachine.TestCase
LongEncoderCacheMachine.TestCase.settings = settings(max_examples=10_000, stateful_step_count=20, deadline=None)
TestLongEncoderCacheMachine = pytest.mark.slow(pytest.mark.timeout(900)(LongEncoderCacheMachine.TestCase))
