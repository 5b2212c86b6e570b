"""Builds the application from admitted endpoints. The shell has no routes of its own but the two probes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from typing import Any

from fastapi import FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute

from hardpoint.config import ServerConfig
from hardpoint.errors import EngineNotReadyError, InvalidRequestError, PluginConflictError
from hardpoint.interfaces.endpoint import Endpoint
from hardpoint.interfaces.engine import EngineClient
from hardpoint.server.errors import install_handlers
from hardpoint.server.guards import PROBES, BodyGuard, HostGuard, KeyGuard, RequestId
from hardpoint.version import __version__

__all__ = ["Engines", "create_app"]


class Engines:
    """The router endpoints see: model names to engine clients, which appear once their engine has started."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = tuple(names)
        self._clients: dict[str, EngineClient] = {}
        self.draining = False

    def add(self, name: str, client: EngineClient) -> None:
        self._clients[name] = client

    def names(self) -> tuple[str, ...]:
        return self._names

    def clients(self) -> tuple[EngineClient, ...]:
        return tuple(self._clients.values())

    def resolve(self, model: str | None) -> EngineClient:
        name = self._names[0] if model is None else model
        if name not in self._names:
            served = ", ".join(self._names)
            raise InvalidRequestError(
                f"the model {name[:100]!r} is not served here; served: {served}",
                param="model",
                code="model_not_found",
                status=404,
            )
        client = self._clients.get(name)
        if client is None or self.draining:
            raise EngineNotReadyError(f"model {name!r} is {'draining' if self.draining else 'starting'}")
        return client

    @property
    def is_ready(self) -> bool:
        """Loaded, not draining, and every step loop advances."""
        loaded = len(self._clients) == len(self._names)
        return loaded and not self.draining and all(client.is_ready for client in self._clients.values())

    @property
    def is_alive(self) -> bool:
        """No started engine is dead or stalled; one that still loads counts as alive."""
        return all(client.is_alive for client in self._clients.values())


def create_app(
    config: ServerConfig, engines: Engines, endpoints: Mapping[str, Endpoint], keys: Sequence[str]
) -> Callable[..., Any]:
    """The guarded application. Raises ``PluginConflictError`` when two endpoints claim one route."""

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        for endpoint in endpoints.values():
            await endpoint.start()
        yield
        for endpoint in endpoints.values():
            await endpoint.stop()

    app = FastAPI(
        title="Hardpoint", version=__version__, docs_url=None, redoc_url=None, openapi_url=None, lifespan=lifespan
    )
    _add_probes(app, engines)
    owners = _mount(app, endpoints)
    install_handlers(app, owners)
    guarded: Any = BodyGuard(app, config)
    guarded = KeyGuard(guarded, keys)
    guarded = HostGuard(guarded, config)
    return RequestId(guarded)


def _add_probes(app: FastAPI, engines: Engines) -> None:
    async def live() -> JSONResponse:
        return _probe(engines.is_alive)

    async def ready() -> JSONResponse:
        return _probe(engines.is_ready)

    for path, handler in zip(PROBES, (live, ready), strict=True):
        app.add_api_route(path, handler, methods=["GET"])


def _probe(good: bool) -> JSONResponse:
    return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)


def _mount(app: FastAPI, endpoints: Mapping[str, Endpoint]) -> dict[Callable[..., Any], Endpoint]:
    taken: dict[tuple[str, str], str] = {
        (method, path): "the server's probes" for path in PROBES for method in ("GET",)
    }
    owners: dict[Callable[..., Any], Endpoint] = {}
    for name, endpoint in endpoints.items():
        router = endpoint.routes()
        for route in router.routes:
            for key in _claims(name, route):
                if key in taken:
                    raise PluginConflictError(
                        f"endpoint {name!r} claims {key[0]} {key[1]}, which belongs to {taken[key]}; "
                        "leave one of them out of server.endpoints"
                    )
                taken[key] = f"endpoint {name!r}"
            owners[route.endpoint] = endpoint  # type: ignore[attr-defined]
        app.include_router(router)
    return owners


def _claims(name: str, route: BaseRoute) -> list[tuple[str, str]]:
    path = getattr(route, "path", None)
    methods = getattr(route, "methods", None)
    if path is None or not methods:
        raise PluginConflictError(f"endpoint {name!r} opens something other than an HTTP route: {type(route).__name__}")
    # Parameter names do not make two paths different.
    parts = ["{}" if part.startswith("{") else part for part in path.split("/")]
    return [(method, "/".join(parts)) for method in methods if method != "HEAD"]
