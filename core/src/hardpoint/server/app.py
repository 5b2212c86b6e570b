"""Builds the application from admitted endpoints. The shell has no routes of its own but the two probes."""

from __future__ import annotations

import asyncio
import logging
import re
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.routing import BaseRoute, Route

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError, EngineNotReadyError, InvalidRequestError, PluginConflictError, PluginLoadError
from hardpoint.interfaces import Endpoint, EngineClient
from hardpoint.server.errors import install_handlers
from hardpoint.server.guards import PROBES, AdminRoute, BodyGuard, ExitGuard, HostGuard, KeyGuard, RequestId

_logger = logging.getLogger("hardpoint.server")
Keys = Sequence[str]
STOP_S = 4.0
"""What an endpoint gets to stop."""


class Engines:
    """The router endpoints see: model names to engine clients, which appear once their engine has started.

    While ``draining`` is set, models resolve no more: requests that run go on, new ones are told 503.
    """

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
    config: ServerConfig, engines: Engines, endpoints: Mapping[str, Endpoint], keys: Keys, admin_keys: Keys = ()
) -> Callable[..., Any]:
    """The guarded application.

    Raises ``PluginConflictError`` when two endpoints claim one route or one opens all methods of a path,
    ``PluginLoadError`` for one of unknown access or without a router, ``ConfigError`` for an admin endpoint without
    any admin key.
    """
    # Without a schema there are no pages that show it either; a redirect would be built from the Host header.
    app = FastAPI(openapi_url=None, redirect_slashes=False)
    _add_probes(app, engines)
    app.add_middleware(ExitGuard)
    install_handlers(app, _mount(app, endpoints, bool(admin_keys)))
    return RequestId(HostGuard(KeyGuard(BodyGuard(app, config), keys, admin_keys), config))


@asynccontextmanager
async def started(endpoints: Mapping[str, Endpoint]) -> AsyncIterator[bool]:
    """Runs the endpoints' start, and the stop of those that started. Their errors are raised as they are."""
    async with AsyncExitStack() as stack:
        for name, endpoint in endpoints.items():
            await endpoint.start()
            stack.push_async_callback(_stop, name, endpoint)
        yield True


async def _stop(name: str, endpoint: Endpoint) -> None:
    try:
        await asyncio.wait_for(endpoint.stop(), STOP_S)
    except TimeoutError:
        _logger.warning("endpoint %r did not stop within %g s and is left behind", name, STOP_S)


def _add_probes(app: FastAPI, engines: Engines) -> None:
    async def live() -> JSONResponse:
        return _probe(engines.is_alive)

    async def ready() -> JSONResponse:
        return _probe(engines.is_ready)

    for path, handler in zip(PROBES, (live, ready), strict=True):
        app.add_api_route(path, handler, methods=["GET"])


def _probe(good: bool) -> JSONResponse:
    return JSONResponse({"status": "ok" if good else "unavailable"}, 200 if good else 503)


def _mount(app: FastAPI, endpoints: Mapping[str, Endpoint], has_admin_key: bool) -> dict[Callable[..., Any], Endpoint]:
    claims = [("the server", {"GET"}, path) for path in PROBES]
    owners: dict[Callable[..., Any], Endpoint] = {}
    for name, endpoint in endpoints.items():
        owner, routes = f"endpoint {name!r}", _routes(name, endpoint, has_admin_key)
        for route in routes:
            # Starlette takes a route without methods for every method, so it would hide from the check below.
            if not isinstance(route, Route) or not route.methods:
                raise PluginConflictError(f"{owner} opens something other than an HTTP route with methods: {route!r}")
            # Whoever answers GET answers for HEAD too.
            methods = {"GET" if method == "HEAD" else method for method in route.methods}
            for other, taken, path in claims:
                if other != owner and taken & methods and _overlap(_segments(path), _segments(route.path)):
                    raise PluginConflictError(
                        f"{owner} claims {route.path}, which collides with {other}'s {path}; "
                        "leave one of them out of server.endpoints"
                    )
            claims.append((owner, methods, route.path))
            owners[route.endpoint] = endpoint
        # The routes and not their router, which may get others later.
        app.router.routes.extend(AdminRoute(route) if endpoint.access == "admin" else route for route in routes)
    return owners


def _routes(name: str, endpoint: Endpoint, has_admin_key: bool) -> list[BaseRoute]:
    if endpoint.access not in ("api", "admin"):
        raise PluginLoadError(f"endpoint {name!r} has access {endpoint.access!r}; it must be 'api' or 'admin'")
    if endpoint.access == "admin" and not has_admin_key:
        raise ConfigError(
            f"endpoint {name!r} has admin routes, but no admin key is set: give one with --admin-key-file, "
            "HARDPOINT_ADMIN_KEY or --admin-key, or take the endpoint out of server.endpoints"
        )
    try:
        router: object = endpoint.routes()
    except Exception as error:
        raise PluginLoadError(f"endpoint {name!r}: routes() raised {type(error).__name__}: {error}") from error
    if not isinstance(router, APIRouter):
        raise PluginLoadError(f"endpoint {name!r}: routes() gave a {type(router).__name__}; it must be an APIRouter")
    return list(router.routes)


def _segments(path: str) -> list[str]:
    """``}`` stands for a parameter within one segment; ``{`` stays in one that may reach further, such as a path's."""
    # A pattern's end matches before a final line break too.
    return re.sub(r"{\w+(:(str|int|float|uuid))?}", "}", path.rstrip("\n")).split("/")


def _overlap(one: list[str], other: list[str]) -> bool:
    """Whether a path may match both. In doubt it may: what a parameter's type excludes is not looked at."""
    if not (one and other):
        return one == other
    both = one[0] + other[0]
    same = one[0] == other[0] or ("}" in both and one[0] != "" != other[0])
    return "{" in both or (same and _overlap(one[1:], other[1:]))
