"""The ``ops`` endpoint: health, version, metrics and load. The two probes without a key belong to the server itself."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from fastapi import APIRouter
from fastapi.responses import JSONResponse, Response

from hardpoint.errors import ConfigError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext, ServerFacts
from hardpoint.interfaces.engine import EngineClient, ModelRouter
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import SchedulerStats
from hardpoint.interfaces.stat_logger import MetricsExporter

__all__ = ["OpsEndpoint", "create"]


class OpsEndpoint(Endpoint):
    """``/health`` tells whether every model is served; ``/metrics`` is what the scrapeable stat loggers expose."""

    def __init__(self, router: ModelRouter, facts: ServerFacts, exporters: Sequence[MetricsExporter]) -> None:
        self._router = router
        self._facts = facts
        self._exporters = tuple(exporters)

    def routes(self) -> APIRouter:
        router = APIRouter()
        for path, handler in (
            ("/health", self.health),
            ("/version", self.version),
            ("/metrics", self.metrics),
            ("/load", self.load),
        ):
            router.add_api_route(path, handler, methods=["GET"], response_model=None)
        return router

    async def health(self) -> Response:
        clients = self._router.clients()
        models = dict.fromkeys(self._router.names(), "starting")
        models.update({client.model_name: _state(client) for client in clients})
        healthy = all(state == "ready" for state in models.values())
        return JSONResponse({"status": "ok" if healthy else "unavailable", "models": models}, 200 if healthy else 503)

    async def version(self) -> Response:
        return JSONResponse({"version": self._facts.version})

    async def metrics(self) -> Response:
        parts = [exporter.exposition() for exporter in self._exporters]
        media_type = parts[0][0] if parts else "text/plain; version=0.0.4; charset=utf-8"
        return Response(b"".join(body for _, body in parts), headers={"content-type": media_type})

    async def load(self) -> Response:
        models = {client.model_name: _load(client) for client in self._router.clients()}
        total = sum(load["running"] + load["waiting"] for load in models.values())
        return JSONResponse({"server_load": total, "models": models})


def _state(client: EngineClient) -> str:
    if not client.is_alive:
        return "dead"
    return "ready" if client.is_ready else "not ready"


def _load(client: EngineClient) -> dict[str, Any]:
    # The last figures of an engine that died would say for good that its requests still run.
    stats = (client.stats() if client.is_alive else None) or SchedulerStats()
    return {
        "running": stats.num_running,
        "waiting": stats.num_waiting,
        "kv_cache_usage": round(stats.kv_cache_usage, 4),
        "free_kv_blocks": stats.num_free_blocks,
        "total_kv_blocks": stats.num_total_blocks,
    }


@plugin("endpoint", options=NoOptions)
def create(ctx: EndpointContext, options: NoOptions) -> OpsEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router."""
    del options
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the ops endpoint needs a server's router")
    return OpsEndpoint(ctx.router, ctx.facts, ctx.exporters)
