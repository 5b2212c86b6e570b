"""A server with the real guards and endpoints over a fake engine, on a free loopback port or in process."""

from __future__ import annotations

import asyncio
import socket
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import httpx
import openai
import pytest
import uvicorn

from hardpoint.config import ServerConfig
from hardpoint.interfaces.endpoint import EndpointContext, ServerFacts
from hardpoint.interfaces.plugin import NoOptions
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app
from hardpoint.server.run import HttpServer
from hardpoint.testing import FakeEngineClient
from hardpoint_serving.classification import create_classify, create_pooling
from hardpoint_serving.embeddings import create as create_embeddings
from hardpoint_serving.openai import OpenAIOptions
from hardpoint_serving.openai import create as create_openai
from hardpoint_serving.ops import create as create_ops
from hardpoint_serving.scoring import ScoreOptions
from hardpoint_serving.scoring import create as create_score


@dataclass
class Served:
    """``http`` and ``sdk`` talk to ``url``."""

    client: FakeEngineClient
    engines: Engines
    url: str
    http: httpx.AsyncClient
    sdk: openai.AsyncOpenAI

    async def settled(self) -> None:
        """Wait until no generation runs."""
        await self.running(0)

    async def running(self, count: int) -> None:
        """Wait until exactly ``count`` generations run; 2 s at most (the limit for a disconnect)."""
        for _ in range(200):
            if self.client.num_running == count:
                return
            await asyncio.sleep(0.01)
        raise TimeoutError(f"{self.client.num_running} generations run, not {count}")


def build_app(
    client: FakeEngineClient,
    *,
    options: OpenAIOptions | None = None,
    exporters: tuple[Any, ...] = (),
    config: ServerConfig | None = None,
    request_timeout_s: float | None = None,
    score_options: ScoreOptions | None = None,
) -> tuple[Any, Engines]:
    config = config or ServerConfig()
    engines = Engines([client.model_name])
    engines.add(client.model_name, client)
    context = EndpointContext(
        "openai",
        1,
        frozenset({ProcessRole.API}),
        router=engines,
        facts=ServerFacts("0.1", 1_700_000_000, config.max_body_bytes, request_timeout_s=request_timeout_s),
        exporters=exporters,
    )
    endpoints = {
        "openai": create_openai(context, options or OpenAIOptions()),
        "ops": create_ops(context, NoOptions()),
        "embeddings": create_embeddings(context, NoOptions()),
        "classify": create_classify(context, NoOptions()),
        "pooling": create_pooling(context, NoOptions()),
        "score": create_score(context, score_options or ScoreOptions()),
    }
    return create_app(config, engines, endpoints, config.api_key), engines


@pytest.fixture
async def serve() -> AsyncIterator[Callable[..., Any]]:
    """``await serve(client, **settings)`` starts a live server."""
    stops = []

    async def start(client: FakeEngineClient, **settings: Any) -> Served:
        app, engines = build_app(client, **settings)
        listener = socket.create_server(("127.0.0.1", 0))
        server = HttpServer(uvicorn.Config(app, log_level="error", ws="none", lifespan="off"))
        task = asyncio.create_task(server.serve([listener]))
        url = f"http://127.0.0.1:{listener.getsockname()[1]}"
        http = httpx.AsyncClient(base_url=url, timeout=10)
        sdk = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="unused", max_retries=0, timeout=10)

        async def stop() -> None:
            await http.aclose()
            await sdk.close()
            client.hold.set()
            server.should_exit = server.force_exit = True
            await task

        stops.append(stop)
        return Served(client, engines, url, http, sdk)

    yield start
    for stop in stops:
        await stop()


@pytest.fixture
async def served(serve: Callable[..., Any]) -> Served:
    served: Served = await serve(FakeEngineClient())
    return served


@dataclass
class InProcess:
    """No socket: requests go straight to the application. Quick enough for large corpora."""

    client: FakeEngineClient
    engines: Engines
    http: httpx.AsyncClient


@pytest.fixture
async def make_in_process() -> AsyncIterator[Callable[..., InProcess]]:
    opened = []

    def make(client: FakeEngineClient | None = None, **settings: Any) -> InProcess:
        client = client or FakeEngineClient()
        app, engines = build_app(client, **settings)
        http = httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost")
        opened.append(http)
        return InProcess(client, engines, http)

    yield make
    for http in opened:
        await http.aclose()


@pytest.fixture
async def in_process(make_in_process: Callable[..., InProcess]) -> InProcess:
    return make_in_process()
