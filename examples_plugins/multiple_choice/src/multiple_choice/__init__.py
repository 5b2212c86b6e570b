"""An IO processor for multiple choice: the model reads each answer once, and the likeliest wins.

A task is ``{"question": "...", "choices": ["...", "..."]}``. Nothing is generated: every choice becomes a prompt, and
the log-probabilities that the model gives to the choice's own tokens are added up.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import (
    IOProcessor,
    IOProcessorContext,
    IORequest,
    Prompt,
    RequestOutput,
    SamplingParams,
    Tokenizer,
    plugin,
)


class Options(BaseModel):
    """Options under ``plugins.io_processor.multiple_choice``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    per_token: bool = Field(default=True, description="divide by the number of tokens, so that short ones do not win")
    max_choices: int = Field(default=16, ge=2, le=256, description="most choices of one question")


class Task(BaseModel):
    """What a client sends."""

    model_config = ConfigDict(extra="forbid", strict=True)

    question: str = Field(min_length=1, max_length=20_000)
    choices: list[str] = Field(min_length=2, max_length=256)


class MultipleChoice(IOProcessor):
    def __init__(self, options: Options, tokenizer: Tokenizer) -> None:
        self._options = options
        self._tokenizer = tokenizer

    def parse(self, data: Any) -> Sequence[IORequest]:
        task = self._read(data)
        question = self._tokenizer.encode(task.question, parse_special=False)
        return [self._request(question, choice) for choice in task.choices]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        scores = [self._score(request, output) for request, output in zip(requests, outputs, strict=True)]
        total = math.fsum(math.exp(score) for score in scores)
        best = max(range(len(scores)), key=scores.__getitem__)
        return {
            "index": best,
            "choice": requests[best].state["choice"],
            "probabilities": [round(math.exp(score) / total, 6) if total else 0.0 for score in scores],
            "logprobs": [round(score, 6) for score in scores],
        }

    def _read(self, data: Any) -> Task:
        try:
            task = Task.model_validate(data)
        except ValidationError as error:
            fault = error.errors(include_url=False)[0]
            field = ".".join(map(str, fault["loc"])) or "data"
            raise InvalidRequestError(f"{field}: {fault['msg']}", param=field) from None
        if len(task.choices) > self._options.max_choices:
            allowed = f"{len(task.choices)} choices were given; at most {self._options.max_choices}"
            raise InvalidRequestError(allowed, param="choices")
        if not all(choice.strip() for choice in task.choices):
            raise InvalidRequestError("a choice is empty", param="choices")
        return task

    def _request(self, question: list[int], choice: str) -> IORequest:
        answer = self._tokenizer.encode(" " + choice.strip(), add_special_tokens=False, parse_special=False)
        return IORequest(
            prompt=Prompt(token_ids=[*question, *answer]),
            params=SamplingParams(max_tokens=1, temperature=0.0, prompt_logprobs=0, detokenize=False),
            state={"choice": choice, "num_question_tokens": len(question)},
        )

    def _score(self, request: IORequest, output: RequestOutput) -> float:
        """Sum, or mean, of the log-probabilities of the choice's tokens."""
        positions = (output.prompt_logprobs or ())[request.state["num_question_tokens"] :]
        logprobs = [position.chosen.logprob for position in positions if position is not None]
        if not logprobs:
            message = "this engine gives no log-probabilities of prompts"
            raise InvalidRequestError(message, code="unsupported", status=501)
        total = math.fsum(logprobs)
        return total / len(logprobs) if self._options.per_token else total


@plugin("io_processor", options=Options)
def create(ctx: IOProcessorContext, options: Options) -> IOProcessor:
    return MultipleChoice(options, ctx.tokenizer)
