"""The ``embeddings`` endpoint: ``POST /v1/embeddings`` in OpenAI's form, for servers whose model embeds."""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Any, Literal

import msgspec
from fastapi import APIRouter, Request, Response

from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import EmbeddingOutput, EngineClient, ModelRouter, RequestOptions
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Float32Array, PoolingParams
from hardpoint_serving.body import decode_body
from hardpoint_serving.judging import check_dimensions
from hardpoint_serving.pooled import answer_unless_gone, embed_all
from hardpoint_serving.prompts import TextInput, read_prompts

__all__ = ["EmbeddingsEndpoint", "EmbeddingsRequest", "create"]


class EmbeddingsRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """OpenAI's fields, of which ``user`` has no effect; and ``pooling``, ``normalize``, ``add_special_tokens`` and
    ``cache_salt`` beyond them, each by default as the model has it."""

    input: TextInput
    model: str | None = None
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: int | None = None
    user: str | None = None
    pooling: str | None = None
    normalize: bool | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None


class _Item(msgspec.Struct, frozen=True):
    index: int
    embedding: Any
    object: str = "embedding"


class EmbeddingsEndpoint(Endpoint):
    """All inputs of a request are embedded at the same time. A client that leaves ends them."""

    def __init__(self, router: ModelRouter, *, request_timeout_s: float | None = None) -> None:
        self._router = router
        self._options = RequestOptions(timeout_s=request_timeout_s)

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/embeddings", self.embed, methods=["POST"], response_model=None)
        return router

    async def embed(self, request: Request) -> Response:
        body = await decode_body(request, EmbeddingsRequest)
        client = self._router.resolve(body.model)
        _refuse_scores(client)
        _refuse_matrix_as_text(body)
        params = PoolingParams(pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
        try:
            check_dimensions(body.dimensions, client.tokenizer, client.limits)
            special, salt = body.add_special_tokens, body.cache_salt
            prompts = read_prompts(body.input, client, param="input", add_special_tokens=special, cache_salt=salt)
            work = embed_all(client, prompts, params, self._options)
            as_text = body.encoding_format == "base64"
            return await answer_unless_gone(request, work, lambda outputs: _answer(client.model_name, outputs, as_text))
        except InvalidRequestError as error:
            raise _in_request_terms(error) from None


def _answer(model: str, outputs: Sequence[EmbeddingOutput], as_text: bool) -> dict[str, Any]:
    num_tokens = sum(output.num_prompt_tokens for output in outputs)
    items = [_Item(index, _encoded(output.embedding, as_text)) for index, output in enumerate(outputs)]
    usage = {"prompt_tokens": num_tokens, "total_tokens": num_tokens}
    return {"object": "list", "data": items, "model": model, "usage": usage}


def _encoded(embedding: Float32Array, as_text: bool) -> Any:
    """Numbers, or little-endian float32 in base64."""
    return base64.b64encode(embedding.astype("<f4").tobytes()).decode() if as_text else embedding.tolist()


def _refuse_scores(client: EngineClient) -> None:
    if "classify" in client.tasks:
        raise InvalidRequestError(
            "this model gives scores and no embeddings; ask the endpoints classify, score or pooling",
            param="model",
            code="unsupported_task",
        )


def _refuse_matrix_as_text(body: EmbeddingsRequest) -> None:
    if body.pooling == "token_embed" and body.encoding_format == "base64":
        raise InvalidRequestError(
            "pooling 'token_embed' gives a vector for each token, which base64 does not tell apart; use 'float'",
            param="encoding_format",
            code="invalid_value",
        )


def _in_request_terms(error: InvalidRequestError) -> InvalidRequestError:
    """The engine's refusal with the names of the fields that the client sent."""
    if error.param != "prompt":
        return error
    return InvalidRequestError(
        str(error).replace("prompt", "input"), param="input", code=error.code, status=error.status
    )


@plugin("endpoint", options=NoOptions, required_tasks=frozenset({"embed"}))
def create(ctx: EndpointContext, options: NoOptions) -> EmbeddingsEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    del options
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the embeddings endpoint needs a server's router")
    return EmbeddingsEndpoint(ctx.router, request_timeout_s=ctx.facts.request_timeout_s)
