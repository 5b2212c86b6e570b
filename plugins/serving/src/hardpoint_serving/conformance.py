"""What the rules of their kind need to know of our endpoints: valid requests. Loaded by the kit alone."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import IOProcessor, IORequest, Prompt, RequestOutput, SamplingParams
from hardpoint.testing import FakeEngineClient
from hardpoint.testing.asgi_client import Call
from hardpoint.testing.endpoint_suite import EndpointSuite

__all__ = [
    "TestAdmin",
    "TestClassify",
    "TestEmbeddings",
    "TestKVEvents",
    "TestOpenAI",
    "TestOps",
    "TestPooling",
    "TestProcess",
    "TestScore",
]

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 5}


class TestOpenAI(EndpointSuite):
    plugin: ClassVar[str | None] = "openai"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/v1/chat/completions", CHAT),
        Call("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        Call("POST", "/v1/completions", COMPLETION),
        Call("POST", "/v1/completions", {**COMPLETION, "stream": True}),
        Call("GET", "/v1/models"),
        Call("GET", "/v1/models/fake"),
    )


class TestOps(EndpointSuite):
    plugin: ClassVar[str | None] = "ops"
    calls: ClassVar[tuple[Call, ...]] = tuple(
        Call("GET", path) for path in ("/health", "/version", "/metrics", "/load")
    )


class TestAdmin(EndpointSuite):
    plugin: ClassVar[str | None] = "admin"
    calls: ClassVar[tuple[Call, ...]] = (Call("GET", "/admin/plugins"), Call("POST", "/admin/reset_prefix_cache"))


class TestEmbeddings(EndpointSuite):
    plugin: ClassVar[str | None] = "embeddings"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/v1/embeddings", {"model": "fake", "input": ["why?", "when?"]}),
        Call("POST", "/v1/embeddings", {"input": [5, 6], "dimensions": 3, "encoding_format": "base64"}),
    )

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient(tasks=("embed",))


class TestClassify(EndpointSuite):
    plugin: ClassVar[str | None] = "classify"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/classify", {"model": "fake", "input": ["why?", "when?"]}),
        Call("POST", "/v1/classify", {"input": [5, 6], "activation": "sigmoid"}),
    )

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient(tasks=("embed", "classify"))


class TestPooling(EndpointSuite):
    plugin: ClassVar[str | None] = "pooling"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/pooling", {"model": "fake", "input": ["why?", "when?"]}),
        Call("POST", "/v1/pooling", {"input": [5, 6], "dimensions": 3}),
    )

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient(tasks=("embed",))


class TestScore(EndpointSuite):
    plugin: ClassVar[str | None] = "score"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/v1/score", {"model": "fake", "text_1": "why?", "text_2": ["when?", "where?"]}),
        Call("POST", "/v1/rerank", {"query": "why?", "documents": ["when?", "where?"], "top_n": 1}),
    )

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient(tasks=("embed",))


class TestKVEvents(EndpointSuite):
    plugin: ClassVar[str | None] = "kv_events"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("GET", "/kv_events?follow=false"),
        Call("GET", "/kv_events?follow=false&model=fake&after=3"),
    )


class Answers(IOProcessor):
    """A list of questions becomes the list of answers."""

    def parse(self, data: Any) -> Sequence[IORequest]:
        if not isinstance(data, list) or not all(isinstance(text, str) and text.isprintable() for text in data):
            raise InvalidRequestError("data must be a list of texts", param="data")
        return [IORequest(Prompt(text=text), SamplingParams(max_tokens=5)) for text in data]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        return [output.outputs[0].text for output in outputs]


class TestProcess(EndpointSuite):
    plugin: ClassVar[str | None] = "process"
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/v1/process", {"model": "fake", "data": ["why?", "when?"]}),
        Call("POST", "/v1/process", {"data": ["why?"]}),
    )

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient(io_processor=Answers())
