"""The endpoint keeps the contract of its kind."""

from __future__ import annotations

from typing import ClassVar

from hello_endpoint import HelloOptions, create

from hardpoint.interfaces import Endpoint, EndpointContext
from hardpoint.testing.asgi_client import Call
from hardpoint.testing.endpoint_suite import EndpointSuite


class TestHello(EndpointSuite):
    calls: ClassVar[tuple[Call, ...]] = (Call("GET", "/hello"), Call("GET", "/hello/Ada"))
    aborts_abandoned: ClassVar[bool] = False

    def create_endpoint(self, ctx: EndpointContext) -> Endpoint:
        return create(ctx, HelloOptions())
