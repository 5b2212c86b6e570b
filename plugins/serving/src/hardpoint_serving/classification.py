"""The endpoints ``classify``, labels of texts, and ``pooling``, whatever the model makes of texts, as numbers."""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Sequence
from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import EngineClient, ModelRouter, RequestOptions
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Float32Array, PoolingParams
from hardpoint_serving.body import decode_body
from hardpoint_serving.judging import (
    Activation,
    activated,
    check_dimensions,
    judging_params,
    label_names,
    require_judge,
)
from hardpoint_serving.pooled import Pooled, answer_unless_gone, embed_all
from hardpoint_serving.prompts import TextInput, read_prompts

__all__ = [
    "ClassifyEndpoint",
    "ClassifyRequest",
    "PoolingEndpoint",
    "PoolingRequest",
    "create_classify",
    "create_pooling",
]


class ClassifyRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """``activation`` is the model's own unless named; ``user`` has no effect."""

    input: TextInput
    model: str | None = None
    activation: Activation | None = None
    add_special_tokens: bool = True
    cache_salt: str | None = None
    user: str | None = None


class PoolingRequest(ClassifyRequest, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """Embeddings may be asked for by ``pooling``, ``normalize`` and ``dimensions``, scores by ``activation``."""

    pooling: str | None = None
    normalize: bool | None = None
    dimensions: int | None = None


class _PooledEndpoint(Endpoint):
    """All inputs of a request are computed at the same time. A client that leaves ends them."""

    def __init__(self, router: ModelRouter, *, request_timeout_s: float | None = None) -> None:
        self._router = router
        self._options = RequestOptions(timeout_s=request_timeout_s)

    async def _answer(
        self,
        request: Request,
        body: ClassifyRequest,
        client: EngineClient,
        params: PoolingParams,
        kind: str,
        item: Callable[[int, Float32Array], dict[str, Any]],
    ) -> Response:
        """``item`` makes an entry of the answer out of an input's place and scores."""

        def answer(found: Sequence[Pooled]) -> dict[str, Any]:
            num_tokens = sum(one.num_prompt_tokens for one in found)
            results = (activated(one.embedding, body.activation) for one in found)
            return {
                "id": f"{kind}-{uuid.uuid4().hex}",
                "object": "list",
                "created": int(time.time()),
                "model": client.model_name,
                "data": [item(index, result) for index, result in enumerate(results)],
                "usage": {"prompt_tokens": num_tokens, "total_tokens": num_tokens},
            }

        try:
            special, salt = body.add_special_tokens, body.cache_salt
            prompts = read_prompts(body.input, client, param="input", add_special_tokens=special, cache_salt=salt)
            return await answer_unless_gone(request, embed_all(client, prompts, params, self._options), answer)
        except InvalidRequestError as error:
            raise _in_request_terms(error) from None


class ClassifyEndpoint(_PooledEndpoint):
    """Labels by name, with their shares."""

    def routes(self) -> APIRouter:
        router = APIRouter()
        for path in ("/classify", "/v1/classify"):
            router.add_api_route(path, self.classify, methods=["POST"], response_model=None)
        return router

    async def classify(self, request: Request) -> Response:
        body = await decode_body(request, ClassifyRequest)
        client = self._router.resolve(body.model)
        require_judge(client.tasks)

        def item(index: int, result: Float32Array) -> dict[str, Any]:
            if result.ndim != 1:
                raise InvalidRequestError(
                    "this model judges every token on its own; ask the endpoint pooling", param="model"
                )
            label = label_names(client.tokenizer, len(result))[int(result.argmax())]
            return {"index": index, "label": label, "probs": result.tolist(), "num_classes": len(result)}

        return await self._answer(request, body, client, judging_params(body.activation), "classify", item)


class PoolingEndpoint(_PooledEndpoint):
    """Embeddings, scores, or rows of either for each token or step, as nested lists of numbers."""

    def routes(self) -> APIRouter:
        router = APIRouter()
        for path in ("/pooling", "/v1/pooling"):
            router.add_api_route(path, self.pool, methods=["POST"], response_model=None)
        return router

    async def pool(self, request: Request) -> Response:
        body = await decode_body(request, PoolingRequest)
        client = self._router.resolve(body.model)
        params = _pooling_params(body, client)

        def item(index: int, result: Float32Array) -> dict[str, Any]:
            return {"index": index, "object": "pooling", "data": result.tolist()}

        return await self._answer(request, body, client, params, "pool", item)


def _pooling_params(body: PoolingRequest, client: EngineClient) -> PoolingParams:
    """Raises ``InvalidRequestError`` for settings of the other kind of model."""
    if "classify" not in client.tasks:
        if body.activation is not None:
            raise InvalidRequestError(
                "this model gives embeddings, which have no activation", param="activation", code="invalid_value"
            )
        check_dimensions(body.dimensions, client.tokenizer, client.limits)
        return PoolingParams(pooling=body.pooling, normalize=body.normalize, dimensions=body.dimensions)
    for name in ("pooling", "normalize", "dimensions"):
        if getattr(body, name) is not None:
            raise InvalidRequestError(
                f"this model gives scores, of which {name} cannot be chosen; leave it out",
                param=name,
                code="invalid_value",
            )
    return judging_params(body.activation)


def _in_request_terms(error: InvalidRequestError) -> InvalidRequestError:
    """The engine's refusal with the names of the fields that the client sent."""
    if error.param != "prompt":
        return error
    return InvalidRequestError(
        str(error).replace("prompt", "input"), param="input", code=error.code, status=error.status
    )


def _router(ctx: EndpointContext, name: str) -> tuple[ModelRouter, float | None]:
    if ctx.router is None or ctx.facts is None:
        raise ConfigError(f"the {name} endpoint needs a server's router")
    return ctx.router, ctx.facts.request_timeout_s


@plugin("endpoint", options=NoOptions, required_tasks=frozenset({"embed"}))
def create_classify(ctx: EndpointContext, options: NoOptions) -> ClassifyEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    del options
    router, timeout = _router(ctx, "classify")
    return ClassifyEndpoint(router, request_timeout_s=timeout)


@plugin("endpoint", options=NoOptions, required_tasks=frozenset({"embed"}))
def create_pooling(ctx: EndpointContext, options: NoOptions) -> PoolingEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    del options
    router, timeout = _router(ctx, "pooling")
    return PoolingEndpoint(router, request_timeout_s=timeout)
