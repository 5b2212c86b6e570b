"""Pages of equal size in one block pool: phases 2 and 3 of block-size alignment (spec 12 section 5)."""

from __future__ import annotations

import logging
from fractions import Fraction
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockSizeRule, FullAttentionSpec, KVCacheSpec, MambaCacheMode, MambaSpec, MLASpec
from hardpoint_scheduling.kv_cache.alignment import PageSize, align, align_dtypes, align_hybrid, equal_pages

RULES = st.builds(BlockSizeRule, st.integers(1, 8), st.lists(st.integers(1, 90), max_size=3).map(tuple)) | st.builds(
    BlockSizeRule, st.none(), st.lists(st.integers(1, 90), min_size=1, max_size=4).map(tuple)
)


def page(block_size: int = 16, per_token: int = 100, *rules: BlockSizeRule) -> PageSize:
    named = {f"backend{i}": rule for i, rule in enumerate(rules or (BlockSizeRule(16),))}
    return PageSize.of(block_size, block_size * per_token, named)


def shape(size: PageSize) -> tuple[int, int, int]:
    return size.block_size, size.used_bytes, size.page_bytes


def test_a_large_state_enlarges_the_block() -> None:
    """R12.40."""
    assert shape(align_hybrid(page(), 4_000)) == (48, 4_800, 4_800)
    assert shape(align_hybrid(page(16, 100, BlockSizeRule(16), BlockSizeRule(exact=(16, 128))), 4_000))[0] == 128


def test_a_small_state_is_padded_itself() -> None:
    """R12.40: the attention page stays."""
    for state in (0, 1, 1_600):
        assert align_hybrid(page(), state) == page()


def test_where_no_larger_block_is_accepted_the_attention_page_is_padded(caplog: pytest.LogCaptureFixture) -> None:
    """R12.40: enlarge or pad."""
    with caplog.at_level(logging.INFO, "hardpoint_scheduling"):
        assert shape(align_hybrid(page(16, 100, BlockSizeRule(exact=(16,))), 4_000)) == (16, 1_600, 4_000)
    assert "KV pages padded to 4000 bytes by phase 2" in caplog.text


def test_other_dtypes_enlarge_the_main_block() -> None:
    """R12.41: 8-bit main layers, 16-bit layers that quantization skipped, both with blocks of 16 tokens."""
    assert shape(align_dtypes(page(16, 100), [3_200, 1_600])) == (32, 3_200, 3_200)
    assert align_dtypes(page(), []) == page()
    with pytest.raises(ConfigError, match="backend0: 16"):
        align_dtypes(page(16, 100, BlockSizeRule(exact=(16,))), [1_601])


def test_the_phases_run_in_order_and_say_which_changed_the_size(caplog: pytest.LogCaptureFixture) -> None:
    """R12.42: for explicit sizes as well, since nothing here knows who chose the first one."""
    with caplog.at_level(logging.INFO, "hardpoint_scheduling"):
        assert align(page(), [2_000], [5_000]) == align_dtypes(align_hybrid(page(), 2_000), [5_000])
    first, second = caplog.messages[:2]
    assert first.startswith("KV block size 32, set by phase 2 of alignment (was 16)")
    assert second.startswith("KV block size 64, set by phase 3 of alignment (was 32)")
    caplog.clear()
    align(page(), [1_600], [10])
    assert caplog.messages == []


@given(
    st.lists(RULES, min_size=1, max_size=3),
    st.integers(1, 9),
    st.lists(st.integers(1, 900), max_size=3),
    st.lists(st.integers(1, 900), max_size=3),
    st.data(),
)
def test_the_result_equals_a_search(
    rules: list[BlockSizeRule], per_token: int, states: list[int], others: list[int], data: st.DataObject
) -> None:
    """I12.5: the main page covers every padded one, every backend accepts the block, and none smaller would do."""
    accepted = [n for n in range(1, 2_000) if all(rule.accepts(n) for rule in rules)]
    if not accepted:
        return
    start = page(data.draw(st.sampled_from(accepted[:20])), per_token, *rules)

    def search(block_size: int, needed: int) -> int | None:
        return next((n for n in accepted if n >= block_size and n * per_token >= needed), None)

    # Phase 2 may pad where it cannot grow; phase 3 must grow.
    state, other = max(states, default=0), max(others, default=0)
    second = search(start.block_size, state) or start.block_size
    padded = max(state, second * per_token)
    third = second if other <= padded else search(second, other)
    if third is None:
        with pytest.raises(ConfigError):
            align(start, states, others)
        return
    result = align(start, states, others)
    assert result.block_size == third
    assert result.used_bytes == third * per_token
    assert result.page_bytes >= max(state, other, result.used_bytes)
    assert all(rule.accepts(result.block_size) for rule in rules)


