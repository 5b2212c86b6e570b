"""What the rules need to know of this endpoint: valid requests, one per route."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.asgi_client import Call
from hardpoint.testing.endpoint_suite import EndpointSuite


class TestHello(EndpointSuite):
    plugin = "hello"
    calls: ClassVar[tuple[Call, ...]] = (Call("GET", "/hello"), Call("GET", "/hello/Ada"))
    aborts_abandoned: ClassVar[bool] = False
