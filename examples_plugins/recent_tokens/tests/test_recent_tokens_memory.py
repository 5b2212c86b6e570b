"""Memory stays bounded, and nothing is given up that a token will read."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from recent_tokens import RecentTokensManager, RecentTokensSpec

from hardpoint.interfaces import NULL_BLOCK_ID
from hardpoint.testing.block_pool import CheckedBlockPool


def make(window: int, block_size: int = 4, num_blocks: int = 64) -> tuple[RecentTokensManager, CheckedBlockPool]:
    spec = RecentTokensSpec(block_size=block_size, num_kv_heads=1, head_size=8, dtype="float32", window=window)
    pool = CheckedBlockPool(num_blocks)
    return RecentTokensManager(pool, 0, spec), pool


def test_ten_thousand_tokens_take_no_more_than_the_window() -> None:
    manager, pool = make(window=16)
    for length in range(1, 10_001):
        manager.release_unneeded("a", length - 1)
        manager.allocate("a", length)
    assert 63 - pool.num_free <= 6
    assert len(manager.block_ids("a")) == 2_500
    manager.free("a")
    assert pool.num_free == 63


@given(st.lists(st.integers(1, 9), min_size=1, max_size=20), st.integers(1, 20), st.sampled_from([1, 3, 4]))
def test_whatever_a_token_reads_is_there(steps: list[int], window: int, block_size: int) -> None:
    """Against the definition: token i reads tokens i - window + 1 to i."""
    manager, _ = make(window, block_size, num_blocks=400)
    length = 0
    for count in steps:
        manager.release_unneeded("a", length)
        manager.allocate("a", length + count)
        table = manager.block_ids("a")
        for token in range(length, length + count):
            read = range(max(token - window + 1, 0), token + 1)
            assert all(table[position // block_size] != NULL_BLOCK_ID for position in read)
        length += count


def test_the_bound_is_stated_for_sizing() -> None:
    spec = RecentTokensSpec(block_size=4, num_kv_heads=1, head_size=8, dtype="float32", window=16)
    assert spec.max_blocks(100_000, 8) < 12
    assert spec.max_blocks(10, 8) == 3
