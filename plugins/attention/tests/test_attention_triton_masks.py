"""What a query sees, as the kernels compute it, against the same said in plain Python."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

pytest.importorskip("triton")

import triton
import triton.language as tl

from hardpoint_attention.triton.kernels.visibility import find_row, is_visible, key_bounds

QUERIES, KEYS = 8, 64


@triton.jit
def visibility_kernel(
    seen: tl.tensor,  # int32 [QUERIES, KEYS]
    bounds: tl.tensor,  # int32 [2]
    masks: tl.tensor,
    first: tl.tensor,
    seq_len: tl.tensor,
    CAUSAL: tl.constexpr,
    WINDOW: tl.constexpr,
    CHUNK: tl.constexpr,
    KEEPS_PROMPT: tl.constexpr,
    HAS_RANGES: tl.constexpr,
    M: tl.constexpr,
    N: tl.constexpr,
) -> None:
    query = first + tl.arange(0, M)
    key = tl.arange(0, N)
    low, high = key_bounds(tl.load(bounds), first + M - 1, seq_len, 0, masks, CAUSAL, WINDOW, CHUNK, HAS_RANGES)
    prompt_len = tl.load(masks[1])
    shown = is_visible(query, key, prompt_len, 0, masks, CAUSAL, WINDOW, CHUNK, KEEPS_PROMPT, HAS_RANGES)
    tl.store(seen + tl.arange(0, M)[:, None] * N + key[None, :], shown.to(tl.int32))
    tl.store(bounds, low)
    tl.store(bounds + 1, high)


@triton.jit
def row_kernel(starts: tl.tensor, rows: tl.tensor, num_rows: tl.tensor, BLOCK_Q: tl.constexpr) -> None:
    tl.store(rows + tl.program_id(0), find_row(starts, tl.program_id(0), num_rows, BLOCK_Q))


def expected(
    query: int,
    key: int,
    causal: bool,
    window: int,
    chunk: int,
    prompt_len: int | None,
    ranges: Sequence[tuple[int, int]],
) -> bool:
    in_window = not window or abs(query - key) < window
    if prompt_len is not None:
        base = key <= query and (key < prompt_len or in_window)
    else:
        base = (not causal or key <= query) and in_window and (not chunk or query // chunk == key // chunk)
    return base or any(begin <= query < end and begin <= key < end for begin, end in ranges)


@pytest.mark.slow
@settings(max_examples=80, deadline=None)
@given(
    context=st.integers(0, KEYS - QUERIES),
    causality=st.sampled_from([(0, False), (1, True), (2, False), (2, True)]),
    window=st.sampled_from([0, 0, 1, 5, 30]),
    chunk=st.sampled_from([0, 0, 3, 16]),
    prompt_len=st.sampled_from([None, None, 1, 20, 70]),
    cuts=st.sets(st.integers(0, KEYS + 4), max_size=6),
)
def test_the_predicate_is_what_it_says(
    context: int, causality: tuple[int, bool], window: int, chunk: int, prompt_len: int | None, cuts: set[int]
) -> None:
    """R5.50, R5.52, R5.55, R5.56, P5.4, P5.6: causality, windows, chunks, prompts and ranges, in any chunk of a prompt;
    and what lies outside of the bounds is seen by nobody (R5.44)."""
    if prompt_len is not None:
        causality, window, chunk = (1, True), window or 7, 0
    edges = sorted(cuts)
    ranges = list(zip(edges[::2], edges[1::2], strict=False))
    seq_len = context + QUERIES
    seen = torch.zeros(QUERIES, KEYS, dtype=torch.int32)
    bounds = torch.tensor([context, 0], dtype=torch.int32)
    masks = (
        torch.tensor([causality[1]]),
        torch.tensor([prompt_len or 0], dtype=torch.int32),
        torch.tensor([0, len(ranges)], dtype=torch.int32),
        torch.tensor(ranges or [(0, 0)], dtype=torch.int32),
    )
    visibility_kernel[(1,)](
        seen,
        bounds,
        masks,
        context,
        seq_len,
        CAUSAL=causality[0],
        WINDOW=window,
        CHUNK=chunk,
        KEEPS_PROMPT=prompt_len is not None,
        HAS_RANGES=bool(ranges),
        M=QUERIES,
        N=KEYS,
    )
    wanted = np.array(
        [
            [expected(query, key, causality[1], window, chunk, prompt_len, ranges) for key in range(seq_len)]
            for query in range(context, seq_len)
        ]
    )
    assert np.array_equal(seen.numpy()[:, :seq_len].astype(bool), wanted)
    low, high = bounds.tolist()
    outside = np.ones(seq_len, dtype=bool)
    outside[max(low, 0) : max(high, 0)] = False
    outside[: prompt_len or 0] = False
    assert not wanted[:, outside].any()


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(lengths=st.lists(st.integers(0, 20), min_size=1, max_size=8), block_q=st.sampled_from([1, 3, 5, 16]))
def test_every_query_is_in_exactly_one_block_of_its_row(lengths: list[int], block_q: int) -> None:
    """R5.20, R5.48: from running sums alone, rows without queries among them."""
    starts = torch.tensor(np.concatenate(([0], np.cumsum(lengths))), dtype=torch.int32)
    num_blocks = int(starts[-1]) // block_q + len(lengths)
    rows = torch.full((num_blocks,), -1, dtype=torch.int32)
    row_kernel[(num_blocks,)](starts, rows, len(lengths), BLOCK_Q=block_q)
    counted: dict[int, int] = {}
    for block, row in enumerate(rows.tolist()):
        begin = (block - int(starts[row]) // block_q - row) * block_q
        for query in range(begin, min(begin + block_q, lengths[row])):
            place = int(starts[row]) + query
            counted[place] = counted.get(place, 0) + 1
    assert counted == dict.fromkeys(range(int(starts[-1])), 1)
