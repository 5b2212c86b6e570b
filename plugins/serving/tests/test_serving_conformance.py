"""Our endpoints keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.interfaces import Endpoint, EndpointContext, NoOptions
from hardpoint.testing.asgi_client import Call
from hardpoint.testing.endpoint_suite import EndpointSuite
from hardpoint_serving.openai import OpenAIOptions
from hardpoint_serving.openai import create as create_openai
from hardpoint_serving.ops import create as create_ops

CHAT = {"model": "fake", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
COMPLETION = {"model": "fake", "prompt": "hi", "max_tokens": 5}


class TestOpenAI(EndpointSuite):
    calls: ClassVar[tuple[Call, ...]] = (
        Call("POST", "/v1/chat/completions", CHAT),
        Call("POST", "/v1/chat/completions", {**CHAT, "stream": True}),
        Call("POST", "/v1/completions", COMPLETION),
        Call("POST", "/v1/completions", {**COMPLETION, "stream": True}),
        Call("GET", "/v1/models"),
        Call("GET", "/v1/models/fake"),
    )

    def create_endpoint(self, ctx: EndpointContext) -> Endpoint:
        return create_openai(ctx, OpenAIOptions())


class TestOps(EndpointSuite):
    calls: ClassVar[tuple[Call, ...]] = tuple(
        Call("GET", path) for path in ("/health", "/version", "/metrics", "/load")
    )

    def create_endpoint(self, ctx: EndpointContext) -> Endpoint:
        return create_ops(ctx, NoOptions())
