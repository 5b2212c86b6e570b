"""Incremental text and stop strings: R6.60 - R6.71, I6.6."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.detokenizer import Detokenizer
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.tokenizer import DecodeStream, Tokenizer
from hardpoint.testing import FakeTokenizer

TOKENIZER = FakeTokenizer()
ALPHABET = "abc é😀"
TEXTS = st.text(ALPHABET, max_size=24)
STOPS = st.lists(st.text(ALPHABET, min_size=1, max_size=4), max_size=3)


class WordTokenizer(FakeTokenizer):
    """One id per word of a fixed list, so that pieces have several characters."""

    words = ("ab", "c", "abc", "ca", "", "bcab", "é", "a")

    def decode_stream(self, prompt_ids: object, *, skip_special_tokens: bool = True) -> DecodeStream:
        return _WordStream()


class _WordStream:
    def step(self, token_id: int) -> str | None:
        return WordTokenizer.words[token_id] or None


def ids_of(text: str) -> list[int]:
    return TOKENIZER.encode(text, add_special_tokens=False)


def chunks(ids: list[int], cuts: list[int]) -> list[list[int]]:
    edges = [0, *sorted({cut % (len(ids) + 1) for cut in cuts}), len(ids)]
    return [ids[start:end] for start, end in itertools.pairwise(edges) if end > start]


def detokenizer_of(
    tokenizer: Tokenizer, stops: Sequence[str] = (), include: bool = False, min_tokens: int = 0
) -> Detokenizer:
    params = SamplingParams(stop=tuple(stops), include_stop_str_in_output=include, min_tokens=min_tokens)
    return Detokenizer(tokenizer, (), params)


def stream(detokenizer: Detokenizer, parts: list[list[int]]) -> tuple[list[str], int]:
    """Feed ``parts``; the deltas shown, the last one being final, and the number of tokens used."""
    shown = []
    used = 0
    for part in parts:
        used += detokenizer.update(part)
        if detokenizer.stopped_by is not None:
            break
        shown.append(detokenizer.take(finished=False))
    shown.append(detokenizer.take(finished=True))
    return shown, used


def oracle(ids: list[int], words: tuple[str, ...], stops: list[str], include: bool) -> tuple[str, str | None, int]:
    """Whole text after each token, searched from the start: what the fast way must equal."""
    text = ""
    for used, token_id in enumerate(ids, 1):
        text += words[token_id]
        ends = [(text.find(stop) + len(stop), rank, stop) for rank, stop in enumerate(stops) if stop in text]
        if ends:
            end, _, stop = min(ends)
            return text[: end if include else end - len(stop)], stop, used
    return text, None, len(ids)


@settings(max_examples=300, deadline=None)
@given(st.lists(st.integers(0, 7), max_size=20), STOPS, st.booleans(), st.lists(st.integers(0, 30), max_size=6))
def test_any_split_gives_the_text_stop_and_cut_of_a_full_search(
    ids: list[int], stops: list[str], include: bool, cuts: list[int]
) -> None:
    """I6.6, R6.65, R6.66: and what is shown never holds an excluded stop string."""
    detokenizer = detokenizer_of(WordTokenizer(), stops, include)
    shown, used = stream(detokenizer, chunks(ids, cuts))
    text, stop, num_tokens = oracle(ids, WordTokenizer.words, stops, include)
    assert ("".join(shown), detokenizer.stopped_by, used) == (text, stop, num_tokens)
    if not include:
        assert not any(one in "".join(shown) for one in stops)


@settings(max_examples=200, deadline=None)
@given(TEXTS, STOPS, st.booleans(), st.lists(st.integers(0, 60), max_size=8))
def test_shown_text_only_grows_and_ends_as_the_whole(
    text: str, stops: list[str], include: bool, cuts: list[int]
) -> None:
    parts = chunks(ids_of(text), cuts)
    shown, _ = stream(detokenizer_of(TOKENIZER, stops, include), parts)
    whole = detokenizer_of(TOKENIZER, stops, include)
    views = []
    for part in parts:
        whole.update(part)
        if whole.stopped_by is not None:
            break
        views.append(whole.text(finished=False))
    views.append(whole.text(finished=True))
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(views))
    assert views[-1] == "".join(shown)
    assert text.startswith(views[-1])


def test_without_stops_everything_is_shown_at_once() -> None:
    detokenizer = detokenizer_of(TOKENIZER)
    assert [detokenizer.take(False) for i in ids_of("abc") if detokenizer.update([i])] == ["a", "b", "c"]


def test_the_buffer_is_one_short_of_the_longest_stop() -> None:
    """R6.63: a shorter one leaks, a longer one delays."""
    detokenizer = detokenizer_of(TOKENIZER, ["xyz"])
    detokenizer.update(ids_of("abcd"))
    assert detokenizer.take(False) == "ab"


def test_half_a_character_shows_nothing() -> None:
    """R6.70."""
    detokenizer = detokenizer_of(TOKENIZER)
    *first, last = ids_of("😀")
    assert detokenizer.update(first) == 3
    assert detokenizer.take(False) == ""
    detokenizer.update([last])
    assert detokenizer.take(False) == "😀"


def test_the_ending_token_is_recorded_but_not_shown() -> None:
    """R6.64; with stops included its text is part of the answer."""
    for include, text in ((False, "ab"), (True, "abc")):
        detokenizer = detokenizer_of(TOKENIZER, include=include)
        assert detokenizer.update(ids_of("abc"), stop_terminated=True) == 3
        assert detokenizer.take(True) == text
        assert detokenizer.num_tokens == 3


def test_no_stop_fires_before_the_minimum() -> None:
    """R6.68, P6.11."""
    detokenizer = detokenizer_of(TOKENIZER, ["a"], min_tokens=3)
    assert detokenizer.update(ids_of("aaaa")) == 4
    assert detokenizer.stopped_by == "a"
    assert detokenizer.take(True) == "aaa"


def test_the_earliest_completed_stop_wins_whatever_the_list_order() -> None:
    """R6.66."""
    detokenizer = detokenizer_of(WordTokenizer(), ["cab", "bc"])
    detokenizer.update([5])
    assert detokenizer.stopped_by == "bc"


def test_the_cost_of_a_token_does_not_grow_with_the_text() -> None:
    """R6.62, P6.10: what is kept to be searched stays as short as the stop strings ask."""
    detokenizer = detokenizer_of(TOKENIZER, ["stop!"])
    for _ in range(2000):
        detokenizer.update(ids_of("sto "))
        detokenizer.take(False)
    assert len(detokenizer._window) == 4
    assert detokenizer._final == []


class _BrokenTokenizer(FakeTokenizer):
    def decode_stream(self, prompt_ids: object, *, skip_special_tokens: bool = True) -> DecodeStream:
        return _BrokenStream()


class _BrokenStream:
    def step(self, token_id: int) -> str | None:
        raise ValueError("broken")


def test_a_broken_stream_is_not_hidden() -> None:
    """What tokens cannot do to a stream is the tokenizer's affair (R6.71, P6.12); anything else propagates."""
    with pytest.raises(ValueError, match="broken"):
        detokenizer_of(_BrokenTokenizer()).update([65])
