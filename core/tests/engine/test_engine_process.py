"""The engine in its own process, over the distribution of fakes: start, streams, every way to end."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.interfaces import FinishReason, OutputKind, Prompt, RequestOptions, RequestOutput, SamplingParams
from hardpoint.roles import ProcessRole
from hardpoint.testing import next_token

GREEDY = SamplingParams(temperature=0.0, max_tokens=8, output_kind=OutputKind.DELTA)
LONG = SamplingParams(temperature=0.0, max_tokens=100, output_kind=OutputKind.DELTA)
SLOW = {"step_delay_s": 0.02}
PROMPT = Prompt(token_ids=[40, 41, 42])
Start = Callable[..., Any]


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 130, 35))
    return tokens[len(prompt) :]


@pytest.fixture
def start(make_spec: Callable[..., Any], make_runtime: Callable[..., Any]) -> Start:
    @asynccontextmanager
    async def start(*args: Any, **options: Any) -> AsyncIterator[AsyncLLM]:
        llm = await AsyncLLM.start(make_spec(*args, **options), make_runtime(ProcessRole.API))
        try:
            yield llm
        finally:
            await llm.shutdown(drain=False)

    return start


async def collect(llm: AsyncLLM, prompt: Prompt, params: SamplingParams, **options: Any) -> list[RequestOutput]:
    return [output async for output in llm.generate(prompt, params, RequestOptions(**options))]


def ids_of(outputs: list[RequestOutput], index: int = 0) -> list[int]:
    return [i for output in outputs for one in output.outputs if one.index == index for i in one.token_ids]


async def until(condition: Callable[[], bool], timeout_s: float = 5.0) -> None:
    async with asyncio.timeout(timeout_s):
        while not condition():  # noqa: ASYNC110 - what is waited for happens in another process
            await asyncio.sleep(0.005)


async def test_streams_carry_the_tokens_each_prompt_has_alone(start: Start) -> None:
    prompts = [[40 + i, 41, 42] for i in range(12)]
    async with start() as llm:
        assert llm.is_ready
        assert llm.tasks == ("generate",)
        runs = await asyncio.gather(*(collect(llm, Prompt(token_ids=prompt), GREEDY) for prompt in prompts))
        for prompt, outputs in zip(prompts, runs, strict=True):
            assert ids_of(outputs) == expected(prompt, 8)
            text = "".join(one.text for output in outputs for one in output.outputs)
            assert text == llm.tokenizer.decode(ids_of(outputs))
            assert [output.finished for output in outputs].count(True) == 1
            assert outputs[-1].outputs[0].finish_reason is FinishReason.LENGTH
        stats = await llm.refresh_stats()
        assert stats.num_free_blocks == stats.num_total_blocks
