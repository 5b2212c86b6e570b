"""The offline front end over fakes, in one process."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from hardpoint.engine.build import build_engine
from hardpoint.engine.frontend import Frontend
from hardpoint.engine.llm import LLM, PromptLike
from hardpoint.interfaces import FinishReason, Prompt, SamplingParams
from hardpoint.testing import next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=6)
MakeLLM = Callable[..., LLM]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 130, 35))
    return tokens[len(prompt) :]


@pytest.fixture
def make_llm(make_spec: Callable, make_runtime: Callable) -> Iterator[MakeLLM]:
    made: list[LLM] = []

    def make(**options: object) -> LLM:
        spec, runtime = make_spec(**options), make_runtime()
        frontend = Frontend.from_spec(spec, runtime)
        made.append(LLM.from_parts(build_engine(spec, runtime), frontend, max_unfinished=spec.max_unfinished))
        return made[-1]

    yield make
    for llm in made:
        llm.shutdown()


def test_prompts_of_every_form_come_back_in_order(make_llm: MakeLLM) -> None:
    llm = make_llm()
    asked: list[PromptLike] = ["hello", [40, 41], Prompt(text="x", add_special_tokens=False)]
    outputs = llm.generate(asked, GREEDY)
    prompts = [llm.tokenizer.encode("hello"), [40, 41], llm.tokenizer.encode("x", add_special_tokens=False)]
    for output, prompt in zip(outputs, prompts, strict=True):
        assert list(output.prompt_token_ids) == prompt
        assert list(output.outputs[0].token_ids) == expected(prompt, 6)
        assert output.outputs[0].text == llm.tokenizer.decode(output.outputs[0].token_ids)
        assert output.finished
        assert output.outputs[0].finish_reason is FinishReason.LENGTH
    assert outputs[0].prompt == "hello"
