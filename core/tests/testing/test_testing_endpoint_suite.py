"""The kit for endpoints accepts a small correct one and rejects each mutant."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator
from typing import Any, ClassVar

import pytest
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, StreamingResponse

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import Endpoint, EndpointContext, EngineClient, ModelRouter, Prompt, SamplingParams
from hardpoint.testing.asgi_client import Call
from hardpoint.testing.endpoint_suite import EndpointSuite
from hardpoint.testing.suite_runner import run_suite


class SayEndpoint(Endpoint):
    """``POST /say {"text", "count"}`` streams what the model answers."""

    def __init__(self, router: ModelRouter | None) -> None:
        assert router is not None
        self.router = router

    def routes(self) -> APIRouter:
        routes = APIRouter()
        routes.add_api_route("/say", self.say, methods=["POST"], response_model=None)
        return routes

    async def say(self, request: Request) -> Any:
        text, count = self.read(await request.body())
        stream = self.engine().generate(Prompt(text=text), SamplingParams(max_tokens=count))
        # The first output decides about the status: refusals come before anything is sent.
        first = await anext(stream)
        return StreamingResponse(self.stream(first, stream), media_type="text/plain")

    def engine(self) -> EngineClient:
        return self.router.resolve(None)

    async def stream(self, first: Any, rest: AsyncGenerator[Any, None]) -> AsyncGenerator[str, None]:
        try:
            yield first.outputs[0].text
            async for output in rest:
                yield output.outputs[0].text
        finally:
            await rest.aclose()

    def read(self, body: bytes) -> tuple[str, int]:
        try:
            fields = json.loads(body)
        except ValueError:
            raise InvalidRequestError("the body is not JSON") from None
        if not isinstance(fields, dict) or not isinstance(fields.get("text"), str) or not fields["text"].isprintable():
            raise InvalidRequestError("'text' must be a printable string", param="text")
        if type(fields.get("count")) is not int or not 0 < fields["count"] < 100:
            raise InvalidRequestError("'count' must be 1 to 99", param="count")
        return fields["text"], fields["count"]


def make_suite(kind: type[SayEndpoint]) -> type[EndpointSuite]:
    class Suite(EndpointSuite):
        calls: ClassVar[tuple[Call, ...]] = (Call("POST", "/say", {"text": "hi", "count": 5}),)

        def create_endpoint(self, ctx: EndpointContext) -> Endpoint:
            return kind(ctx.router)

    return Suite


class SayToAdmins(SayEndpoint):
    access = "admin"


class TestSayEndpoint(make_suite(SayEndpoint)):  # type: ignore[misc]
    pass


class TestSayToAdmins(make_suite(SayToAdmins)):  # type: ignore[misc]
    pass


class TrustsTheBody(SayEndpoint):
    def read(self, body: bytes) -> tuple[str, int]:
        fields = json.loads(body)
        return fields["text"], fields["count"]


class ShowsExceptions(SayEndpoint):
    async def say(self, request: Request) -> Any:
        try:
            return await super().say(request)
        except InvalidRequestError as error:
            return JSONResponse({"error": f"{__file__}: {error!r}"}, 400)


class AnswersAnyway(SayEndpoint):
    """Takes anything for a request."""

    def read(self, body: bytes) -> tuple[str, int]:
        try:
            return super().read(body)
        except InvalidRequestError:
            return "hi", 5


class HidesTrouble(SayEndpoint):
    async def say(self, request: Request) -> Any:
        try:
            return await super().say(request)
        except InvalidRequestError:
            raise
        except Exception as error:
            return JSONResponse({"error": str(error)}, 500)


class GoesOnAlone(SayEndpoint):
    """Collects the answer in a task that nobody cancels."""

    def __init__(self, router: ModelRouter | None) -> None:
        super().__init__(router)
        self.tasks: list[asyncio.Task[list[Any]]] = []

    async def say(self, request: Request) -> Any:
        text, count = self.read(await request.body())
        stream = self.engine().generate(Prompt(text=text), SamplingParams(max_tokens=count))

        async def collect() -> list[Any]:
            return [output async for output in stream]

        self.tasks.append(asyncio.create_task(collect()))
        outputs = await asyncio.shield(self.tasks[-1])
        return {"text": outputs[-1].outputs[0].text}


class WithoutRoutes(SayEndpoint):
    def routes(self) -> APIRouter:
        return APIRouter()


class StartsOnce(SayEndpoint):
    is_started = False

    async def start(self) -> None:
        if self.is_started:
            raise RuntimeError("started twice")
        self.is_started = True


class ChangesItsMind(SayEndpoint):
    """Its routes are open by the time it calls them admin routes."""

    num_asked = 0

    @property
    def access(self) -> Any:  # type: ignore[override]
        self.num_asked += 1
        return "api" if self.num_asked <= 3 else "admin"


class OpenAdmin(SayEndpoint):
    def routes(self) -> APIRouter:
        routes = super().routes()
        routes.add_api_route("/admin/say", self.say, methods=["POST"], response_model=None)
        return routes


MUTANTS: dict[type[SayEndpoint], str] = {
    TrustsTheBody: "test_bodies_that_are_no_request",
    ShowsExceptions: "test_odd_values",
    AnswersAnyway: "test_bodies_that_are_no_request",
    HidesTrouble: "test_an_engine_in_trouble",
    GoesOnAlone: "test_abandoned_work_ends",
    WithoutRoutes: "test_it_opens_routes_and_says_how_to_call_them",
    StartsOnce: "test_it_starts_and_stops",
    ChangesItsMind: "test_an_api_key_opens_no_admin_route",
    OpenAdmin: "test_what_is_called_admin_is_for_admins",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[SayEndpoint]) -> None:
    """L12.25."""
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed
