"""The kit for IO processors accepts a small correct one and rejects each mutant."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import IOProcessor, IOProcessorContext, IORequest, Prompt, RequestOutput, SamplingParams
from hardpoint.testing.io_processor_suite import IOProcessorSuite
from hardpoint.testing.suite_runner import run_suite

TASKS = ({"question": "why?", "choices": ["a", "b"]}, {"question": "when?", "choices": ["now", "then", "never"]})


class Choose(IOProcessor):
    """One prompt per choice; the choice with the longest answer wins, the first of equals."""

    def __init__(self, ctx: IOProcessorContext) -> None:
        self.ctx = ctx

    def parse(self, data: Any) -> Sequence[IORequest]:
        if not isinstance(data, dict) or set(data) != {"question", "choices"}:
            raise InvalidRequestError("data must hold 'question' and 'choices'", param="data")
        question, choices = data["question"], data["choices"]
        if not isinstance(question, str) or not question.isprintable() or len(question) > 200:
            raise InvalidRequestError("'question' must be a short text", param="data.question")
        if not isinstance(choices, list) or not all(isinstance(choice, str) for choice in choices) or not choices:
            raise InvalidRequestError("'choices' must be a list of texts", param="data.choices")
        return self.requests(question, choices)

    def requests(self, question: str, choices: list[str]) -> list[IORequest]:
        params = SamplingParams(max_tokens=8, temperature=0.0)
        prompts = [self.ctx.render_chat([{"role": "user", "content": f"{question} {choice}"}]) for choice in choices]
        return [IORequest(prompt, params, choice) for prompt, choice in zip(prompts, choices, strict=True)]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        lengths = {
            request.state: len(output.outputs[0].text) for request, output in zip(requests, outputs, strict=True)
        }
        return {"choice": max(lengths, key=lambda choice: lengths[choice]), "lengths": lengths}


def make_suite(kind: type[Choose], **fields: Any) -> type[IOProcessorSuite]:
    class Suite(IOProcessorSuite):
        tasks: ClassVar[tuple[Any, ...]] = TASKS

        def create_processor(self, ctx: IOProcessorContext) -> IOProcessor:
            return kind(ctx)

    return type("Suite", (Suite,), fields)


class TestChoose(make_suite(Choose)):  # type: ignore[misc]
    pass


class AnswersNan(Choose):
    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return {**super().finish(requests, outputs), "score": math.nan}


class AnswersObjects(Choose):
    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return outputs[0]


class AsksTooMuch(Choose):
    def requests(self, question: str, choices: list[str]) -> list[IORequest]:
        return [IORequest(request.prompt, SamplingParams(n=0)) for request in super().requests(question, choices)]


class ParsesToPrompts(Choose):
    def parse(self, data: Any) -> Any:
        return [request.prompt for request in super().parse(data)]


class ParsesToNothing(Choose):
    def requests(self, question: str, choices: list[str]) -> list[IORequest]:
        return []


class EmptyPrompts(Choose):
    def requests(self, question: str, choices: list[str]) -> list[IORequest]:
        return [IORequest(Prompt(), state=choice) for choice in choices]


class EmptiesData(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        requests = super().parse(data)
        data["choices"].clear()
        return requests


class KeepsTheLast(Choose):
    """What it needs of the task is the instance's."""

    def parse(self, data: Any) -> Sequence[IORequest]:
        requests = super().parse(data)
        self.question = data["question"]
        return requests

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return {**super().finish(requests, outputs), "question": getattr(self, "question", None)}


class SameForAll(Choose):
    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return "done"


class TrustsTheModel(Choose):
    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return {
            **super().finish(requests, outputs),
            "score": float(outputs[0].outputs[0].text == "Hello, w") / len(outputs[0].outputs[0].text.strip()),
        }


class TrustsTheClient(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        return self.requests(data["question"], data["choices"])


class BlamesTheServer(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        try:
            return super().parse(data)
        except InvalidRequestError as error:
            raise InvalidRequestError(str(error), status=500) from None


class ShowsTheInside(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        try:
            return super().parse(data)
        except InvalidRequestError as error:
            raise InvalidRequestError(f"{__file__}: {error}") from None


class RepeatsWhatWasSent(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        try:
            return super().parse(data)
        except InvalidRequestError:
            raise InvalidRequestError(f"not a task: {data}") from None


class TakesAnything(Choose):
    def parse(self, data: Any) -> Sequence[IORequest]:
        try:
            return super().parse(data)
        except InvalidRequestError:
            return self.requests("?", ["a"])


class FailsLater(Choose):
    """Takes unknown fields at first."""

    def parse(self, data: Any) -> Sequence[IORequest]:
        if isinstance(data, dict) and "no-such-field" in data:
            return [IORequest(Prompt(text="x"), state=data)]
        return super().parse(data)


MUTANTS: dict[type[Choose], str] = {
    AnswersNan: "test_valid_tasks_are_answered_in_json",
    AnswersObjects: "test_valid_tasks_are_answered_in_json",
    AsksTooMuch: "test_valid_tasks_are_answered_in_json",
    ParsesToPrompts: "test_requests_are_records",
    ParsesToNothing: "test_requests_are_records",
    EmptyPrompts: "test_requests_are_records",
    EmptiesData: "test_data_is_not_changed",
    KeepsTheLast: "test_tasks_under_way_at_the_same_time_do_not_meet",
    SameForAll: "test_tasks_under_way_at_the_same_time_do_not_meet",
    TrustsTheModel: "test_every_answer_of_the_model_is_taken",
    TrustsTheClient: "test_odd_data_is_refused_or_taken",
    BlamesTheServer: "test_odd_data_is_refused_or_taken",
    ShowsTheInside: "test_odd_data_is_refused_or_taken",
    RepeatsWhatWasSent: "test_odd_data_is_refused_or_taken",
    TakesAnything: "test_something_is_refused",
    FailsLater: "test_odd_data_that_is_taken_can_be_answered",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[Choose]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed


def test_a_processor_with_a_shared_counter_fails() -> None:
    """What differs between two instances would differ after a restart."""
    made: list[object] = []

    class Numbered(Choose):
        def __init__(self, ctx: IOProcessorContext) -> None:
            super().__init__(ctx)
            made.append(self)
            self.number = len(made)

        def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
            return {**super().finish(requests, outputs), "by": self.number}

    rule = "test_a_second_instance_knows_nothing_of_the_first"
    assert rule in run_suite(make_suite(Numbered), only=rule).failed


def test_a_suite_without_tasks_fails() -> None:
    assert "set 'tasks'" in run_suite(make_suite(Choose, tasks=()), only="held").failed["test_it_is_held_against_tasks"]
