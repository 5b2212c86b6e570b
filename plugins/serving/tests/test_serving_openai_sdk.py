"""The OpenAI SDK, which judges the wire shapes, against a live server."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import openai
import pytest

from hardpoint.testing import FakeEngineClient


async def test_chat(served: Any) -> None:
    answer = await served.sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], user="me", store=False
    )
    assert answer.id.startswith("chatcmpl-")
    assert answer.object == "chat.completion"
    assert answer.model == "fake"
    assert answer.system_fingerprint is not None
    choice = answer.choices[0]
    assert (choice.index, choice.message.role, choice.message.content) == (0, "assistant", "Hello, world")
    assert choice.finish_reason == "stop"
    assert answer.usage is not None
    assert answer.usage.completion_tokens == len("Hello, world")
    assert answer.usage.total_tokens == answer.usage.prompt_tokens + answer.usage.completion_tokens
    assert answer.usage.prompt_tokens_details is not None
    assert answer.usage.prompt_tokens_details.cached_tokens == 1


async def test_chat_stream_has_role_then_text_then_finish_then_usage(served: Any) -> None:
    stream = await served.sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": [{"type": "text", "text": "hi"}]}],
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = [chunk async for chunk in stream]
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert chunks[0].choices[0].delta.role == "assistant"
    assert chunks[0].choices[0].delta.content == ""
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == "Hello, world"
    assert all(chunk.choices[0].finish_reason is None for chunk in chunks[:-2])
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert all(chunk.usage is None for chunk in chunks[:-1])
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 12


async def test_continuous_usage_counts_up(served: Any) -> None:
    stream = await served.sdk.chat.completions.create(
        model="fake",
        messages=[{"role": "user", "content": "hi"}],
        stream=True,
        stream_options={"include_usage": True},
        extra_body={"stream_options": {"include_usage": True, "continuous_usage_stats": True}},
    )
    counts = [chunk.usage.completion_tokens async for chunk in stream if chunk.usage is not None]
    assert counts == sorted(counts)
    assert counts[0] == 1
    assert counts[-1] == 12


async def test_chat_logprobs(served: Any) -> None:
    answer = await served.sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], logprobs=True, top_logprobs=3, max_tokens=2
    )
    choice = answer.choices[0]
    assert choice.finish_reason == "length"
    assert choice.logprobs is not None
    content = choice.logprobs.content
    assert content is not None
    assert [entry.token for entry in content] == ["H", "e"]
    assert content[0].bytes == [ord("H")]
    assert [len(entry.top_logprobs) for entry in content] == [3, 3]


async def test_streamed_logprobs_arrive_with_their_tokens(served: Any) -> None:
    stream = await served.sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], logprobs=True, stream=True
    )
    tokens = []
    async for chunk in stream:
        logprobs = chunk.choices[0].logprobs
        if logprobs is not None:
            assert logprobs.content is not None
            assert chunk.choices[0].delta.content == "".join(entry.token for entry in logprobs.content)
            tokens += [entry.token for entry in logprobs.content]
    assert "".join(tokens) == "Hello, world"


async def test_several_choices_stream_to_their_own_index(served: Any) -> None:
    stream = await served.sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], n=3, stream=True
    )
    texts: dict[int, str] = {}
    finished = []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] = texts.get(choice.index, "") + (choice.delta.content or "")
            if choice.finish_reason:
                finished.append(choice.index)
    assert texts == {0: "Hello, world", 1: "Hello, world", 2: "Hello, world"}
    assert sorted(finished) == [0, 1, 2]


async def test_completion_with_echo_and_offsets(served: Any) -> None:
    answer = await served.sdk.completions.create(model="fake", prompt="ab", echo=True, logprobs=2, max_tokens=3)
    choice = answer.choices[0]
    assert answer.id.startswith("cmpl-")
    assert answer.object == "text_completion"
    assert choice.text == "abHel"
    logprobs = choice.logprobs
    assert logprobs is not None
    # The fake tokenizer puts a begin token without text first.
    assert logprobs.tokens == ["", "a", "b", "H", "e", "l"]
    assert logprobs.text_offset == [0, 0, 1, 2, 3, 4]
    assert logprobs.token_logprobs is not None
    assert logprobs.token_logprobs[0] is None
    assert logprobs.top_logprobs is not None
    assert all(0 < len(top) <= 3 for top in logprobs.top_logprobs[1:])


async def test_completion_stream_equals_whole_answer(served: Any) -> None:
    settings: dict[str, Any] = {"model": "fake", "prompt": ["one", "two"], "n": 2, "echo": True, "logprobs": 1}
    whole = await served.sdk.completions.create(**settings)
    texts = {choice.index: "" for choice in whole.choices}
    offsets: dict[int, list[int]] = {choice.index: [] for choice in whole.choices}
    async for chunk in await served.sdk.completions.create(stream=True, **settings):
        for choice in chunk.choices:
            texts[choice.index] += choice.text
            if choice.logprobs is not None and choice.logprobs.text_offset is not None:
                offsets[choice.index] += choice.logprobs.text_offset
    assert texts == {choice.index: choice.text for choice in whole.choices}
    assert texts[0].startswith("one")
    assert texts[3].startswith("two")
    assert offsets == {choice.index: choice.logprobs and choice.logprobs.text_offset for choice in whole.choices}


@pytest.mark.parametrize("prompt", ["hi", ["hi"], [107, 108], [[107, 108]], ["a", "b"], [[107], [108, 109]]])
async def test_every_form_of_prompt(served: Any, prompt: Any) -> None:
    answer = await served.sdk.completions.create(model="fake", prompt=prompt)
    count = len(prompt) if isinstance(prompt, list) and not isinstance(prompt[0], int) else 1
    assert [choice.index for choice in answer.choices] == list(range(count))


async def test_stop_seed_bias_and_penalties_reach_the_engine(served: Any) -> None:
    answer = await served.sdk.completions.create(
        model="fake",
        prompt="hi",
        stop=[", "],
        seed=7,
        logit_bias={"72": 5},
        presence_penalty=0.5,
        frequency_penalty=-0.5,
        temperature=0.7,
        top_p=0.9,
        extra_body={
            "top_k": 11,
            "min_p": 0.1,
            "repetition_penalty": 1.1,
            "min_tokens": 1,
            "ignore_eos": False,
            "stop_token_ids": [9],
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,
            "priority": -3,
            "cache_salt": "tenant-1",
            "timeout": 9,
            "return_token_ids": True,
        },
    )
    prompt, params, options = served.client.seen[-1]
    assert answer.choices[0].text == "Hello, "
    assert answer.choices[0].model_extra == {
        "stop_reason": ", ",
        "token_ids": [ord(char) + 3 for char in "Hello, "],
        "prompt_token_ids": [1, ord("h") + 3, ord("i") + 3],
    }
    assert (params.seed, params.logit_bias, params.top_k, params.min_p) == (7, {72: 5.0}, 11, 0.1)
    assert (params.presence_penalty, params.frequency_penalty, params.repetition_penalty) == (0.5, -0.5, 1.1)
    assert (params.temperature, params.top_p, params.stop_token_ids) == (0.7, 0.9, (9,))
    assert (params.include_stop_str_in_output, params.skip_special_tokens, params.min_tokens) == (True, False, 1)
    assert prompt.cache_salt == "tenant-1"
    assert (options.priority, options.timeout_s) == (-3, 9)


async def test_models(served: Any) -> None:
    models = await served.sdk.models.list()
    assert [model.id for model in models.data] == ["fake"]
    assert (await served.sdk.models.retrieve("fake")).created == 1_700_000_000
    with pytest.raises(openai.NotFoundError):
        await served.sdk.models.retrieve("other")


async def test_errors_have_the_classes_the_sdk_knows(served: Any) -> None:
    client = served.sdk
    with pytest.raises(openai.NotFoundError, match="not served here"):
        await client.completions.create(model="gpt-x", prompt="hi")
    with pytest.raises(openai.BadRequestError) as caught:
        await client.completions.create(model="fake", prompt="hi", temperature=-1)
    assert caught.value.param == "temperature"
    with pytest.raises(openai.BadRequestError):
        await client.completions.create(model="fake", prompt="hi", temperature=-1, stream=True)


async def test_an_error_in_the_middle_is_raised_by_the_sdk(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient()
    served = await serve(client)
    client.hold.clear()
    stream = await served.sdk.chat.completions.create(
        model="fake", messages=[{"role": "user", "content": "hi"}], stream=True
    )
    texts = [(await anext(stream)).choices[0].delta.content for _ in range(2)]
    assert texts == ["", "H"]
    client.die()
    with pytest.raises(openai.APIError, match="the engine has stopped"):
        await anext(stream)
    with pytest.raises(openai.InternalServerError):
        await served.sdk.completions.create(model="fake", prompt="hi")


async def test_a_request_that_fails_alone_is_told(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient()
    client.fail_after = 2
    served = await serve(client)
    with pytest.raises(openai.InternalServerError, match="not finite"):
        await served.sdk.completions.create(model="fake", prompt="hi")
    with pytest.raises(openai.APIError, match="not finite"):
        async for _ in await served.sdk.completions.create(model="fake", prompt="hi", stream=True):
            pass


async def test_a_full_queue_is_a_rate_limit(serve: Callable[..., Any]) -> None:
    served = await serve(FakeEngineClient(queue_limit=0))
    for streaming in (False, True):
        with pytest.raises(openai.RateLimitError) as caught:
            await served.sdk.completions.create(model="fake", prompt="hi", stream=streaming)
        assert caught.value.response.headers["retry-after"] == "1"