USUAL: dict[str, Any] = {"block_size": 16, "num_kv_heads": 2, "head_size": 4, "dtype": "float16"}
LAYERS = st.one_of(
    st.builds(
        FullAttentionSpec,
        block_size=st.sampled_from([8, 16, 24]),
        num_kv_heads=st.integers(1, 3),
        head_size=st.sampled_from([4, 6]),
        dtype=st.sampled_from(["float16", "int8"]),
        tokens_per_state=st.sampled_from([1, 2, 4, Fraction(1, 2)]),
    ),
    st.builds(
        MLASpec,
        block_size=st.sampled_from([8, 16]),
        num_kv_heads=st.just(1),
        head_size=st.integers(3, 9),
        dtype=st.just("bfloat16"),
        alignment=st.sampled_from([None, 32, 48]),
    ),
    st.builds(
        MambaSpec,
        block_size=st.sampled_from([16, 64]),
        shapes=st.tuples(st.tuples(st.integers(1, 300))),
        dtypes=st.just(("float32",)),
        mode=st.sampled_from(MambaCacheMode),
    ),
)


@given(st.lists(LAYERS, min_size=1, max_size=6), st.sampled_from([1, 8, 16]))
def test_all_pages_become_equal_and_none_loses_room(layers: list[KVCacheSpec], multiple: int) -> None:
    """R12.40, R12.41, R1.48, I1.3, P1.6: whatever the mixture; blocks only grow, and stay what backends accept."""
    specs = {f"l{i}": one for i, one in enumerate(layers)}
    result = equal_pages(specs, {"some": BlockSizeRule(multiple_of=multiple)})
    assert list(result) == list(specs)
    (page,) = {one.page_size_bytes for one in result.values()}
    sizes = {one.block_size for one in specs.values()}
    for name, one in result.items():
        before = specs[name]
        assert type(one) is type(before)
        assert page >= before.page_size_bytes
        assert one.block_size >= before.block_size
        if one.block_size != before.block_size:
            assert one.block_size % multiple == 0
        if isinstance(one, MLASpec) and one.alignment:
            assert page % one.alignment == 0
        same = msgspec.structs.replace(before, block_size=one.block_size, padded_page_size=one.padded_page_size)
        assert one == same, "alignment changes block sizes and padding, nothing else"
    if len({one.page_size_bytes for one in specs.values()}) == 1:
        assert result == specs
    assert len({one.block_size for one in result.values()} - sizes) <= 1, "only the main layers' blocks grow"


def test_blocks_stay_multiples_of_those_that_keep_their_size() -> None:
    """R12.41, R11.24: else hashes would have to be as fine as one token. Whole states are kept as well (R1.23)."""
    main = FullAttentionSpec(**USUAL, tokens_per_state=8)
    other = FullAttentionSpec(**{**USUAL, "block_size": 24, "head_size": 8, "num_kv_heads": 1}, tokens_per_state=1)
    specs: dict[str, KVCacheSpec] = {"a": main, "b": main, "c": other}
    result = equal_pages(specs, {"any": BlockSizeRule(multiple_of=1)})
    assert result["c"] == other
    assert result["a"].block_size == result["b"].block_size
    assert result["a"].block_size % 24 == result["a"].block_size % 8 == 0
    assert result["a"].page_size_bytes == other.page_size_bytes == 768


@pytest.mark.parametrize("mode", MambaCacheMode)
def test_states_that_prefixes_are_found_by_lie_at_the_ends_of_the_blocks(mode: MambaCacheMode) -> None:
    """R12.40, R1.33: a block that grew would else end where no state is kept; a running state has no such place."""
    state = MambaSpec(block_size=16, shapes=((600,),), dtypes=("float32",), mode=mode)
    specs: dict[str, KVCacheSpec] = {"a": FullAttentionSpec(**USUAL), "s": state}
    result = equal_pages(specs, {"any": BlockSizeRule(16)})
    assert result["a"].block_size == 80
    assert result["s"].block_size == (16 if mode is MambaCacheMode.NONE else 80)


def test_recurrent_layers_alone_are_padded() -> None:
    """R12.40: no block size changes their pages."""
    small, large = (MambaSpec(block_size=16, shapes=((n,),), dtypes=("float32",)) for n in (3, 10))
    result = equal_pages({"a": small, "b": large}, {})
    assert result == {"a": msgspec.structs.replace(small, padded_page_size=40), "b": large}
