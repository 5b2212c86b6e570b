"""Routes of the ``openai`` endpoint."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import AsyncIterator, Callable
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field

from hardpoint import __version__
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import EngineClient, ModelRouter, Prompt, RequestOptions
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.request import SamplingParams
from hardpoint_serving.body import decode_body
from hardpoint_serving.openai.chat import chat_completion, chat_frames
from hardpoint_serving.openai.completions import CompletionWriter
from hardpoint_serving.openai.protocol import ChatRequest, CompletionRequest, GenerationRequest
from hardpoint_serving.openai.translate import (
    Identity,
    chat_messages,
    chat_sampling,
    completion_prompts,
    completion_sampling,
    in_request_terms,
    refuse_unsupported,
    request_options,
    template_arguments,
)
from hardpoint_serving.outputs import ClientGone, Numbered, OutputStream, watch_client
from hardpoint_serving.sse import EventStream

__all__ = ["OpenAIEndpoint", "OpenAIOptions", "create"]

_CLIENT_CLOSED_REQUEST = 499
_MAX_EXTERNAL_ID = 128


class OpenAIOptions(BaseModel):
    """Options under ``plugins.endpoint.openai``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    keepalive_s: float = Field(default=10.0, gt=0, description="seconds of silence before a stream gets a comment")
    max_priority: int = Field(default=100, ge=0, description="largest priority, up or down, a request may ask for")
    tenant_header: str = Field(
        default="",
        pattern="^[A-Za-z0-9-]*$",
        description="header that names the tenant of a request; only behind a proxy that sets it (empty: no tenants)",
        json_schema_extra={"flag": "--tenant-header"},
    )
    template_arguments: tuple[str, ...] = Field(
        default=("enable_thinking", "thinking"), description="keys requests may set in chat_template_kwargs"
    )


class OpenAIEndpoint(Endpoint):
    """Chat completions, completions and the list of models. ``created`` is the start time in Unix seconds."""

    def __init__(
        self, router: ModelRouter, options: OpenAIOptions, *, created: int, request_timeout_s: float | None = None
    ) -> None:
        self._router = router
        self._options = options
        self._created = created
        self._request_timeout_s = request_timeout_s

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/chat/completions", self.chat, methods=["POST"], response_model=None)
        router.add_api_route("/v1/completions", self.complete, methods=["POST"], response_model=None)
        router.add_api_route("/v1/models", self.models, methods=["GET"], response_model=None)
        router.add_api_route("/v1/models/{model:path}", self.model, methods=["GET"], response_model=None)
        return router

    async def models(self) -> Response:
        return _json({"object": "list", "data": [self._card(name) for name in self._router.names()]})

    async def model(self, model: str) -> Response:
        if model not in self._router.names():
            raise InvalidRequestError("no such model is served here", param="model", code="model_not_found", status=404)
        return _json(self._card(model))

    def _card(self, name: str) -> dict[str, Any]:
        lengths = {client.model_name: client.limits.max_model_len for client in self._router.clients()}
        card = {"id": name, "object": "model", "created": self._created, "owned_by": "hardpoint"}
        return {**card, "max_model_len": lengths.get(name)}

    async def chat(self, request: Request) -> Response:
        body = await decode_body(request, ChatRequest)
        client, params, options = self._admit(request, body, chat_sampling)
        client.check_batch(1, params.n)
        prompt = _with_salt(await self._render(client, body), body)
        identity = Identity.new("chatcmpl", client.model_name, _fingerprint(client))
        stream = OutputStream([client.generate(prompt, params, options)])
        return await self._answer(
            request,
            body,
            stream,
            frames=lambda: chat_frames(body, identity, stream),
            whole=lambda outputs: chat_completion(body, identity, outputs),
        )

    async def _render(self, client: EngineClient, body: ChatRequest) -> Prompt:
        # A template may take two seconds whatever the messages' length, and a long conversation takes its time to
        # convert: neither must hold up other streams.
        return await asyncio.to_thread(self._prompt, client, body)

    def _prompt(self, client: EngineClient, body: ChatRequest) -> Prompt:
        return client.render_chat(
            chat_messages(body.messages),
            add_generation_prompt=body.add_generation_prompt is not False,
            template_arguments=template_arguments(body, self._options.template_arguments),
        )

    async def complete(self, request: Request) -> Response:
        body = await decode_body(request, CompletionRequest)
        client, params, options = self._admit(request, body, completion_sampling)
        prompts = completion_prompts(body, client)
        identity = Identity.new("cmpl", client.model_name, _fingerprint(client))
        writer = CompletionWriter(body, identity, client.tokenizer)
        stream = OutputStream([client.generate(prompt, params, options) for prompt in prompts])
        return await self._answer(request, body, stream, frames=lambda: writer.frames(stream), whole=writer.whole)

    def _admit(
        self, request: Request, body: Any, sampling: Callable[[Any], SamplingParams]
    ) -> tuple[EngineClient, SamplingParams, RequestOptions]:
        refuse_unsupported(body)
        client = self._router.resolve(body.model)
        given = request.headers.get("x-request-id")
        options = request_options(
            body,
            max_priority=self._options.max_priority,
            ceiling_s=self._request_timeout_s,
            external_id=given if given and given.isprintable() and len(given) <= _MAX_EXTERNAL_ID else None,
            tenant=request.headers.get(self._options.tenant_header, "") if self._options.tenant_header else "",
        )
        return client, sampling(body), options

    async def _answer(
        self,
        request: Request,
        body: GenerationRequest,
        stream: OutputStream,
        *,
        frames: Callable[[], AsyncIterator[bytes]],
        whole: Callable[[list[Numbered]], Any],
    ) -> Response:
        gone = watch_client(request)
        streaming = False
        try:
            if not body.stream:
                return _json(whole(await stream.collect(gone)))
            await stream.prime(gone, self._options.keepalive_s)
            streaming = True
            return EventStream(
                frames(),
                gone=gone,
                close=stream.close,
                error_body=self.error_body,
                keepalive_s=self._options.keepalive_s,
            )
        except InvalidRequestError as error:
            raise in_request_terms(error, body) from None
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            if not streaming:
                gone.cancel()
                await stream.close()


def _json(record: Any) -> Response:
    return Response(msgspec.json.encode(record), media_type="application/json")


def _fingerprint(client: EngineClient) -> str:
    """Changes when the software or the served model's shape does; equal for equal servers."""
    facts = f"{__version__}/{client.model_name}/{client.limits.vocab_size}/{client.limits.max_model_len}"
    return f"fp_{hashlib.sha256(facts.encode()).hexdigest()[:12]}"


def _with_salt(prompt: Prompt, body: ChatRequest) -> Prompt:
    if body.cache_salt is None:
        return prompt
    return Prompt(
        text=prompt.text,
        token_ids=prompt.token_ids,
        add_special_tokens=prompt.add_special_tokens,
        cache_salt=body.cache_salt,
    )


@plugin("endpoint", options=OpenAIOptions)
def create(ctx: EndpointContext, options: OpenAIOptions) -> OpenAIEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the openai endpoint needs a server's router")
    return OpenAIEndpoint(ctx.router, options, created=ctx.facts.created, request_timeout_s=ctx.facts.request_timeout_s)
