"""The ``admin`` endpoint: what each process of the server made of its plugins, and clearing the prefix cache."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from typing import ClassVar, Literal

import msgspec
from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, EngineNotReadyError, HardpointError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext
from hardpoint.interfaces.engine import EngineClient, ModelRouter
from hardpoint.interfaces.plugin import plugin
from hardpoint.process import LoadReport

__all__ = ["AdminEndpoint", "AdminOptions", "create"]


class AdminOptions(BaseModel):
    """Options under ``plugins.endpoint.admin``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    answer_timeout_s: float = Field(
        default=10.0, gt=0, le=600, description="seconds that an engine gets to report, between two of its steps"
    )


class _Unreachable(msgspec.Struct, frozen=True):
    """An engine whose processes could not be asked."""

    model: str
    reason: str


class _Status(msgspec.Struct, frozen=True):
    processes: tuple[LoadReport, ...]
    unreachable: tuple[_Unreachable, ...]


class AdminEndpoint(Endpoint):
    """Its routes take an admin key only."""

    access: ClassVar[Literal["api", "admin"]] = "admin"

    def __init__(self, router: ModelRouter, own_report: Callable[[], LoadReport], options: AdminOptions) -> None:
        self._router = router
        self._own_report = own_report
        self._timeout_s = options.answer_timeout_s

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/admin/plugins", self.plugins, methods=["GET"], response_model=None)
        router.add_api_route(
            "/admin/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"], response_model=None
        )
        return router

    async def plugins(self) -> Response:
        """Reports of the API process, then of each engine and its workers. Engines that do not answer are named."""
        clients = {client.model_name: client for client in self._router.clients()}
        answers = await asyncio.gather(*(self._ask(name, clients.get(name)) for name in self._router.names()))
        reports = [report for answer in answers if not isinstance(answer, _Unreachable) for report in answer]
        missing = tuple(answer for answer in answers if isinstance(answer, _Unreachable))
        status = _Status((self._own_report(), *reports), missing)
        return Response(msgspec.json.encode(status), media_type="application/json")

    async def _ask(self, name: str, client: EngineClient | None) -> Sequence[LoadReport] | _Unreachable:
        if client is None:
            return _Unreachable(name, "it is still starting")
        if not client.is_alive:
            return _Unreachable(name, "it has stopped; the server's log says why")
        try:
            async with asyncio.timeout(self._timeout_s):
                return await client.load_reports()
        except TimeoutError:
            return _Unreachable(name, f"it did not answer within {self._timeout_s:g} s")
        except HardpointError as error:
            return _Unreachable(name, f"it failed to answer: {error}")

    async def reset_prefix_cache(self) -> Response:
        """By model, whether its cache was dropped; False where running requests hold blocks."""
        clients = self._router.clients()
        if len(clients) < len(self._router.names()):
            raise EngineNotReadyError("a model is still starting")
        return JSONResponse({"reset": {client.model_name: await client.reset_prefix_cache() for client in clients}})


@plugin("endpoint", options=AdminOptions)
def create(ctx: EndpointContext, options: AdminOptions) -> AdminEndpoint:
    """Raises ``ConfigError`` outside a server, where there are no processes to ask."""
    if ctx.router is None or ctx.load_report is None:
        raise ConfigError("the admin endpoint needs a server's router and load report")
    return AdminEndpoint(ctx.router, ctx.load_report, options)
