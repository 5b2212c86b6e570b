"""``/score``, ``/rerank``, ``/classify`` and ``/pooling`` over HTTP, and what they refuse."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import numpy as np
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
from hardpoint_serving.classification import create_classify, create_pooling
from hardpoint_serving.scoring import ScoreOptions, create

TEMPLATE = ScoreOptions(pair_template="{instruction}?{query}:{document}", instruction="fits")


def fake(*tasks: str, size: int = 16, **fields: Any) -> FakeEngineClient:
    limits = ModelLimits(vocab_size=259, max_model_len=64, max_prompts=8, embedding_size=size)
    return FakeEngineClient(tasks=tasks or ("embed",), limits=limits, **fields)


def vector(client: FakeEngineClient, text: str, size: int = 16) -> np.ndarray:
    return fake_embedding(client.tokenizer.encode(text), size)


def judged(text: str, size: int) -> list[float]:
    """What the fake makes of a prompt that the template filled."""
    return fake_embedding([byte + 3 for byte in text.encode()], size).tolist()


@pytest.mark.parametrize("path", ["/score", "/v1/score"])
async def test_embeddings_are_compared_by_their_cosine(make_in_process: Callable[..., Any], path: str) -> None:
    """Each text is embedded once, however often it occurs."""
    client = fake()
    http = make_in_process(client).http
    answer = (await http.post(path, json={"model": "fake", "text_1": "a", "text_2": ["b", "a", "b"]})).json()
    assert (answer["object"], answer["model"]) == ("list", "fake")
    assert [(item["index"], item["object"]) for item in answer["data"]] == [(index, "score") for index in range(3)]
    near = float(vector(client, "a") @ vector(client, "b"))
    np.testing.assert_allclose([item["score"] for item in answer["data"]], [near, 1.0, near], rtol=1e-6)
    assert answer["usage"] == {"prompt_tokens": 4, "total_tokens": 4}
    assert [params for _, params, _ in client.seen] == [PoolingParams(normalize=True)] * 2


@pytest.mark.parametrize("path", ["/rerank", "/v1/rerank", "/v2/rerank"])
async def test_documents_come_best_first(make_in_process: Callable[..., Any], path: str) -> None:
    client = fake("embed", "classify", size=1)
    http = make_in_process(client, score_options=TEMPLATE).http
    documents = ["wing", "anchor", "flap"]
    # The fake makes 1 or -1 of a prompt.
    scores = [judged(f"fits?fly:{document}", 1)[0] for document in documents]
    wanted = sorted(range(3), key=lambda index: -scores[index])
    answer = (await http.post(path, json={"query": "fly", "documents": documents})).json()
    assert [item["index"] for item in answer["results"]] == wanted
    for item in answer["results"]:
        assert item["document"] == {"text": documents[item["index"]]}
        assert item["relevance_score"] == pytest.approx(scores[item["index"]])
    body = {"query": "fly", "documents": documents, "top_n": 1, "return_documents": False, "instruction": "suits"}
    (best,) = (await http.post(path, json=body)).json()["results"]
    assert sorted(best) == ["index", "relevance_score"]
    assert client.tokenizer.decode(client.seen[-1][0].token_ids or ()) == "suits?fly:flap"


async def test_a_pair_is_judged_by_the_second_of_two_labels(make_in_process: Callable[..., Any]) -> None:
    client = fake("embed", "classify", size=2)
    http = make_in_process(client, score_options=TEMPLATE, request_timeout_s=7.0).http
    raw = np.asarray(judged("fits?a:b", 2), dtype=np.float64)
    for activation, wanted in (
        (None, raw[1]),
        ("none", raw[1]),
        ("softmax", np.exp(raw[1]) / np.exp(raw).sum()),
        ("sigmoid", 1 / (1 + np.exp(-raw[1]))),
    ):
        body = {"text_1": ["a"], "text_2": "b", "activation": activation, "cache_salt": "s"}
        answer = (await http.post("/score", json=body)).json()
        assert answer["data"][0]["score"] == pytest.approx(wanted, rel=1e-6)
        prompt, params, options = client.seen[-1]
        assert params == PoolingParams(normalize=None if activation is None else False)
        assert options is not None
        assert (prompt.cache_salt, options.timeout_s) == ("s", 7.0)


async def test_texts_get_labels(make_in_process: Callable[..., Any]) -> None:
    client = fake("embed", "classify", size=3)
    http = make_in_process(client).http
    answer = (await http.post("/classify", json={"input": ["a", "b"], "activation": "softmax"})).json()
    for index, (text, item) in enumerate(zip("ab", answer["data"], strict=True)):
        raw = np.exp(vector(client, text, 3))
        np.testing.assert_allclose(item["probs"], raw / raw.sum(), rtol=1e-6)
        assert item["label"] == f"LABEL_{raw.argmax()}"
        assert (item["index"], item["num_classes"]) == (index, 3)


async def test_numbers_as_the_model_gives_them(make_in_process: Callable[..., Any]) -> None:
    client = fake()
    body = {"input": [[5, 6], [7]], "pooling": "mean", "normalize": False, "dimensions": 4}
    answer = (await make_in_process(client).http.post("/pooling", json=body)).json()
    assert [item["object"] for item in answer["data"]] == ["pooling"] * 2
    np.testing.assert_allclose(answer["data"][0]["data"], fake_embedding([5, 6], 4), rtol=1e-6)
    assert client.seen[0][1] == PoolingParams(pooling="mean", normalize=False, dimensions=4)


JUDGES = ("embed", "classify")


@pytest.mark.parametrize(
    ("tasks", "path", "body", "param", "told"),
    [
        (("embed",), "/classify", {"input": "a"}, "model", "does not classify; it serves embed"),
        (JUDGES, "/v1/embeddings", {"input": "a"}, "model", "gives scores and no embeddings"),
        (JUDGES, "/score", {"text_1": "a", "text_2": "b"}, "model", "judges 16 labels"),
        (JUDGES, "/score", {"text_1": "a", "text_2": []}, "text_2", "text_2 is empty"),
        (JUDGES, "/score", {"text_1": ["a", "b"], "text_2": ["c"]}, "text_1", "has 2 texts and text_2 1"),
        (JUDGES, "/score", {"text_1": "a", "text_2": "b" * 70}, "text_2", "the pair has 77 tokens"),
        (JUDGES, "/score", {"text_1": "a", "text_2": "b" * 5000}, "text_2", "the pair has 5005 characters"),
        (JUDGES, "/score", {"text_1": "a", "text_2": "b", "activation": "tanh"}, "activation", "Invalid enum value"),
        (("embed",), "/score", {"text_1": "a", "text_2": ""}, "text_2", "the pair is empty"),
        (("embed",), "/rerank", {"query": "a", "documents": ["b"] * 9}, "documents", "9 pairs were given; at most 8"),
        (("embed",), "/rerank", {"query": "a", "documents": ["b"], "top_n": 0}, "top_n", "top_n is 0"),
        (("embed",), "/rerank", {"query": "a"}, "documents", "missing required field"),
        (JUDGES, "/pooling", {"input": "a", "dimensions": 3}, "dimensions", "of which dimensions cannot be chosen"),
        (JUDGES, "/pooling", {"input": "a", "pooling": "last"}, "pooling", "of which pooling cannot be chosen"),
        (("embed",), "/pooling", {"input": "a", "activation": "none"}, "activation", "which have no activation"),
        (("embed",), "/pooling", {"input": ""}, "input", "the input is empty"),
        (("embed",), "/pooling", {"input": "a", "dimensions": 17}, "dimensions", "from 1 to 16"),
        (("generate",), "/pooling", {"input": "a"}, None, "it serves generate"),
    ],
)
async def test_bad_requests_are_named_by_their_field(
    make_in_process: Callable[..., Any],
    tasks: tuple[str, ...],
    path: str,
    body: dict[str, Any],
    param: str | None,
    told: str,
) -> None:
    answer = await make_in_process(fake(*tasks), score_options=TEMPLATE).http.post(path, json=body)
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert told in error["message"]


async def test_a_judge_without_a_way_to_join_texts_says_so(make_in_process: Callable[..., Any]) -> None:
    answer = await make_in_process(fake(*JUDGES)).http.post("/score", json={"text_1": "a", "text_2": "b"})
    assert "the operator sets a pair_template" in answer.json()["error"]["message"]


async def test_a_client_that_leaves_ends_its_pairs(serve: Callable[..., Any]) -> None:
    served = await serve(fake())
    served.client.hold.clear()
    asked = asyncio.create_task(served.http.post("/rerank", json={"query": "a", "documents": ["b", "c"]}))
    await served.running(3)
    asked.cancel()
    await served.settled()
    assert served.client.num_aborted == 3


@pytest.mark.parametrize("name", ["classify", "pooling", "score"])
def test_they_are_denied_unless_listed_and_left_out_where_nothing_pools(name: str) -> None:
    refused = {entry.name: entry.reason for entry in build_plan(discover(), PluginSelection(endpoints=())).refused}
    assert refused[name] == "not listed in server.endpoints"
    assert name not in ServerConfig().endpoints
    wishes: dict[tuple[str, ...], bool] = {
        ("embed", "classify"): True,
        ("generate", "embed"): True,
        ("generate",): False,
    }
    for tasks, admitted in wishes.items():
        plan = build_plan(discover(), PluginSelection(endpoints=(name,), tasks=tasks))
        assert any(planned.name == name for planned in plan.of("endpoint")) is admitted


def test_without_a_server_they_cannot_be_made() -> None:
    context = EndpointContext("score", 1, frozenset({ProcessRole.API}))
    with pytest.raises(ConfigError, match="score endpoint needs a server's router"):
        create(context, ScoreOptions())
    for make in (create_classify, create_pooling):
        with pytest.raises(ConfigError, match="needs a server's router"):
            make(context, NoOptions())


def test_a_template_without_both_texts_is_refused_at_the_start() -> None:
    with pytest.raises(ValueError, match="the template lacks {document}"):
        ScoreOptions(pair_template="{query}")
