"""A small endpoint and applications around it, for the tests of the shell."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import httpx
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse

from hardpoint.config import ServerConfig
from hardpoint.errors import EngineDeadError, EngineNotReadyError, InvalidRequestError, OverloadedError
from hardpoint.interfaces.endpoint import Endpoint, RequestFailure
from hardpoint.server.app import Engines, create_app
from hardpoint.testing import FakeEngineClient

RAISED: dict[str, Callable[[], Exception]] = {
    "invalid": lambda: InvalidRequestError("n is 9; at most 3", param="n", code="invalid_value"),
    "gone": lambda: InvalidRequestError("no such thing", status=410),
    "overloaded": lambda: OverloadedError("queue in /secret/path at 0xdeadbeef00", retry_after_s=2.6),
    "notready": lambda: EngineNotReadyError("loading /secret/path"),
    "dead": lambda: EngineDeadError("Traceback in /secret/path.py"),
    "bug": lambda: ValueError("Traceback: <object at 0x7f0000000000> in /secret/path.py"),
}


class EchoEndpoint(Endpoint):
    """Routes under ``prefix``. ``custom`` gives errors a form of its own."""

    def __init__(self, prefix: str = "/echo", *, custom: bool = False) -> None:
        self.prefix = prefix
        self.custom = custom
        self.life: list[str] = []

    def routes(self) -> APIRouter:
        router = APIRouter()

        @router.post(self.prefix)
        async def echo(request: Request) -> JSONResponse:
            return JSONResponse({"size": len(await request.body())})

        @router.get(self.prefix + "/raise/{name}")
        async def fail(name: str) -> None:
            raise RAISED[name]()

        @router.get(self.prefix + "/typed/{number}")
        async def typed(number: int) -> int:
            return number

        return router

    def error_body(self, failure: RequestFailure) -> Mapping[str, object]:
        return {"oops": failure.message} if self.custom else failure.body

    async def start(self) -> None:
        self.life.append("start")

    async def stop(self) -> None:
        self.life.append("stop")


def make_app(
    config: ServerConfig | None = None,
    *,
    endpoints: Mapping[str, Endpoint] | None = None,
    keys: tuple[str, ...] = (),
    client: FakeEngineClient | None = None,
) -> tuple[Any, Engines]:
    engines = Engines(["fake"])
    if client is not None:
        engines.add("fake", client)
    if endpoints is None:
        endpoints = {"echo": EchoEndpoint()}
    return create_app(config or ServerConfig(), engines, endpoints, keys), engines


def http(app: Any) -> httpx.AsyncClient:
    transport = httpx.ASGITransport(app, raise_app_exceptions=False)
    return httpx.AsyncClient(transport=transport, base_url="http://127.0.0.1")
