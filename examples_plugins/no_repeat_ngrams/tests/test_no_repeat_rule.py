"""What is forbidden, and that a real sampler obeys."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from no_repeat_ngrams import Answer, NoRepeatNgrams, Options

from hardpoint.interfaces import NewRow, SamplingParams


def row(slot: int, tokens: list[int], num_prompt_tokens: int) -> NewRow:
    return NewRow(
        request_id=f"r{slot}",
        slot=slot,
        generation=1,
        token_ids=np.asarray(tokens, dtype=np.int32),
        num_prompt_tokens=num_prompt_tokens,
        block_ids=(),
        sampling=SamplingParams(),
    )


def slots(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


@given(st.lists(st.integers(0, 3), max_size=40), st.integers(1, 5))
def test_forbidden_is_what_would_repeat(tokens: list[int], size: int) -> None:
    """Against the definition: a token is forbidden if it completes a sequence that occurs already."""
    answer = Answer(size)
    for token in tokens:
        answer.append(token)
    seen = {tuple(tokens[i : i + size]) for i in range(len(tokens) - size + 1)}
    start = tokens[len(tokens) - size + 1 :] if size > 1 else []
    enough = len(tokens) >= size - 1
    expected = {token for token in range(4) if enough and (*start, token) in seen}
    assert set(answer.forbidden) == expected


def test_the_prompt_does_not_count() -> None:
    processor = NoRepeatNgrams(Options(size=2))
    processor.add(row(0, [1, 2, 1], num_prompt_tokens=3))
    assert torch.isfinite(processor.apply(torch.zeros(1, 4), slots(0))).all()


def test_a_resumed_answer_is_known_again() -> None:
    processor = NoRepeatNgrams(Options(size=2))
    processor.add(row(0, [9, 1, 2, 1], num_prompt_tokens=1))
    logits = processor.apply(torch.zeros(1, 4), slots(0))
    assert logits[0].tolist() == [0.0, 0.0, -torch.inf, 0.0]


def test_rows_do_not_disturb_each_other() -> None:
    processor = NoRepeatNgrams(Options(size=1))
    for slot in (0, 3):
        processor.add(row(slot, [5], num_prompt_tokens=1))
    processor.observe(slots(3), slots(2))
    logits = processor.apply(torch.zeros(2, 4), slots(3, 0))
    assert torch.isinf(logits).nonzero().tolist() == [[0, 2]]
    processor.remove(3)
    processor.add(row(3, [5], num_prompt_tokens=1))
    assert torch.isfinite(processor.apply(torch.zeros(1, 4), slots(3))).all()


@pytest.mark.parametrize("size", [0, 65])
def test_sizes_have_bounds(size: int) -> None:
    with pytest.raises(ValueError, match="size"):
        Options(size=size)
