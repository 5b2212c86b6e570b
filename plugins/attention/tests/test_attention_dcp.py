"""Steps over contexts that are dealt out among ranks: decodes are counted apart, and drafts get metadata anew."""

from __future__ import annotations

import numpy as np
import pytest

from hardpoint_attention.dcp import offers_fused_draft_update, split_queries


@pytest.mark.parametrize(
    ("queries", "counts"),
    [([1, 1, 5, 2], (2, 2, 2, 7)), ([1, 1], (2, 2, 0, 0)), ([4], (0, 0, 1, 4)), ([], (0, 0, 0, 0))],
)
def test_decodes_are_counted_apart(queries: list[int], counts: tuple[int, int, int, int]) -> None:
    """R5.22."""
    split = split_queries(np.concatenate(([0], np.cumsum(queries, dtype=np.int64))))
    found = (split.num_decodes, split.num_decode_tokens, split.num_prefills, split.num_prefill_tokens)
    assert found == counts


def test_drafts_count_as_decodes_up_to_the_threshold() -> None:
    """R5.22."""
    starts = np.array([0, 3, 4, 9])
    assert split_queries(starts, threshold=3).num_decode_tokens == 4
    with pytest.raises(ValueError, match="reorder_threshold"):
        split_queries(starts)


def test_fused_draft_updates_are_for_one_rank() -> None:
    """R5.90, P5.8."""
    assert [size for size in (1, 2, 4) if offers_fused_draft_update(size)] == [1]
