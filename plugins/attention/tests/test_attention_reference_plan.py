"""Which rows the reference backend computes together."""

from __future__ import annotations

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_attention.reference.plan import Batch, PlanLimits, RowSet, fresh_row_sets, paged_row_sets
from hardpoint_attention.reference.visibility import Visibility


def batch(rows: list[tuple[int, int]], block_size: int = 4) -> Batch:
    starts = np.concatenate(([0], np.cumsum([query for _, query in rows]))).astype(np.int64)
    return Batch(starts, np.array([context + query for context, query in rows], dtype=np.int64), block_size)


def plan(rows: list[tuple[int, int]], pages: int = 100, tile: int = 32, window: int | None = None) -> list[RowSet]:
    given_batch = batch(rows)
    return list(paged_row_sets(given_batch, np.arange(len(rows)), Visibility(True, window), PlanLimits(pages, tile)))


@settings(deadline=None)
@given(
    rows=st.lists(st.tuples(st.integers(0, 50), st.integers(0, 50)), min_size=1, max_size=10),
    pages=st.integers(1, 30),
    tile=st.integers(1, 40),
    window=st.sampled_from([None, 1, 7]),
)
def test_every_token_is_computed_exactly_once(
    rows: list[tuple[int, int]], pages: int, tile: int, window: int | None
) -> None:
    sets = plan(rows, pages, tile, window)
    tokens = sorted(token for row_set in sets for token in row_set.tokens().tolist())
    assert tokens == list(range(sum(query for _, query in rows)))
    for row_set in sets:
        assert len(row_set.rows) == 1 or len(row_set.rows) * row_set.num_blocks <= pages
        last_block = (row_set.key_end - 1) // 4
        assert bool((row_set.first_block + row_set.num_blocks > last_block).all()), "the newest keys are gathered"
        if window is None:
            assert not row_set.first_block.any()
        else:
            oldest = np.maximum(row_set.query_start - window + 1, 0)
            assert bool((row_set.first_block * 4 <= oldest).all()), "the oldest visible key is gathered"


def test_decodes_of_similar_length_share_a_call() -> None:
    sets = plan([(3, 1), (99, 1), (4, 1), (98, 1)], pages=50)
    assert [sorted(row_set.rows.tolist()) for row_set in sets] == [[0, 2], [1, 3]]


def test_all_decodes_share_one_call_when_they_fit() -> None:
    assert len(plan([(3, 1), (20, 1), (4, 1)])) == 1


def test_short_queries_group_by_their_number() -> None:
    sets = plan([(9, 3), (9, 1), (2, 3)])
    assert [(row_set.num_queries, sorted(row_set.rows.tolist())) for row_set in sets] == [(1, [1]), (3, [0, 2])]


def test_a_long_row_is_tiled_and_no_tile_reads_the_future() -> None:
    sets = plan([(10, 70)], tile=32)
    assert [(row_set.num_queries, int(row_set.key_end[0])) for row_set in sets] == [(32, 42), (32, 74), (6, 80)]


def test_without_causality_every_tile_reads_to_the_end() -> None:
    """R5.44."""
    given_batch = batch([(10, 70)])
    sets = paged_row_sets(given_batch, np.arange(1), Visibility(causal=False, window=None), PlanLimits(100, 32))
    assert [(row_set.num_queries, int(row_set.key_end[0])) for row_set in sets] == [(32, 80), (32, 80), (6, 80)]


def test_a_window_skips_blocks_that_nobody_sees() -> None:
    (decode,) = plan([(40, 1)], window=6)
    assert (int(decode.first_block[0]), decode.num_blocks) == (8, 3)


def test_fresh_rows_of_equal_length_share_a_call() -> None:
    sets = list(fresh_row_sets(batch([(0, 9), (0, 0), (0, 4), (0, 9)]), np.arange(4)))
    assert [(row_set.num_queries, row_set.rows.tolist()) for row_set in sets] == [(4, [2]), (9, [0, 3])]
