"""Block hashes (spec 11 sections 1-3, spec 01 R1.8-R1.10)."""

from __future__ import annotations

import gc
import weakref
from array import array
from typing import Any, get_type_hints

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import (
    AdapterRef,
    BlockHash,
    BlockHashWithGroup,
    EngineRequest,
    Feature,
    HashFunction,
    group_key,
)
from hardpoint_scheduling.kv_cache.block_pool import BlockPool
from hardpoint_scheduling.kv_cache.coordinator import KVCoordinator
from hardpoint_scheduling.kv_cache.extra_keys import extra_keys
from hardpoint_scheduling.kv_cache.hash_seed import root_hash
from hardpoint_scheduling.kv_cache.hash_view import ScaledHashes, group_scale, hash_block_size
from hardpoint_scheduling.kv_cache.hashing import ChainedHasher, Sha256, canonical_token_bytes
from hardpoint_scheduling.kv_cache.registry import SpecRegistry
from hardpoint_scheduling.schedulers.request import LiveRequest
from sched_support import kv_config, request

ROOT = BlockHash(bytes(32))


def hashes_of(record: EngineRequest, block_size: int = 4, function: HashFunction | None = None) -> list[BlockHash]:
    found: list[BlockHash] = []
    hasher = ChainedHasher(function or Sha256(), block_size, ROOT)
    hasher.extend(record, record.prompt_token_ids.tolist(), found)
    return found


def picture(content: str, offset: int, length: int = 3) -> Feature:
    return Feature(modality="image", content_hash=content, offset=offset, length=length)


def test_only_complete_blocks_are_hashed() -> None:
    """R11.5, R11.13, R11.14."""
    for length, count in ((15, 0), (128, 8), (129, 8), (143, 8), (144, 9)):
        assert len(hashes_of(request("r", range(3, 3 + length)), 16)) == count


def test_hashes_are_chained() -> None:
    """R11.3, R11.4, P11.1: an equal block after another prefix has another hash."""
    first = hashes_of(request("a", [1, 2, 3, 4, 9, 9, 9, 9]))
    second = hashes_of(request("b", [5, 6, 7, 8, 9, 9, 9, 9]))
    assert first[1] != second[1]
    assert first[0] == Sha256()(ROOT, np.asarray([1, 2, 3, 4], dtype="<i4").tobytes(), b"")
    assert first[1] == Sha256()(first[0], np.asarray([9, 9, 9, 9], dtype="<i4").tobytes(), b"")


def test_the_seed_of_the_first_block_matters() -> None:
    record = request("a", [1, 2, 3, 4])
    other: list[BlockHash] = []
    ChainedHasher(Sha256(), 4, BlockHash(b"\1" * 32)).extend(record, [1, 2, 3, 4], other)
    assert other != hashes_of(record)


@pytest.mark.parametrize("group", [0, 1, 255, 256, 2**32 - 1])
def test_the_index_key_ends_with_the_group(group: int) -> None:
    """R11.2, I11.4."""
    block_hash = BlockHash(bytes(range(32)))
    joined = group_key(block_hash, group)
    assert joined[:-4] == block_hash
    assert int.from_bytes(joined[-4:], "big") == group


def test_extra_keys_are_absent_for_a_plain_request() -> None:
    """R11.16."""
    assert extra_keys(request("a", [1] * 8), 0, 4) == b""


def test_extra_keys_come_in_their_fixed_order() -> None:
    """R11.16, R1.9."""
    record = request(
        "a",
        [1] * 8,
        adapter=AdapterRef("lora", 1, "/x"),
        features=(picture("img", 1),),
        cache_salt="tenant",
        prompt_embeds=np.zeros((8, 2), dtype=np.float32),
    )
    keys = extra_keys(record, 0, 4)
    places = [keys.index(part) for part in (b"lora", b"img", b"tenant", b"E\x00\x00\x00\x20")]
    assert places == sorted(places)


def test_the_adapter_is_part_of_every_block() -> None:
    """R11.20, P11.14."""
    plain = hashes_of(request("a", [1] * 8))
    adapted = hashes_of(request("a", [1] * 8, adapter=AdapterRef("one", 1, "/x")))
    other = hashes_of(request("a", [1] * 8, adapter=AdapterRef("two", 1, "/x")))
    assert len({*plain, *adapted, *other}) == 6
    assert extra_keys(request("a", [1] * 8, adapter=AdapterRef("one", 1, "/x")), 4, 8)


