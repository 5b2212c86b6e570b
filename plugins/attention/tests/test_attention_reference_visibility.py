"""The masks of the reference backend, against the definition one query and one key at a time."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_attention.reference.visibility import BatchFacts, Visibility

POSITIONS = np.arange(4)[None]
ROW = np.zeros(1, dtype=np.int64)


def sees(rules: Visibility, row: int, query: int, key: int) -> bool:
    """What the interface says, word by word."""
    if rules.prompt_lens is not None and rules.window is not None:
        base = key <= query and (key < rules.prompt_lens[row] or query - key < rules.window)
    else:
        distance = query - key if rules.causal else abs(query - key)
        base = (
            (not rules.causal or key <= query)
            and (rules.window is None or distance < rules.window)
            and (rules.chunk is None or query // rules.chunk == key // rules.chunk)
        )
    ranges = () if rules.ranges is None else rules.ranges[row]
    return base or any(begin <= query < end and begin <= key < end for begin, end in ranges)


@st.composite
def visibilities(draw: st.DrawFn) -> Visibility:
    rows = 3
    lengths = st.lists(st.integers(0, 12), min_size=rows, max_size=rows).map(np.array)
    window = draw(st.sampled_from([None, 1, 4, 9]))
    keeps_prompt = window is not None and draw(st.booleans())
    ranges = None
    if draw(st.booleans()):
        cut = st.lists(st.integers(0, 30), max_size=4, unique=True).map(sorted)
        ranges = [list(zip(bounds[::2], bounds[1::2], strict=False)) for bounds in draw(st.tuples(*[cut] * rows))]
    return Visibility(
        causal=keeps_prompt or draw(st.booleans()),
        window=window,
        chunk=None if keeps_prompt else draw(st.sampled_from([None, 1, 5, 16])),
        prompt_lens=draw(lengths) if keeps_prompt else None,
        ranges=ranges,
    )


@given(rules=visibilities(), rows=st.permutations(range(3)), context=st.integers(0, 20), queries=st.integers(1, 9))
def test_the_matrix_is_the_definition(rules: Visibility, rows: list[int], context: int, queries: int) -> None:
    """R5.44, R5.50, R5.52, P5.6, R5.55, R5.56: windows, chunks, ranges, kept prompts over a later part of a row, whose
    queries count from its beginning; and the bounds leave out no key that is seen."""
    seq_len = context + queries
    picked = np.array(rows[:2])
    first, last = np.full(2, context), np.full(2, seq_len - 1)
    positions = np.broadcast_to(np.arange(context, seq_len), (2, queries))
    keys = np.broadcast_to(np.arange(seq_len), (2, seq_len))
    expected = np.array(
        [[[sees(rules, row, q, k) for k in range(seq_len)] for q in range(context, seq_len)] for row in picked.tolist()]
    )
    assert (rules.matrix(picked, positions, keys) == expected).all()
    lows, highs = rules.first_keys(picked, first, last), rules.key_ends(picked, first, last, np.full(2, seq_len))
    for index in range(2):
        seen = np.flatnonzero(expected[index].any(axis=0))
        assert lows[index] <= seen[0]
        assert seen[-1] < highs[index] <= seq_len
    whole = replace(rules, window=None, chunk=None, prompt_lens=None, ranges=None)
    if rules.is_whole(seq_len):
        assert (expected == whole.matrix(picked, positions, keys)).all()


def test_a_window_counts_on_both_sides_once_attention_is_not_causal() -> None:
    """R5.44."""
    causal = Visibility(True).matrix(ROW, POSITIONS, POSITIONS)[0]
    assert causal.tolist() == np.tril(np.ones((4, 4), dtype=bool)).tolist()
    windowed = Visibility(True, 2).matrix(ROW, POSITIONS, POSITIONS)[0]
    assert windowed.sum(1).tolist() == [1, 2, 2, 2]
    both = Visibility(False, 2).matrix(ROW, POSITIONS, POSITIONS)[0]
    assert both.sum(1).tolist() == [2, 3, 3, 2]
    assert bool((both == both.T).all())


def test_rows_are_classed_by_what_they_see() -> None:
    """R5.23: rows without ranges stay plain, whatever their neighbors have."""
    rules = Visibility(True, window=5)
    (only,) = BatchFacts().classes(rules, 3)
    assert (only[0], only[1].tolist()) == (rules, [0, 1, 2])
    ranges = [[(0, 2)], [], [(1, 3)], []]
    facts = BatchFacts(np.array([True, True, False, False]), ranges)
    found = [
        (visibility.causal, visibility.ranges is not None, rows.tolist())
        for visibility, rows in facts.classes(rules, 4)
    ]
    assert found == [(True, False, [1]), (True, True, [0]), (False, False, [3]), (False, True, [2])]


def test_keys_of_another_part_are_not_read() -> None:
    """R5.83: a suffix begins behind the prefix, ranges or not."""
    rules = replace(Visibility(True, ranges=[[(0, 9)]]), key_begin=4)
    assert rules.first_keys(ROW, np.array([6]), np.array([8])).tolist() == [4]
