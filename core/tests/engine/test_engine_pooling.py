"""Embeddings through both front ends over fake parts: what is checked, what comes back, and what is left behind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from hardpoint.engine.async_llm import AsyncLLM
from hardpoint.engine.build import build_engine
from hardpoint.engine.frontend import Frontend
from hardpoint.engine.input_processor import InputProcessor
from hardpoint.engine.llm import LLM
from hardpoint.engine.output_processor import OutputProcessor, StatEvent
from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import (
    POOLING_METHODS,
    EngineOutput,
    EngineOutputs,
    FinishReason,
    ModelLimits,
    PoolingParams,
    Prompt,
    RequestFinished,
    RequestOptions,
    SamplingParams,
    SchedulerStats,
    StepObserved,
)
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeChatRenderer, FakeTokenizer, next_token
from hardpoint.testing.fake_worker import fake_pooled

PROMPTS = [[5, 6, 7], list(range(3, 80)), [9]]
VOCAB = 130
Make = Callable[..., Any]


@pytest.fixture
def llm(make_spec: Make, make_runtime: Make) -> Iterator[LLM]:
    spec, runtime = make_spec(limits={"max_num_batched_tokens": 16}), make_runtime()
    with LLM.from_parts(build_engine(spec, runtime), Frontend.from_spec(spec, runtime)) as made:
        yield made


def pooled(llm: LLM, ids: list[int]) -> np.ndarray:
    worker: Any = llm.core.executor.worker  # type: ignore[attr-defined]
    return fake_pooled(ids, worker.vocab_size, worker.first_token)


def test_each_prompt_gets_the_result_of_all_its_tokens(llm: LLM) -> None:
    """Prompts longer than a step are computed in several, and one result comes, at the end."""
    outputs = llm.embed(PROMPTS)
    assert [output.num_prompt_tokens for output in outputs] == [3, 77, 1]
    assert len({output.request_id for output in outputs}) == 3
    for ids, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt_token_ids == tuple(ids)
        assert output.embedding.dtype == np.float32
        np.testing.assert_array_equal(output.embedding, pooled(llm, ids))
    assert llm.core.num_live == 0
    llm.core.scheduler.check_integrity()


def test_one_text_is_one_prompt(llm: LLM) -> None:
    (output,) = llm.embed("hello")
    assert output.prompt_token_ids == tuple(llm.tokenizer.encode("hello"))


def test_embedding_and_generating_share_steps(llm: LLM) -> None:
    inputs, core = llm._frontend.inputs, llm.core
    requests = [
        inputs.process(Prompt(token_ids=ids), params).requests[0]
        for ids in PROMPTS
        for params in (PoolingParams(), SamplingParams(max_tokens=4, temperature=0.0))
    ]
    for request in requests:
        core.add(request)
    ends: dict[str, Any] = {}
    tokens: dict[str, list[int]] = {}
    while core.num_live:
        for frame in core.step().values():
            for output in frame.outputs:
                tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
                if output.finish_reason is not None:
                    ends[output.request_id] = output
    worker: Any = core.executor.worker  # type: ignore[attr-defined]
    for request in requests:
        ids = request.prompt_token_ids.tolist()
        if request.task == "embed":
            assert ends[request.request_id].finish_reason is FinishReason.STOP
            assert tokens[request.request_id] == []
            np.testing.assert_array_equal(ends[request.request_id].pooled, pooled(llm, ids))
        else:
            for token in tokens[request.request_id]:
                assert token == next_token(ids, worker.vocab_size, worker.first_token)
                ids.append(token)
            assert ends[request.request_id].pooled is None


def test_a_prompt_may_fill_the_context(llm: LLM) -> None:
    """No room is left for an answer, and none is needed; a request to generate is still refused."""
    longest = [3] * llm.limits.max_model_len
    (output,) = llm.embed([longest])
    np.testing.assert_array_equal(output.embedding, pooled(llm, longest))
    with pytest.raises(InvalidRequestError, match="129 tokens; the context length is 128 tokens$") as caught:
        llm.embed([[*longest, 3]])
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    with pytest.raises(InvalidRequestError, match="one of which must be left"):
        llm.generate([longest])


def frontend(tasks: tuple[str, ...] = ("embed",), **limits: Any) -> Frontend:
    bounds = ModelLimits(**{"vocab_size": 300, "max_model_len": 32, "embedding_size": 8, **limits})
    return Frontend(FakeTokenizer(), bounds, FakeChatRenderer(), tasks=tasks)


@pytest.mark.parametrize(
    ("field", "value", "told"),
    [
        ("pooling", "max", f"'max'; it must be one of {', '.join(POOLING_METHODS)}"),
        ("pooling", 3, "pooling is 3: Expected"),
        ("dimensions", 0, "dimensions is 0; embeddings of this model can have from 1 to 8"),
        ("dimensions", 9, "dimensions is 9; embeddings of this model can have from 1 to 8"),
        ("dimensions", 2.5, "dimensions is 2.5: Expected"),
        ("normalize", "yes", "normalize is a str: Expected"),
    ],
)
def test_bad_settings_are_refused_by_name(field: str, value: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        frontend().inputs.process(Prompt(text="a"), PoolingParams(**{field: value}))
    assert (caught.value.param, caught.value.status) == (field, 400)


def test_good_settings_reach_the_request() -> None:
    wanted = PoolingParams(pooling="mean", normalize=False, dimensions=8)
    (request,) = frontend().inputs.process(Prompt(text="a"), wanted).requests
    assert (request.task, request.pooling) == ("embed", wanted)


def test_without_a_known_size_dimensions_need_only_be_positive() -> None:
    inputs = frontend(embedding_size=None).inputs
    inputs.process(Prompt(text="a"), PoolingParams(dimensions=4096))
    for wrong in (0, 2**31, 2**70):
        with pytest.raises(InvalidRequestError, match="from 1 to 2147483647"):
            inputs.process(Prompt(text="a"), PoolingParams(dimensions=wrong))


def test_a_prompt_longer_than_the_one_step_it_needs_is_refused() -> None:
    inputs = frontend(max_step_tokens=16).inputs
    inputs.process(Prompt(token_ids=[3] * 16), PoolingParams())
    with pytest.raises(InvalidRequestError, match="17 tokens.*one step; --max-num-batched-tokens allows 16") as caught:
        inputs.process(Prompt(token_ids=[3] * 17), PoolingParams())
    assert caught.value.code == "context_length_exceeded"


@pytest.mark.parametrize(
    ("tasks", "params", "told"),
    [
        (("embed",), SamplingParams(), "this model does not generate text; it serves embed"),
        (("generate",), PoolingParams(), "this model does not embed; it serves generate"),
    ],
)
def test_a_model_refuses_a_task_that_is_not_its_own(tasks: tuple[str, ...], params: Any, told: str) -> None:
    with pytest.raises(InvalidRequestError, match=told) as caught:
        frontend(tasks).inputs.process(Prompt(text="a"), params)
    assert caught.value.code == "unsupported_task"


async def test_an_engine_process_embeds_and_forgets_what_is_canceled(make_spec: Make, make_runtime: Make) -> None:
    llm = await AsyncLLM.start(make_spec(), make_runtime(ProcessRole.API))
    async with llm:
        first, second = await asyncio.gather(*(llm.embed(Prompt(token_ids=ids)) for ids in PROMPTS[:2]))
        assert (first.num_prompt_tokens, second.num_prompt_tokens) == (3, 77)
        assert first.embedding[1] == 3
        assert second.embedding[1] == 77
        with pytest.raises(InvalidRequestError, match="pooling is 'max'"):
            await llm.embed(Prompt(text="a"), PoolingParams(pooling="max"))
        waiting = asyncio.create_task(llm.embed(Prompt(token_ids=PROMPTS[1])))
        await asyncio.sleep(0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting
        assert llm.num_unfinished == 0
        # Answered behind the abort, so whatever was held is free again.
        stats = await llm.refresh_stats()
        assert (stats.num_running, stats.num_free_blocks) == (0, stats.num_total_blocks)


async def test_a_request_that_ends_without_a_result_is_an_error(make_spec: Make, make_runtime: Make) -> None:
    """Its time is over before it began."""
    llm = await AsyncLLM.start(make_spec(), make_runtime(ProcessRole.API))
    async with llm:
        with pytest.raises(InvalidRequestError, match="time limit|deadline") as caught:
            await llm.embed(Prompt(token_ids=[3] * 100), options=RequestOptions(timeout_s=1e-9))
        assert (caught.value.code, caught.value.status) == ("request_failed", 500)


def test_the_figures_of_an_embedding_are_those_of_its_prompt() -> None:
    """Prompt tokens count when the result is there, which is also the first that anybody sees; no token is made."""
    events: list[StatEvent] = []
    now = iter([10.0, 12.0, 12.0])
    outputs = OutputProcessor(FakeTokenizer(), "m", observe=events.append, clock=lambda: next(now))
    inputs = InputProcessor(FakeTokenizer(), ModelLimits(300, 32), tasks=("embed",), clock=lambda: next(now))
    state = outputs.add(inputs.process(Prompt(token_ids=[5, 6, 7]), PoolingParams()))
    end = EngineOutput(state.processed.request_id, [], FinishReason.STOP, pooled=np.ones(2, dtype=np.float32))
    assert outputs.process(EngineOutputs([end], SchedulerStats())) == []
    finished, step = events
    assert isinstance(finished, RequestFinished)
    assert (finished.num_prompt_tokens, finished.num_generated_tokens, finished.ttft_s) == (3, 0, 2.0)
    assert isinstance(step, StepObserved)
    assert (step.num_prompt_tokens, step.num_generated_tokens, step.num_requests) == (3, 0, 0)