def test_the_salt_enters_the_first_block_only_and_isolates_all_later_ones() -> None:
    """R11.18, P11.6."""
    salted = request("a", [1] * 12, cache_salt="x")
    assert extra_keys(salted, 0, 4)
    assert extra_keys(salted, 4, 8) == b""
    assert not set(hashes_of(salted)) & set(hashes_of(request("a", [1] * 12)))
    assert not set(hashes_of(salted)) & set(hashes_of(request("a", [1] * 12, cache_salt="y")))


def test_a_medium_counts_with_its_content_and_its_place_in_the_block() -> None:
    """R11.17, P11.4."""

    def keys(*features: Feature) -> list[BlockHash]:
        return hashes_of(request("a", [7] * 12, features=features))

    assert keys(picture("x", 1)) == keys(picture("x", 1))
    assert keys(picture("x", 1))[0] != keys(picture("y", 1))[0]
    assert keys(picture("x", 0))[0] != keys(picture("x", 1))[0]
    assert keys(picture("x", 1))[0] != keys(picture("x", 1, 4))[0]
    assert keys(picture("x", 1))[0] != keys(Feature(modality="video", content_hash="x", offset=1, length=3))[0]
    spanning = request("a", [7] * 12, features=(picture("x", 2, 5),))
    assert (-2).to_bytes(8, "big", signed=True) in extra_keys(spanning, 4, 8)
    assert extra_keys(spanning, 8, 12) == b""


def test_the_item_is_found_again_when_hashing_goes_on_inside_or_after_it() -> None:
    """R11.15, P11.5: any point of interruption gives the same hashes."""
    features = (picture("a", 1, 2), picture("b", 5, 6), picture("c", 14, 3))
    record = request("r", list(range(24)), features=features)
    whole = hashes_of(record)
    for stop in range(25):
        parts: list[BlockHash] = []
        hasher = ChainedHasher(Sha256(), 4, ROOT)
        hasher.extend(record, record.prompt_token_ids[:stop], parts)
        hasher.extend(record, record.prompt_token_ids, parts)
        assert parts == whole


def test_embeddings_count_by_the_rows_of_the_block() -> None:
    """R11.19: outputs behind the prompt have no embeddings."""
    embeds = np.arange(24, dtype=np.float32).reshape(8, 3)
    changed = embeds.copy()
    changed[6, 0] = 99
    one = hashes_of(request("a", [0] * 8, prompt_embeds=embeds))
    two = hashes_of(request("a", [0] * 8, prompt_embeds=changed))
    assert one[0] == two[0]
    assert one[1] != two[1]
    assert extra_keys(request("a", [0] * 8, prompt_embeds=embeds), 8, 12) == b""
    transposed = embeds.reshape(4, 6)
    assert extra_keys(request("a", [0] * 4, prompt_embeds=transposed), 0, 4) != extra_keys(
        request("a", [0] * 8, prompt_embeds=embeds), 0, 8
    )


def test_token_bytes_are_equal_whatever_the_container() -> None:
    """R11.6."""
    values = [1, 2, 300, 70000]
    wanted = b"".join(v.to_bytes(4, "little") for v in values)
    for container in (values, array("i", values), np.asarray(values), np.asarray(values, dtype=">i4")):
        assert canonical_token_bytes(container, 0, 4) == wanted
    assert canonical_token_bytes(array("i", values), 1, 2) == wanted[4:8]


def test_known_value_does_not_drift() -> None:
    """R11.6, R11.8: equal across processes, machines and versions, so the value is written down here."""
    root = root_hash(Sha256(), None)
    found: list[BlockHash] = []
    ChainedHasher(Sha256(), 4, root).extend(request("a", [1, 2, 3, 4], cache_salt="s"), [1, 2, 3, 4], found)
    assert found[0].hex() == "a66431a58009f6fdf58897bb2f2b5d34832897e863de3d7b5ca2b2ce894c6b9a"


