"""Conformance of the plugin kind ``endpoint``: derive from :class:`EndpointSuite`, over the server's real guards."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Iterator, Mapping
from typing import Any, ClassVar

import pytest

from hardpoint.config import ServerConfig
from hardpoint.interfaces import Endpoint, EndpointContext, ServerFacts
from hardpoint.interfaces.endpoint import RequestFailure
from hardpoint.plugins.report import LoadReport
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app, started
from hardpoint.testing.asgi_client import Answer, Call, abandon, send
from hardpoint.testing.fake_engine_client import FakeEngineClient
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["EndpointSuite"]

KEY = "conformance-key-1"
ADMIN_KEY = "conformance-admin-key-1"
LEAKS = re.compile(rb"Traceback|\.py\b|0x[0-9a-f]{6,}|site-packages")
NO_REQUESTS = (b"", b" ", b"{", b"[]", b"null", b"1", b'"text"', b"\xff\xfe{}", b"NaN", b'{"a":1}trailing', b"{'a': 1}")
ODD_VALUES: tuple[Any, ...] = (
    None,
    True,
    -1,
    0,
    10**30,
    1.5,
    -1e308,
    "",
    "x",
    "\x00",
    "\ud800",
    "y" * 20_000,
    [],
    [[]],
    [None],
    {},
    {"a": {"b": []}},
)


class EndpointSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.Endpoint`.

    ``calls`` are valid requests, at least one per route that matters; each must succeed over a fake engine whose model
    is called ``fake``. ``aborts_abandoned`` declares that work ends when its client goes away. Requests carry an admin
    key where the endpoint's ``access`` asks for one.
    """

    kind: ClassVar[str] = "endpoint"
    torch_free: ClassVar[bool] = True
    calls: ClassVar[tuple[Call, ...]] = ()
    aborts_abandoned: ClassVar[bool] = True

    def create_endpoint(self, ctx: EndpointContext) -> Endpoint:
        """The endpoint under test, as its factory makes it."""
        made: Endpoint = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def client(self) -> FakeEngineClient:
        return FakeEngineClient()

    @pytest.fixture
    def endpoint(self, engines: Engines) -> Endpoint:
        roles = frozenset({ProcessRole.API})
        facts = ServerFacts("0.0", 1_700_000_000, ServerConfig().max_body_bytes, kv_events=True)
        report = LoadReport("process 0 (api)", 0, ("api",), None, "0.0", ())
        shared: dict[str, Any] = {"router": engines, "facts": facts, "load_report": lambda: report}
        return self.create_endpoint(EndpointContext("under-test", 1, roles, **shared))

    @pytest.fixture
    def engines(self, client: FakeEngineClient) -> Engines:
        engines = Engines([client.model_name])
        engines.add(client.model_name, client)
        return engines

    @pytest.fixture
    def app(self, endpoint: Endpoint, engines: Engines) -> Any:
        for client in engines.clients():
            endpoint.engine_started(client)
        return create_app(ServerConfig(), engines, {"under-test": endpoint}, (KEY,), (ADMIN_KEY,))

    @pytest.fixture
    def key(self, endpoint: Endpoint) -> str:
        """The least key that opens the endpoint's routes."""
        return ADMIN_KEY if endpoint.access == "admin" else KEY

    def test_it_opens_routes_and_says_how_to_call_them(self, endpoint: Endpoint) -> None:
        assert endpoint.routes().routes, "an endpoint without routes"
        assert self.calls, "the suite needs valid requests: set 'calls'"

    def test_routes_are_the_same_each_time(self, endpoint: Endpoint) -> None:
        first, second = (sorted(getattr(route, "path", "") for route in endpoint.routes().routes) for _ in range(2))
        assert first == second

    def test_it_starts_and_stops(self, endpoint: Endpoint) -> None:
        async def cycle() -> None:
            for _ in range(2):
                async with started({"under-test": endpoint}):
                    pass

        asyncio.run(cycle())

    def test_valid_requests_succeed(self, app: Any, client: FakeEngineClient, key: str) -> None:
        for call in self.calls:
            answer = asyncio.run(send(app, call, key))
            assert 200 <= answer.status < 300, f"{call.method} {call.path}: {answer.status} {answer.body[:200]!r}"
        assert client.num_running == 0

    def test_nothing_is_open_without_a_key(self, app: Any, client: FakeEngineClient) -> None:
        for call in self.calls:
            for key in (None, "", "another-key"):
                answer = asyncio.run(send(app, call, key))
                assert answer.status == 401, f"{call.path} answered {answer.status} without a valid key"
        assert client.seen == [], "a request without a key reached the engine"

    def test_an_api_key_opens_no_admin_route(self, app: Any, endpoint: Endpoint, client: FakeEngineClient) -> None:
        """Users of the model are not its operators: 403, and nothing is done."""
        if endpoint.access == "api":
            pytest.skip("an API key opens this endpoint's routes")
        for call in self.calls:
            answer = asyncio.run(send(app, call, KEY))
            assert answer.status == 403, f"{call.path} answered {answer.status} to an API key"
            check_error(endpoint, answer)
        assert client.seen == [], "a request with an API key reached the engine"

    def test_what_is_called_admin_is_for_admins(self, endpoint: Endpoint) -> None:
        """Operators may rely on paths: below /admin nothing is open to an API key."""
        named = [
            path for route in endpoint.routes().routes if (path := getattr(route, "path", "")).startswith("/admin")
        ]
        assert endpoint.access == "admin" or not named, f"set access = 'admin' for {', '.join(named)}"

    def test_bodies_that_are_no_request(self, app: Any, endpoint: Endpoint, client: FakeEngineClient, key: str) -> None:
        for call in self._with_body():
            for content in NO_REQUESTS:
                answer = asyncio.run(send(app, Call(call.method, call.path, content), key))
                assert 400 <= answer.status < 500, f"{call.path} answered {answer.status} to {content!r}"
                check_error(endpoint, answer)
        assert client.num_running == 0

    def test_odd_values(self, app: Any, endpoint: Endpoint, client: FakeEngineClient, key: str) -> None:
        """Any field with any value: refused or answered, never a failure of the server."""
        for call in self._with_body():
            for changed in odd_bodies(call.body):
                answer = asyncio.run(send(app, Call(call.method, call.path, changed), key))
                assert answer.status < 500, f"{call.path} answered {answer.status} to {str(changed)[:200]}"
                if answer.status >= 400:
                    check_error(endpoint, answer)
        assert client.num_running == 0

    def test_odd_paths(self, app: Any, key: str) -> None:
        """What a route takes from its path or query is input as well."""
        for call in self.calls:
            for path in (f"{call.path}?x=%00&x=1&%ff", f"{call.path}/%2e%2e", f"{call.path}{'a' * 3_000}"):
                answer = asyncio.run(send(app, Call(call.method, path, call.body), key))
                assert answer.status < 500, f"{path[:80]} answered {answer.status}"
                assert not LEAKS.search(answer.body)

    @pytest.mark.parametrize("state", ["dead", "not ready", "overloaded"])
    def test_an_engine_in_trouble(
        self, app: Any, endpoint: Endpoint, client: FakeEngineClient, key: str, state: str
    ) -> None:
        """Retry later, in the form of errors, and nothing about the inside."""
        if state == "dead":
            client.die("Traceback in /secret/worker.py")
        client.is_ready = state == "overloaded"
        client.queue_limit = 0 if state == "overloaded" else None
        for call in self.calls:
            answer = asyncio.run(send(app, call, key))
            allowed = (200, 429) if state == "overloaded" else (200, 503)
            assert answer.status in allowed, f"{call.path} answered {answer.status} while the engine is {state}"
            assert not LEAKS.search(answer.body)
            if answer.status == 429:
                assert "retry-after" in answer.headers
                check_error(endpoint, answer)

    def test_abandoned_work_ends(self, app: Any, client: FakeEngineClient, key: str) -> None:
        """Within two seconds of the client's leaving."""
        if not self.aborts_abandoned:
            pytest.skip("the endpoint declares that work goes on when its client has left")

        async def leave(call: Call) -> None:
            client.hold.clear()
            await abandon(app, call, lambda: client.num_running > 0, key)

        for call in self.calls:
            # A call that generates nothing is answered at once.
            asyncio.run(leave(call))
            assert client.num_running == 0

    def _with_body(self) -> Iterator[Call]:
        found = [call for call in self.calls if isinstance(call.body, Mapping)]
        if not found:
            pytest.skip("no route of this endpoint takes a JSON body")
        yield from found


def odd_bodies(body: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    """``body`` with one field missing, or of an odd value; and with a field that nobody knows."""
    yield {**body, "no-such-field": 1}
    for field in body:
        yield {name: value for name, value in body.items() if name != field}
        for value in ODD_VALUES:
            yield {**body, field: value}


def check_error(endpoint: Endpoint, answer: Answer) -> None:
    """The body has the fields of the endpoint's own form of errors, or of the server's, and tells nothing internal."""
    assert not LEAKS.search(answer.body), f"an error shows the inside: {answer.body[:300]!r}"
    assert answer.headers.get("content-type", "").startswith("application/json"), "errors are JSON"
    sample = RequestFailure(answer.status, "text")
    forms = [sorted(endpoint.error_body(sample)), sorted(sample.body)]
    assert sorted(answer.json()) in forms, f"not the form of an error: {answer.body[:200]!r}"
