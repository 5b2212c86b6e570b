"""The ``kv_events`` endpoint: routers follow which prefixes each engine has cached, as server-sent events."""

from __future__ import annotations

from collections.abc import AsyncIterator, Callable
from typing import ClassVar, Literal

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.errors import ConfigError, EngineDeadError, InvalidRequestError
from hardpoint.interfaces.endpoint import Endpoint, EndpointContext, RequestFailure
from hardpoint.interfaces.engine import EngineClient, ModelRouter
from hardpoint.interfaces.plugin import plugin
from hardpoint_serving.kv_feed import Cursor, EventFeed
from hardpoint_serving.outputs import watch_client
from hardpoint_serving.sse import EventStream, event

__all__ = ["KVEventsEndpoint", "KVEventsOptions", "create"]

_QUERY = ("model", "after", "follow")
_LOOK_S = 0.5
"""How often a stream without news looks whether its engine lives and the server goes on."""


class KVEventsOptions(BaseModel):
    """Options under ``plugins.endpoint.kv_events``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    replay_bytes: int = Field(
        default=64 * 2**20, ge=4096, le=2**32, description="newest events kept per model for readers that come back"
    )
    max_readers: int = Field(default=16, ge=1, le=1000, description="streams open at a time; more get a 429")
    keepalive_s: float = Field(default=15.0, gt=0, le=600, description="seconds of silence before a comment is sent")


class KVEventsEndpoint(Endpoint):
    """``GET /kv_events``. It takes an admin key, since it shows the tokens of everybody's prompts."""

    access: ClassVar[Literal["api", "admin"]] = "admin"

    def __init__(
        self, router: ModelRouter, options: KVEventsOptions, is_draining: Callable[[], bool] = lambda: False
    ) -> None:
        self._router = router
        self._options = options
        self._is_draining = is_draining
        self._feeds: dict[str, EventFeed] = {}
        self._num_readers = 0

    def engine_started(self, client: EngineClient) -> None:
        """Raises ``ConfigError`` where the engine collects no events: the stream would be silent for good."""
        feed = EventFeed(self._options.replay_bytes)
        client.on_kv_events(feed.add)
        self._feeds[client.model_name] = feed

    def routes(self) -> APIRouter:
        router = APIRouter()
        router.add_api_route("/kv_events", self.follow, methods=["GET"], response_model=None)
        return router

    async def follow(self, request: Request) -> Response:
        """Query: ``model``, ``after`` (a cursor; the header ``Last-Event-ID`` does as well), ``follow=false`` to end
        with what there is."""
        query = request.query_params
        for name in query:
            if name not in _QUERY:
                raise InvalidRequestError(f"unknown {name[:40]!r}; allowed: {', '.join(_QUERY)}", param=name[:40])
        client = self._router.resolve(query.get("model"))
        if client.dead_reason is not None:
            raise EngineDeadError(client.dead_reason)
        cursor = Cursor.parse(query.get("after") or request.headers.get("last-event-id") or "0")
        goes_on = query.get("follow", "true")
        if goes_on not in ("true", "false"):
            raise InvalidRequestError(f"follow is {goes_on[:40]!r}; allowed: true, false", param="follow")
        if self._num_readers >= self._options.max_readers:
            return self._full()
        self._num_readers += 1
        return EventStream(
            self._frames(client, cursor, goes_on == "true"),
            gone=watch_client(request),
            close=self._leave,
            error_body=self.error_body,
            keepalive_s=self._options.keepalive_s,
        )

    def _full(self) -> Response:
        """A 429 of its own text: the usual one speaks of requests that wait, and none does."""
        message = (
            f"{self._num_readers} readers follow the events, as many as may; end one, or raise the server's option "
            "plugins.endpoint.kv_events.max_readers"
        )
        failure = RequestFailure(429, message, None, "overloaded", {"Retry-After": "1"})
        return JSONResponse(dict(self.error_body(failure)), failure.status, dict(failure.headers))

    async def _leave(self) -> None:
        self._num_readers -= 1

    async def _frames(self, client: EngineClient, cursor: Cursor, goes_on: bool) -> AsyncIterator[bytes]:
        feed = self._feeds[client.model_name]
        foreign = feed.is_foreign(cursor)
        sequence = 0 if foreign else cursor.sequence
        yield b"event: start\n" + event({"model": client.model_name, "instance": feed.instance, "last": feed.last})
        if foreign:
            yield _gap("the cursor is of another instance", cursor.sequence + 1, None)
        while not self._is_draining():
            portion = feed.after(sequence)
            if portion.lost is not None:
                yield _gap("these are no longer kept", *portion.lost)
            sequence = portion.sequence
            for frame in portion.frames:
                yield frame
            if portion.frames:
                continue
            if not goes_on:
                return
            if client.dead_reason is not None:
                raise EngineDeadError(client.dead_reason)
            await feed.wait(sequence, _LOOK_S)


def _gap(reason: str, first: int, last: int | None) -> bytes:
    """Whoever reads this knows nothing any more: what was cached before may be gone."""
    return b"event: gap\n" + event({"reason": reason, "first": first, "last": last})


@plugin("endpoint", options=KVEventsOptions)
def create(ctx: EndpointContext, options: KVEventsOptions) -> KVEventsEndpoint:
    """Raises ``ConfigError`` outside a server, where there is no router, and where engines will tell no events."""
    if ctx.router is None or ctx.facts is None:
        raise ConfigError("the kv_events endpoint needs a server's router")
    if not ctx.facts.kv_events:
        raise ConfigError(
            "the endpoint kv_events would be silent: set --kv-events (cache.kv_events) and leave the prefix cache on, "
            "or take the endpoint out of server.endpoints"
        )
    return KVEventsEndpoint(ctx.router, options, ctx.is_draining)