def test_a_block_hash_is_a_type_of_its_own() -> None:
    """R11.1: signatures ask for it, so a type checker refuses bare bytes; at run time it is bytes."""
    hints = get_type_hints(ChainedHasher.extend)
    assert hints["hashes"] == list[BlockHash]
    assert get_type_hints(group_key) == {"block_hash": BlockHash, "group": int, "return": BlockHashWithGroup}
    assert type(hashes_of(request("a", [1, 2, 3, 4]))[0]) is bytes


@given(st.binary(min_size=16, max_size=32), st.integers(0, 2**32 - 1))
def test_keys_round_trip(block_hash: bytes, group: int) -> None:
    """R11.2, I11.4: both parts can be had back, whatever the group."""
    joined = group_key(BlockHash(block_hash), group)
    assert (joined[:-4], int.from_bytes(joined[-4:], "big")) == (block_hash, group)
    assert group_key(BlockHash(joined[:-4]), int.from_bytes(joined[-4:], "big")) == joined


def test_larger_group_blocks_use_every_scale_th_hash() -> None:
    """R11.21, R11.22: lazily, and later hashes show."""
    hashes = [BlockHash(bytes([i])) for i in range(5)]
    view = ScaledHashes(hashes, 2)
    assert list(view) == [hashes[1], hashes[3]]
    assert view[-1] == hashes[3]
    assert view[0:1] == [hashes[1]]
    with pytest.raises(IndexError):
        view[2]
    hashes.append(BlockHash(b"x"))
    assert list(view)[-1] == b"x"


def test_block_sizes_that_do_not_divide_are_refused() -> None:
    """R11.23, R11.24."""
    assert hash_block_size([16]) == 16
    assert hash_block_size([16, 24]) == 8
    assert hash_block_size([]) == 1
    assert hash_block_size([16, 32], match_unit=8) == 8
    assert hash_block_size([16], match_unit=8) == 16
    for unit in (5, 16, 0, -8):
        with pytest.raises(ConfigError, match="choose a divisor of 8"):
            hash_block_size([16, 24], match_unit=unit)
    assert group_scale(32, 16) == 2
    with pytest.raises(ConfigError, match="--block-size"):
        group_scale(24, 16)


def test_the_operators_match_unit_reaches_the_groups() -> None:
    """R11.24: several groups hash by it, one group by its own blocks."""
    for sizes, unit, size in (((4, 8), None, 4), ((4, 8), 2, 2), ((4,), 2, 4)):
        kv = KVCoordinator(kv_config(20, *sizes), SpecRegistry(), max_model_len=16, match_unit=unit)
        assert kv.hash_block_size == size
    with pytest.raises(ConfigError, match="match unit of 3"):
        KVCoordinator(kv_config(20, 4, 8), SpecRegistry(), max_model_len=16, match_unit=3)


@given(st.lists(st.integers(0, 3), max_size=30), st.lists(st.integers(0, 3), max_size=30))
def test_equal_hashes_mean_equal_prefixes(first: list[int], second: list[int]) -> None:
    """I11.1, I1.2."""
    one, two = hashes_of(request("a", first)), hashes_of(request("b", second))
    assert len(one) == len(first) // 4
    for i, (left, right) in enumerate(zip(one, two, strict=False)):
        assert (left == right) == (first[: 4 * (i + 1)] == second[: 4 * (i + 1)])


FEATURES = st.lists(st.tuples(st.sampled_from("xy"), st.integers(0, 3), st.integers(1, 5)), max_size=2)
REQUESTS = st.tuples(
    st.lists(st.integers(0, 1), max_size=12),
    st.sampled_from([None, "one", "two"]),
    st.sampled_from([None, "salt"]),
    FEATURES,
    st.sampled_from([None, 0, 1]),
)
Shape = tuple[list[int], str | None, str | None, list[tuple[str, int, int]], int | None]


