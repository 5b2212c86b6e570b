"""The ``process`` endpoint: ``POST /v1/process`` hands a task to the model's IO processor and answers its result."""

from __future__ import annotations

from typing import Any

import msgspec
from fastapi import APIRouter, Request, Response

from hardpoint.errors import ConfigError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import ModelRouter, RequestOptions
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_serving.body import decode_body
from hardpoint_serving.outputs import ClientGone, until_gone, watch_client

__all__ = ["ProcessEndpoint", "ProcessRequest", "create"]

_CLIENT_CLOSED_REQUEST = 499


class ProcessRequest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """``data`` is the processor's own form; ``model`` None means the only model served."""

    data: Any
    model: str | None = None


class ProcessEndpoint(Endpoint):
    """Answers ``{"model": ..., "data": <result>}``. A client that leaves ends its task's requests."""

    def __init__(self, router: ModelRouter, *, request_timeout_s: float | None = None) -> None:
        self._router = router
        self._options = RequestOptions(timeout_s=request_timeout_s)

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/v1/process", self.process, methods=["POST"], response_model=None)
        return router

    async def process(self, request: Request) -> Response:
        body = await decode_body(request, ProcessRequest)
        client = self._router.resolve(body.model)
        gone = watch_client(request)
        try:
            result = await until_gone(client.process(body.data, self._options), gone)
        except ClientGone:
            return Response(status_code=_CLIENT_CLOSED_REQUEST)
        finally:
            gone.cancel()
        try:
            answer = msgspec.json.encode({"model": client.model_name, "data": result})
        except (TypeError, ValueError) as error:
            raise TypeError(f"the IO processor of {client.model_name!r} returned what is no JSON: {error}") from error
        return Response(answer, media_type="application/json")


@plugin("endpoint", options=NoOptions)
def create(ctx: EndpointContext, options: NoOptions) -> ProcessEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    del options
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the process endpoint needs a server's router")
    return ProcessEndpoint(ctx.router, request_timeout_s=ctx.facts.request_timeout_s)
