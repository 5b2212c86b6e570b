"""When a shared prefix is attended to once for all, and how the step is split."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import ConfigError
from hardpoint_attention.cascade import (
    CascadeQuestion,
    CascadeVerdict,
    cascade_policy,
    cascade_policy_names,
    decide_cascade,
    estimate_cascade,
    obstacle,
    plan_cascade,
    register_cascade_policy,
)

PREFILL = CascadeQuestion(
    prefix_tokens=256, num_rows=8, max_query_len=5, num_heads=8, num_kv_heads=2, num_processors=132
)
DECODE = replace(PREFILL, max_query_len=1)


@pytest.mark.parametrize(
    ("changes", "is_accepted"),
    [
        ({}, True),
        ({"prefix_tokens": 255}, False),
        ({"prefix_tokens": 257}, True),
        ({"num_rows": 7}, False),
        ({"num_rows": 9}, True),
        ({"uses_alibi": True}, False),
        ({"uses_window": True}, False),
        ({"is_local": True}, False),
        ({"dcp_size": 2}, False),
    ],
    ids=str,
)
def test_thresholds(changes: dict[str, Any], is_accepted: bool) -> None:
    """R5.80, R5.81: 255 and 256 tokens, 7 and 8 requests, and what rules cascade out."""
    assert estimate_cascade(replace(PREFILL, **changes)).is_accepted is is_accepted


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"prefix_tokens": 255, "uses_alibi": True, "num_rows": 7, "dcp_size": 2}, "255 tokens, fewer than 256"),
        ({"uses_alibi": True, "num_rows": 7, "dcp_size": 2}, "ALiBi"),
        ({"uses_window": True, "num_rows": 7, "dcp_size": 2}, "window"),
        ({"is_local": True, "num_rows": 7, "dcp_size": 2}, "local"),
        ({"num_rows": 7, "dcp_size": 2}, "7 requests, fewer than 8"),
        ({"dcp_size": 2}, "2 ranks"),
    ],
    ids=str,
)
def test_the_first_refusal_counts(changes: dict[str, Any], reason: str) -> None:
    """R5.80: in order."""
    assert reason in estimate_cascade(replace(PREFILL, **changes)).reason


@pytest.mark.parametrize("changes", [{"num_heads": 2}, {"max_query_len": 2}], ids=str)
def test_where_keys_would_not_be_split_cascade_is_taken_at_once(changes: dict[str, Any]) -> None:
    """R5.81: even where the model of R5.82 would find no gain."""
    assert not estimate_cascade(replace(DECODE, num_processors=10_000)).is_accepted
    assert estimate_cascade(replace(DECODE, num_processors=10_000, **changes)).is_accepted


@pytest.mark.parametrize(
    ("changes", "cascade", "split"),
    [
        # 8 heads x 1 tile on 132: one wave for each of 2 prefix tiles; 8 x 2 x 1 x 2 = 32 pieces are one wave.
        ({}, 2, 1),
        # 4096 tokens are 32 tiles; 64 rows x 8 KV heads x 1 x 32 = 16384 pieces are 125 waves of 132.
        ({"prefix_tokens": 4096, "num_rows": 64, "num_heads": 32, "num_kv_heads": 8}, 32, 125),
        # 129 rows are two tiles of queries: 32 x 2 = 64 are two waves of 60.
        ({"num_rows": 129, "num_heads": 32, "num_kv_heads": 8, "num_processors": 60}, 4, 35),
        # 129 heads over one are two tiles per group.
        ({"num_heads": 129, "num_kv_heads": 1, "num_processors": 4}, 66, 8),
        # Equal is not smaller.
        ({"num_rows": 9, "num_heads": 4, "num_kv_heads": 2, "num_processors": 18}, 2, 2),
    ],
    ids=str,
)
def test_the_estimate(changes: dict[str, Any], cascade: int, split: int) -> None:
    """R5.82: waves of tiles, strictly smaller; by hand."""
    verdict = estimate_cascade(replace(DECODE, **changes))
    assert f"estimated at {cascade} waves" in verdict.reason
    assert f"the {split} of split" in verdict.reason
    assert verdict.is_accepted is (cascade < split)


def test_a_policy_may_be_replaced_but_not_be_wrong() -> None:
    """R5.82: replaceable. What would change results stays refused."""
    short = replace(PREFILL, prefix_tokens=16, num_rows=2)
    assert not decide_cascade(short).is_accepted
    assert decide_cascade(short, cascade_policy("always")).is_accepted
    assert not decide_cascade(PREFILL, cascade_policy("never")).is_accepted
    for changes in ({"uses_window": True}, {"is_local": True}, {"uses_alibi": True}, {"dcp_size": 4}):
        verdict = decide_cascade(replace(short, **changes), cascade_policy("always"))
        assert (verdict.is_accepted, verdict.reason) == (False, obstacle(replace(short, **changes)))
    assert "no prefix" in decide_cascade(replace(short, prefix_tokens=0), cascade_policy("always")).reason


def test_policies_are_found_by_name() -> None:
    def at_night(question: CascadeQuestion) -> CascadeVerdict:
        return CascadeVerdict(question.num_rows > 1, "it is night")

    register_cascade_policy("test-at-night", at_night)
    register_cascade_policy("test-at-night", at_night)
    assert decide_cascade(PREFILL, cascade_policy("test-at-night")).reason == "it is night"
    with pytest.raises(ConfigError, match="test-at-night"):
        register_cascade_policy("test-at-night", cascade_policy("never"))
    with pytest.raises(ConfigError, match="'sometimes' is unknown.*always, estimate, never"):
        cascade_policy("sometimes")
    assert {"always", "estimate", "never"} <= set(cascade_policy_names())


rows = st.lists(st.tuples(st.integers(8, 60), st.integers(0, 9)), min_size=1, max_size=6)


@given(rows=rows, blocks=st.integers(1, 2))
def test_the_two_parts_hold_all_keys_once(rows: list[tuple[int, int]], blocks: int) -> None:
    """R5.83, R5.21: whole blocks; all queries in one sequence over the prefix, the rest per request."""
    starts = np.concatenate(([0], np.cumsum([query for _, query in rows])))
    seq_lens = np.array([context + query for context, query in rows])
    plan = plan_cascade(blocks, 4, starts, seq_lens)
    assert (plan.prefix_blocks, plan.prefix_tokens) == (blocks, 4 * blocks)
    assert plan.prefix_query_starts.tolist() == [0, starts[-1]]
    assert plan.prefix_seq_lens.tolist() == [4 * blocks]
    assert (plan.suffix_seq_lens + plan.prefix_tokens).tolist() == seq_lens.tolist()
    assert bool((plan.suffix_seq_lens >= np.diff(starts)).all()), "a row's new tokens are all in its own part"


@pytest.mark.parametrize(("blocks", "context"), [(0, 9), (3, 11), (1, 3)])
def test_a_prefix_is_blocks_that_every_row_has_behind_it(blocks: int, context: int) -> None:
    """R5.83: never zero, and never into new tokens."""
    with pytest.raises(ValueError, match=f"prefix of {blocks} blocks of 4 tokens"):
        plan_cascade(blocks, 4, np.array([0, 2, 3]), np.array([context + 2, 40]))
