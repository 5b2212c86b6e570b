"""What ``hardpoint generate`` tells of prompts that failed, in every form of output."""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from hardpoint import LLM
from hardpoint.interfaces import CompletionOutput, FinishReason, Prompt, RequestOutput, SamplingParams
from hardpoint_terminal.generate import GenerateCommand


class Failing:
    """An engine of which every prompt ends with an error."""

    def __enter__(self) -> Failing:
        return self

    def __exit__(self, *exception: object) -> None: ...

    def generate(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
        sequence = CompletionOutput(0, "", (), finish_reason=FinishReason.ERROR)
        return [RequestOutput("r", None, (5,), (sequence,), finished=True, error="not finite") for _ in prompts]

    def stream(self, prompts: Sequence[Prompt], params: SamplingParams) -> Iterator[tuple[int, RequestOutput]]:
        return iter(enumerate(self.generate(prompts, params)))


@pytest.mark.parametrize("form", [[], ["--json"], ["--stream"]], ids=["text", "json", "stream"])
def test_a_failed_prompt_is_named_and_counts(
    form: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def failing(_config: Any) -> Failing:
        return Failing()

    monkeypatch.setattr(LLM, "from_config", failing)
    parser, command = argparse.ArgumentParser(), GenerateCommand()
    command.add_arguments(parser)
    assert command.run(parser.parse_args(["m", "--prompt", "Hello", *form])) == 1
    assert "prompt 'Hello' failed: not finite" in capsys.readouterr().err
