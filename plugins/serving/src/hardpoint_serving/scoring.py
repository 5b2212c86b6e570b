"""The ``score`` endpoint: how well texts belong together, as ``/score`` has it, and documents in their order, as
``/rerank`` has it."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
from fastapi import APIRouter, Request, Response
from pydantic import BaseModel, ConfigDict, Field, field_validator

from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import EngineClient, ModelRouter, Prompt, RequestOptions
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.request import PoolingParams
from hardpoint_serving.body import decode_body
from hardpoint_serving.judging import Activation, PairTemplate, activated, judging_params, line_up, pair_scores
from hardpoint_serving.pooled import Pooled, answer_unless_gone, embed_all

__all__ = ["RerankRequest", "ScoreEndpoint", "ScoreOptions", "ScoreRequest", "create"]

Texts = str | list[str]


class ScoreOptions(BaseModel):
    """Options under ``plugins.endpoint.score``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    pair_template: str | None = Field(
        default=None,
        description="the prompt of a pair, with `{query}`, `{document}` and perhaps `{instruction}` in it; by default "
        "as the tokenizer joins two texts. For models that judge, not for embeddings",
    )
    instruction: str = Field(
        default="Given a web search query, retrieve relevant passages that answer the query",
        description="what stands in the place of `{instruction}` unless a request has its own",
    )

    @field_validator("pair_template")
    @classmethod
    def _has_both(cls, value: str | None) -> str | None:
        PairTemplate(value)
        return value


class ScoreRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """``text_1`` is one text for all of ``text_2``, or as many. ``activation`` is the model's own unless named."""

    text_1: Texts
    text_2: Texts
    model: str | None = None
    activation: Activation | None = None
    instruction: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class RerankRequest(msgspec.Struct, kw_only=True, frozen=True, forbid_unknown_fields=True):
    """As Jina and Cohere have it; ``top_n`` is how many of the best to return, by default all."""

    query: str
    documents: list[str]
    model: str | None = None
    top_n: int | None = None
    return_documents: bool = True
    activation: Activation | None = None
    instruction: str | None = None
    cache_salt: str | None = None
    user: str | None = None


class ScoreEndpoint(Endpoint):
    """All pairs of a request are judged at the same time. A client that leaves ends them."""

    def __init__(
        self, router: ModelRouter, options: ScoreOptions | None = None, *, request_timeout_s: float | None = None
    ) -> None:
        self._router = router
        self._template = options or ScoreOptions()
        self._options = RequestOptions(timeout_s=request_timeout_s)

    def routes(self) -> APIRouter:
        router = APIRouter()
        for path in ("/score", "/v1/score"):
            router.add_api_route(path, self.score, methods=["POST"], response_model=None)
        for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
            router.add_api_route(path, self.rerank, methods=["POST"], response_model=None)
        return router

    async def score(self, request: Request) -> Response:
        body = await decode_body(request, ScoreRequest)
        client = self._router.resolve(body.model)
        pairs = line_up(_listed(body.text_1), _listed(body.text_2), ("text_1", "text_2"))

        def answer(judged: tuple[list[float], int]) -> dict[str, Any]:
            scores, num_tokens = judged
            data = [{"index": index, "object": "score", "score": one} for index, one in enumerate(scores)]
            return {**_head("score", client), "object": "list", "data": data, "usage": _usage(num_tokens)}

        return await answer_unless_gone(request, self._judge(client, pairs, body, "text_2"), answer)

    async def rerank(self, request: Request) -> Response:
        body = await decode_body(request, RerankRequest)
        client = self._router.resolve(body.model)
        pairs = line_up([body.query], body.documents, ("query", "documents"))
        if body.top_n is not None and body.top_n < 1:
            raise InvalidRequestError(
                f"top_n is {body.top_n}; it must be at least 1", param="top_n", code="invalid_value"
            )

        def answer(judged: tuple[list[float], int]) -> dict[str, Any]:
            scores, num_tokens = judged
            best = sorted(range(len(scores)), key=lambda index: -scores[index])[: body.top_n]
            results = [
                {"index": index, "relevance_score": scores[index]}
                | ({"document": {"text": body.documents[index]}} if body.return_documents else {})
                for index in best
            ]
            return {**_head("rerank", client), "results": results, "usage": _usage(num_tokens)}

        return await answer_unless_gone(request, self._judge(client, pairs, body, "documents"), answer)

    async def _judge(
        self, client: EngineClient, pairs: Sequence[tuple[str, str]], body: ScoreRequest | RerankRequest, param: str
    ) -> tuple[list[float], int]:
        """A score per pair, and how many tokens were computed for them."""
        try:
            client.check_batch(len(pairs), 1)
            if "classify" not in client.tasks:
                return await self._compare(client, pairs, body.cache_salt)
            instruction = self._template.instruction if body.instruction is None else body.instruction
            template = PairTemplate(self._template.pair_template, instruction)
            prompts = await asyncio.to_thread(_joined, template, pairs, client, body.cache_salt)
            found = await embed_all(client, prompts, judging_params(body.activation), self._options)
        except InvalidRequestError as error:
            raise _in_request_terms(error, param) from None
        scores = pair_scores([activated(one.embedding, body.activation) for one in found])
        return scores, sum(one.num_prompt_tokens for one in found)

    async def _compare(
        self, client: EngineClient, pairs: Sequence[tuple[str, str]], cache_salt: str | None
    ) -> tuple[list[float], int]:
        """Cosines of embeddings; each text is embedded once, however often it occurs."""
        texts = list(dict.fromkeys(text for pair in pairs for text in pair))
        prompts = [Prompt(text=text, cache_salt=cache_salt) for text in texts]
        found: list[Pooled] = await embed_all(client, prompts, PoolingParams(normalize=True), self._options)
        vectors = {text: one.embedding for text, one in zip(texts, found, strict=True)}
        scores = [float(np.dot(vectors[query], vectors[document])) for query, document in pairs]
        return scores, sum(one.num_prompt_tokens for one in found)


def _joined(
    template: PairTemplate, pairs: Sequence[tuple[str, str]], client: EngineClient, cache_salt: str | None
) -> list[Prompt]:
    tokenizer, limits = client.tokenizer, client.limits
    return [template.prompt(query, document, tokenizer, limits, cache_salt=cache_salt) for query, document in pairs]


def _listed(texts: Texts) -> list[str]:
    return [texts] if isinstance(texts, str) else texts


def _head(kind: str, client: EngineClient) -> dict[str, Any]:
    return {"id": f"{kind}-{uuid.uuid4().hex}", "created": int(time.time()), "model": client.model_name}


def _usage(num_tokens: int) -> dict[str, int]:
    return {"prompt_tokens": num_tokens, "total_tokens": num_tokens}


def _in_request_terms(error: InvalidRequestError, param: str) -> InvalidRequestError:
    """The engine's refusal with the name of the field that the client sent most texts in."""
    if error.param != "prompt":
        return error
    return InvalidRequestError(str(error).replace("prompt", "pair"), param=param, code=error.code, status=error.status)


@plugin("endpoint", options=ScoreOptions, required_tasks=frozenset({"embed"}))
def create(ctx: EndpointContext, options: ScoreOptions) -> ScoreEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the score endpoint needs a server's router")
    return ScoreEndpoint(ctx.router, options, request_timeout_s=ctx.facts.request_timeout_s)