def of_shape(shape: Shape) -> EngineRequest:
    """Items lie one behind the other, each after a gap; embeddings are equal but for the row with their number."""
    tokens, adapter, salt, gaps, row = shape
    features, start = [], 0
    for content, gap, length in gaps:
        if start + gap + length > len(tokens):
            break
        features.append(picture(content, start + gap, length))
        start += gap + length
    embeds = None
    if row is not None:
        embeds = np.zeros((len(tokens), 2), dtype=np.float32)
        embeds[6 * row : 6 * row + 1] = 1
    return request(
        "a",
        tokens,
        adapter=AdapterRef(adapter, 1, "/x") if adapter else None,
        cache_salt=salt,
        features=tuple(features),
        prompt_embeds=embeds,
    )


def identity(record: EngineRequest, end: int) -> tuple[object, ...]:
    """All that decides about the KV of the first ``end`` tokens, and whether the model takes what they show."""
    items = [
        ((f.content_hash, f.modality, f.length), f.offset, min(f.offset + f.length, end))
        for f in record.features
        if f.offset < end
    ]
    blocks = [(content, at) for content, start, stop in items for at in range(start // 4, (stop - 1) // 4 + 1)]
    starts = [(content, start) for content, start, _ in items]
    embeds = None if record.prompt_embeds is None else record.prompt_embeds[:end].tobytes()
    tokens = tuple(record.prompt_token_ids[:end].tolist())
    adapter = record.adapter.name if record.adapter else None
    return tokens, adapter, record.cache_salt, tuple(blocks), tuple(starts), embeds


@settings(max_examples=150)
@given(REQUESTS, REQUESTS, st.lists(st.booleans(), min_size=5, max_size=5))
def test_equal_hashes_mean_equal_everything(first: Shape, second: Shape, same: list[bool]) -> None:
    """I11.1: tokens, adapter, salt, items with their places, embeddings; ``same`` takes parts over."""
    mixed: Any = tuple(one if keep else other for one, other, keep in zip(first, second, same, strict=True))
    one, two = of_shape(first), of_shape(mixed)
    for i, (left, right) in enumerate(zip(hashes_of(one), hashes_of(two), strict=False)):
        end = 4 * (i + 1)
        assert (left == right) == (identity(one, end) == identity(two, end))


@settings(max_examples=50)
@given(st.lists(st.integers(0, 70), min_size=1, max_size=40), st.lists(st.integers(0, 40), max_size=6))
def test_hashing_in_pieces_equals_hashing_at_once(tokens: list[int], stops: list[int]) -> None:
    """I11.2: and existing hashes never change."""
    record = request("a", tokens, cache_salt="s")
    parts: list[BlockHash] = []
    hasher = ChainedHasher(Sha256(), 4, ROOT)
    for stop in [*sorted(stops), len(tokens)]:
        before = list(parts)
        hasher.extend(record, tokens[:stop], parts)
        assert parts[: len(before)] == before
    assert parts == hashes_of(record)


@given(st.lists(st.integers(0, 2), max_size=24), st.lists(st.integers(0, 2), max_size=24))
def test_a_scaled_view_identifies_the_same_prefixes_as_direct_hashing(first: list[int], second: list[int]) -> None:
    """I11.3."""
    views = [ScaledHashes(hashes_of(request("a", tokens), 2), 2) for tokens in (first, second)]
    direct = [hashes_of(request("a", tokens), 4) for tokens in (first, second)]
    assert [len(view) for view in views] == [len(hashes) for hashes in direct]
    for i in range(min(len(views[0]), len(views[1]))):
        assert (views[0][i] == views[1][i]) == (direct[0][i] == direct[1][i])


class CountingHash:
    """Counts what is hashed."""

    name = "counting"
    cryptographic = True

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, parent: BlockHash, token_bytes: bytes, extra_keys: bytes) -> BlockHash:
        self.calls += 1
        return Sha256()(parent, token_bytes, extra_keys)


@settings(max_examples=60)
@given(
    st.lists(
        st.tuples(st.lists(st.integers(0, 70_000), max_size=30), st.integers(0, 30), st.sampled_from("-safe")),
        max_size=8,
    )
)
def test_many_requests_at_once_get_what_each_would_get_alone(shapes: list[tuple[list[int], int, str]]) -> None:
    """R11.13, I11.2: from any number of hashes known before, with and without extra keys."""
    extras: dict[str, dict[str, Any]] = {
        "-": {},
        "s": {"cache_salt": "x"},
        "a": {"adapter": AdapterRef("one", 1, "/x")},
        "f": {"features": (picture("img", 0, 1),)},
        "e": {},
    }
    records = [request(f"r{i}", tokens, **extras[kind]) for i, (tokens, _, kind) in enumerate(shapes)]
    hasher, known = ChainedHasher(Sha256(), 4, ROOT), []
    for record, (tokens, before, _) in zip(records, shapes, strict=True):
        found: list[BlockHash] = []
        hasher.extend(record, tokens[:before], found)
        known.append(found)
    hasher.extend_many(records, [array("i", tokens) for tokens, _, _ in shapes], known)
    assert known == [hashes_of(record) for record in records]


def test_many_requests_need_a_list_of_hashes_each() -> None:
    with pytest.raises(ValueError, match="shorter"):
        ChainedHasher(Sha256(), 4, ROOT).extend_many([request("a", [1])], [[1]], [])


def test_no_block_is_hashed_twice() -> None:
    """R11.13: only what is new, and R11.21: a larger group block hashes nothing again."""
    function = CountingHash()
    hasher, record, found = ChainedHasher(function, 4, ROOT), request("a", range(64)), list[BlockHash]()
    hasher.extend(record, list(range(33)), found)
    assert function.calls == len(found) == 8
    hasher.extend(record, list(range(64)), found)
    hasher.extend_many([record], [list(range(64))], [found])
    assert function.calls == len(found) == 16
    assert len(ScaledHashes(found, 4)) == 4
    assert list(ScaledHashes(found, 4)) == found[3::4]
    assert function.calls == 16


def test_embeddings_are_digested_once_per_slice() -> None:
    """R11.19."""
    slices: list[slice] = []

    class Watched(np.ndarray):
        def __getitem__(self, index: Any) -> Any:
            if isinstance(index, slice):
                slices.append(index)
            return super().__getitem__(index)

    embeds = np.arange(36, dtype=np.float32).reshape(12, 3).view(Watched)
    record, found = request("a", [0] * 12, prompt_embeds=embeds), list[BlockHash]()
    hasher = ChainedHasher(Sha256(), 4, ROOT)
    for length in (3, 4, 7, 8, 11, 12, 12):
        hasher.extend(record, [0] * length, found)
    hasher.extend_many([record], [[0] * 14], [found])
    assert [(part.start, part.stop) for part in slices] == [(0, 4), (4, 8), (8, 12)]


def test_negative_offsets_of_items_are_kept_apart() -> None:
    """R11.17, P11.4: the same item further into its block is another block."""
    one = request("a", [7] * 16, features=(picture("x", 1, 12),))
    two = request("b", [7] * 16, features=(picture("x", 2, 12),))
    assert extra_keys(one, 4, 8) != extra_keys(two, 4, 8)
    assert (-3).to_bytes(8, "big", signed=True) in extra_keys(one, 4, 8)
    both = request("c", [7] * 8, features=(picture("y", 0, 2), picture("x", 2, 2)))
    keys = extra_keys(both, 0, 4)
    assert keys.index(b"y") < keys.index(b"x")


def test_a_long_prompt_is_found_in_full() -> None:
    """R3.91, R3.92: 100,000 tokens, hashed in one go and looked up in one go."""
    tokens = array("i", range(100_000))
    record = request("a", [1])
    found: list[BlockHash] = []
    ChainedHasher(Sha256(), 16, ROOT).extend(record, tokens, found)
    assert len(found) == 6250
    pool = BlockPool(6_300)
    blocks = pool.allocate(6250)
    pool.remember_many(blocks, (group_key(block_hash, 0) for block_hash in found))
    assert pool.find_chain(found, 0) == blocks
    pool.forget(blocks[4_000])
    assert pool.find_chain(found, 0) == blocks[:4_000]


def test_a_request_is_freed_without_the_cyclic_collector() -> None:
    """R1.10."""

    record = request("a", list(range(8)))
    live = LiveRequest(record, 20)
    ChainedHasher(Sha256(), 4, ROOT).extend(record, live.tokens, live.block_hashes)
    seen = weakref.ref(live)
    gc.disable()
    try:
        del live
        assert seen() is None
    finally:
        gc.enable()
