"""``POST /v1/embeddings`` over HTTP: with OpenAI's own client, and what it tells those who ask for the impossible."""

from __future__ import annotations

import asyncio
import base64
from collections.abc import Callable
from typing import Any

import numpy as np
import openai
import pytest

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError
from hardpoint.interfaces import EndpointContext, ModelLimits, NoOptions, PoolingParams
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.testing import FakeEngineClient
from hardpoint.testing.fake_engine_client import fake_embedding
from hardpoint_serving.embeddings import create

LIMITS = ModelLimits(vocab_size=259, max_model_len=32, max_prompts=8, embedding_size=16)


def embedder(**fields: Any) -> FakeEngineClient:
    return FakeEngineClient(tasks=("embed",), limits=LIMITS, **fields)


def wanted(client: FakeEngineClient, text: str, size: int = 16) -> np.ndarray:
    return fake_embedding(client.tokenizer.encode(text), size)


async def test_openais_client_gets_vectors_in_the_order_of_its_inputs(serve: Callable[..., Any]) -> None:
    """It asks for base64 unless told otherwise, and decodes it itself."""
    served = await serve(embedder())
    texts = ["why?", "when?", "why?"]
    answer = await served.sdk.embeddings.create(model="fake", input=texts)
    assert (answer.object, answer.model) == ("list", "fake")
    assert [(item.object, item.index) for item in answer.data] == [("embedding", index) for index in range(3)]
    for text, item in zip(texts, answer.data, strict=True):
        np.testing.assert_array_equal(np.asarray(item.embedding, dtype=np.float32), wanted(served.client, text))
    count = sum(len(served.client.tokenizer.encode(text)) for text in texts)
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (count, count)


async def test_numbers_and_base64_are_the_same_values(serve: Callable[..., Any]) -> None:
    served = await serve(embedder())
    answer = await served.sdk.embeddings.create(model="fake", input=[5, 6, 7], encoding_format="float", dimensions=4)
    numbers = np.asarray(answer.data[0].embedding, dtype=np.float32)
    np.testing.assert_array_equal(numbers, fake_embedding([5, 6, 7], 4))
    body = {"input": [[5, 6, 7]], "encoding_format": "base64", "dimensions": 4}
    raw = (await served.http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
    np.testing.assert_array_equal(np.frombuffer(base64.b64decode(raw), dtype="<f4"), numbers)


async def test_settings_reach_the_engine(serve: Callable[..., Any]) -> None:
    served = await serve(embedder(), request_timeout_s=7.0)
    body = {"input": "a", "pooling": "mean", "normalize": False, "dimensions": 2, "cache_salt": "s", "user": "u"}
    answer = await served.http.post("/v1/embeddings", json={**body, "add_special_tokens": False})
    assert answer.status_code == 200
    ((prompt, params, options),) = served.client.seen
    assert (prompt.text, prompt.add_special_tokens, prompt.cache_salt) == ("a", False, "s")
    assert params == PoolingParams(pooling="mean", normalize=False, dimensions=2)
    assert options.timeout_s == 7.0, "the operator's ceiling"


@pytest.mark.parametrize(
    ("body", "param", "told"),
    [
        ({}, "input", "missing required field input"),
        ({"input": ""}, "input", "the input is empty"),
        ({"input": []}, "input", "no input was given"),
        ({"input": ["a", 5]}, "input", "input must be a text, a list of texts"),
        ({"input": [5, 999]}, "input", "input holds token id 999"),
        ({"input": ["a"] * 9}, "input", "9 inputs were given; at most 8"),
        ({"input": [5] * 33}, "input", "the input has 33 tokens; the context length is 32"),
        ({"input": "a", "dimensions": 17}, "dimensions", "from 1 to 16"),
        ({"input": "a", "dimensions": 0}, "dimensions", "from 1 to 16"),
        ({"input": "a", "encoding_format": "hex"}, "encoding_format", "Invalid enum value"),
        ({"input": "a", "pooling": "max"}, "pooling", "it must be one of last, cls, mean, token_embed"),
        ({"input": "a", "pooling": "token_embed", "encoding_format": "base64"}, "encoding_format", "use 'float'"),
        ({"input": "a", "logprobs": 1}, "logprobs", "unknown field"),
    ],
)
async def test_bad_requests_are_named_by_their_field(
    make_in_process: Callable[..., Any], body: dict[str, Any], param: str, told: str
) -> None:
    answer = await make_in_process(embedder()).http.post("/v1/embeddings", json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]


async def test_each_token_may_have_its_own(make_in_process: Callable[..., Any]) -> None:
    """As lists of numbers; the fake embeds whole prompts, so the shape is what it gives."""
    body = {"input": "ab", "pooling": "token_embed"}
    assert (await make_in_process(embedder()).http.post("/v1/embeddings", json=body)).status_code == 200


async def test_a_model_without_embeddings_says_so(make_in_process: Callable[..., Any]) -> None:
    answer = await make_in_process().http.post("/v1/embeddings", json={"input": "a"})
    assert (answer.status_code, answer.json()["error"]["code"]) == (400, "unsupported_task")


async def test_an_embedding_model_refuses_to_generate_by_naming_what_it_serves(serve: Callable[..., Any]) -> None:
    served = await serve(embedder())
    with pytest.raises(openai.BadRequestError, match="this model does not generate text; it serves embed"):
        await served.sdk.completions.create(model="fake", prompt="a")


async def test_one_refused_input_ends_the_others(serve: Callable[..., Any]) -> None:
    served = await serve(embedder())
    served.client.hold.clear()
    answer = await served.http.post("/v1/embeddings", json={"input": [[5, 6], [5] * 33, [7]]})
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "input")
    await served.settled()


async def test_a_client_that_leaves_ends_its_inputs(serve: Callable[..., Any]) -> None:
    served = await serve(embedder())
    served.client.hold.clear()
    asked = asyncio.create_task(served.http.post("/v1/embeddings", json={"input": ["a", "b"]}))
    await served.running(2)
    asked.cancel()
    await served.settled()
    assert served.client.num_aborted == 2


def test_it_is_denied_unless_listed_and_left_out_where_nothing_embeds() -> None:
    """R12.48, R12.49, R12.51."""
    refused = {entry.name: entry.reason for entry in build_plan(discover(), PluginSelection(endpoints=())).refused}
    assert refused["embeddings"] == "not listed in server.endpoints"
    assert "embeddings" not in ServerConfig().endpoints
    wishes: dict[tuple[str, ...], bool] = {("embed",): True, ("generate", "embed"): True, ("generate",): False}
    for tasks, admitted in wishes.items():
        plan = build_plan(discover(), PluginSelection(endpoints=("embeddings",), tasks=tasks))
        assert any(planned.name == "embeddings" for planned in plan.of("endpoint")) is admitted


def test_without_a_server_it_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="needs a server's router"):
        create(EndpointContext("embeddings", 1, frozenset({ProcessRole.API})), NoOptions())
