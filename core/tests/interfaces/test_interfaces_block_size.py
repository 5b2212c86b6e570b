"""Phase 1 of block-size alignment: the smallest size that every attention backend accepts (spec 12 section 5)."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint.interfaces import BlockSizeRule, smallest_block_size

RULES = st.builds(BlockSizeRule, st.integers(1, 12), st.lists(st.integers(1, 60), max_size=3).map(tuple)) | st.builds(
    BlockSizeRule, st.none(), st.lists(st.integers(1, 60), min_size=1, max_size=3).map(tuple)
)


def smallest(*rules: BlockSizeRule, minimum: int = 1) -> int:
    return smallest_block_size({f"backend{i}": rule for i, rule in enumerate(rules)}, minimum)


def test_multiples_meet_at_the_least_common_one() -> None:
    """R12.39."""
    assert smallest(BlockSizeRule(16), BlockSizeRule(24)) == 48
    assert smallest(BlockSizeRule(16), BlockSizeRule(24), minimum=49) == 96
    assert smallest(BlockSizeRule(1), minimum=16) == 16
    assert smallest(minimum=7) == 7


def test_an_exact_size_is_no_multiple() -> None:
    """P12.11: a backend of exact sizes refuses a plain multiple of them."""
    assert not BlockSizeRule(exact=(16,)).accepts(32)
    assert smallest(BlockSizeRule(exact=(16, 64)), BlockSizeRule(32)) == 64
    assert smallest(BlockSizeRule(16, exact=(8,)), BlockSizeRule(4)) == 8


def test_without_a_common_size_each_backends_sizes_are_listed() -> None:
    """R12.39."""
    with pytest.raises(ConfigError, match=r"backend0: 16 or 32; backend1: any multiple of 48 or 8\).*--block-size"):
        smallest(BlockSizeRule(exact=(32, 16)), BlockSizeRule(48, exact=(8,)))


@given(st.lists(RULES, min_size=1, max_size=4), st.integers(1, 40))
def test_the_result_equals_a_search_of_all_sizes(rules: list[BlockSizeRule], minimum: int) -> None:
    """I12.5."""
    # All multiples up to 12 meet at or below 27720, and minima and exact sizes are smaller.
    found = next((n for n in range(minimum, 27_720 + 41) if all(rule.accepts(n) for rule in rules)), None)
    if found is None:
        with pytest.raises(ConfigError):
            smallest(*rules, minimum=minimum)
    else:
        assert smallest(*rules, minimum=minimum) == found


def test_a_capability_states_a_rule() -> None:
    assert BlockSizeRule.from_capability({"multiple_of": 16}, "acme") == BlockSizeRule(16)
    assert BlockSizeRule.from_capability({"exact": [8, 16]}, "acme") == BlockSizeRule(exact=(8, 16))


@pytest.mark.parametrize(
    "value", [None, 16, [16], {}, {"multiple_of": "16"}, {"exact": [0]}, {"multiple": 16}, {"exact": 1}]
)
def test_what_states_no_rule_is_refused(value: object) -> None:
    with pytest.raises(ConfigError, match="acme: .* states no block sizes"):
        BlockSizeRule.from_capability(value, "acme")
