"""Scores are sums over the choice's tokens, and only over those."""

from __future__ import annotations

from typing import Any

import pytest
from multiple_choice import MultipleChoice, Options

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import IORequest, Logprob, PositionLogprobs, Prompt, RequestOutput
from hardpoint.testing import FakeTokenizer


def output(logprobs: list[float | None]) -> RequestOutput:
    positions = tuple(
        None if value is None else PositionLogprobs(Logprob(token_id=7, logprob=value, text="x", token_bytes=b"x"))
        for value in logprobs
    )
    return RequestOutput("r", None, (), (), finished=True, prompt_logprobs=positions)


def request(choice: str, num_question_tokens: int) -> IORequest:
    return IORequest(Prompt(token_ids=[1]), state={"choice": choice, "num_question_tokens": num_question_tokens})


def answer(per_token: bool) -> dict[str, Any]:
    processor = MultipleChoice(Options(per_token=per_token), FakeTokenizer())
    requests = [request("short", 2), request("rather long", 2)]
    outputs = [output([None, -9.0, -1.0]), output([None, -9.0, -0.6, -0.6, -0.6])]
    result: dict[str, Any] = processor.finish(requests, outputs)
    return result


def test_the_question_does_not_count() -> None:
    assert answer(per_token=False)["logprobs"] == [-1.0, -1.8]


def test_long_choices_can_win_per_token() -> None:
    assert answer(per_token=False)["choice"] == "short"
    result = answer(per_token=True)
    assert result["choice"] == "rather long"
    assert sum(result["probabilities"]) == pytest.approx(1.0)


def test_the_question_is_shared_and_the_choice_follows_it() -> None:
    tokenizer = FakeTokenizer()
    first, second = MultipleChoice(Options(), tokenizer).parse({"question": "Is it?", "choices": ["yes", "no"]})
    assert tokenizer.decode(first.prompt.token_ids or ()) == "Is it? yes"
    assert tokenizer.decode(second.prompt.token_ids or ()) == "Is it? no"


@pytest.mark.parametrize(
    ("task", "told"),
    [
        ({"question": "q"}, "choices"),
        ({"question": "q", "choices": ["one"]}, "choices"),
        ({"question": "q", "choices": ["a", " "]}, "empty"),
        ({"question": "q", "choices": ["a", "b", "c"]}, "at most 2"),
    ],
)
def test_what_is_no_question_is_refused(task: dict[str, Any], told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told):
        MultipleChoice(Options(max_choices=2), FakeTokenizer()).parse(task)
