"""Excluded sequences: the same answer as comparing every one, at a price that does not grow with their number."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.sampling.slot_params import SlotSampling

token = st.integers(0, 3)


def gather(make_row: Any, words: Any, output: list[int], vocab: int = 8) -> Any:
    """A call that yields the metadata of one row whose answer so far is ``output``."""
    state = SlotState(1, 64, [16])
    sampling = SlotSampling(1, vocab, torch.device("cpu"))
    row = make_row(0, [1, *output], [1], num_prompt_tokens=1, bad_words_token_ids=tuple(words))
    state.enter(row)
    sampling.enter(row)
    slots = np.zeros(1, dtype=np.int32)
    return lambda: sampling.gather(slots, state)


@settings(max_examples=200, deadline=None)
@given(
    words=st.lists(st.lists(token, min_size=1, max_size=4).map(tuple), min_size=1, max_size=8),
    output=st.lists(token, max_size=6),
)
def test_exactly_the_tokens_that_complete_a_word_are_excluded(
    hand_builders: Any, words: list[tuple[int, ...]], output: list[int]
) -> None:
    metadata = gather(hand_builders[1], words, output)()
    found = set() if metadata.bad_words is None else set(metadata.bad_words.token_ids.tolist())
    assert found == {w[-1] for w in words if len(w) == 1 or tuple(output[-(len(w) - 1) :]) == w[:-1]}


def test_many_excluded_words_do_not_slow_every_step_down(make_row: Any) -> None:
    """One request may bring as many as the vocabulary has tokens, and every other row waits for it."""
    vocab = 50_000
    words = [(i,) for i in range(vocab // 2)] + [(i, i + 1) for i in range(vocab // 4)]
    call = gather(make_row, words, [5, 6], vocab)
    seconds = []
    for _ in range(10):
        started = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - started)
    assert min(seconds) < 0.003
