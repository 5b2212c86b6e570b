"""``POST /v1/process``: what a task's client is told (R12.43, and I12.2 for the routes)."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from hardpoint.config import ServerConfig
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import (
    EndpointContext,
    IOProcessor,
    IORequest,
    NoOptions,
    Prompt,
    RequestOutput,
    SamplingParams,
    ServerFacts,
)
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.server.app import Engines, create_app
from hardpoint.testing import FakeEngineClient
from hardpoint.testing.asgi_client import Answer, Call, abandon, send
from hardpoint_serving.process import create

KEY = "a-key-of-this-test"
TASK = Call("POST", "/v1/process", {"model": "fake", "data": {"texts": ["a", "b"]}})


class Lengths(IOProcessor):
    """``{"texts": [...]}`` becomes the length of each answer; ``result`` replaces the whole answer."""

    def __init__(self, result: Any = None) -> None:
        self.result = result

    def parse(self, data: Any) -> Sequence[IORequest]:
        if not isinstance(data, dict) or set(data) != {"texts"}:
            raise InvalidRequestError("data must hold 'texts'", param="data", code="not_texts", status=422)
        return [IORequest(Prompt(text=text), SamplingParams(max_tokens=6), state=text) for text in data["texts"]]

    def finish(self, requests: Sequence[IORequest], outputs: Sequence[RequestOutput]) -> Any:
        if self.result is not None:
            return self.result
        rows = zip(requests, outputs, strict=True)
        return {request.state: len(output.outputs[0].text) for request, output in rows}


def make_app(client: FakeEngineClient, request_timeout_s: float | None = None) -> Any:
    engines = Engines([client.model_name])
    engines.add(client.model_name, client)
    facts = ServerFacts("0.1", 0, 1 << 20, request_timeout_s=request_timeout_s)
    context = EndpointContext("process", 1, frozenset({ProcessRole.API}), router=engines, facts=facts)
    return create_app(ServerConfig(), engines, {"process": create(context, NoOptions())}, (KEY,))


def ask(client: FakeEngineClient, call: Call = TASK, **facts: Any) -> Answer:
    return asyncio.run(send(make_app(client, **facts), call, KEY))


def test_a_task_is_answered_with_the_processors_result() -> None:
    client = FakeEngineClient(io_processor=Lengths())
    answer = ask(client, request_timeout_s=5.0)
    assert (answer.status, answer.json()) == (200, {"model": "fake", "data": {"a": 6, "b": 6}})
    options = [options for _, _, options in client.seen]
    assert [one and one.timeout_s for one in options] == [5.0, 5.0], "the operator's ceiling holds for each prompt"


def test_a_refusal_has_the_processors_own_status_and_text() -> None:
    answer = ask(FakeEngineClient(io_processor=Lengths()), Call("POST", "/v1/process", {"data": 1}))
    error = answer.json()["error"]
    assert (answer.status, error["param"], error["code"]) == (422, "data", "not_texts")
    assert error["message"] == "data must hold 'texts'"


def test_a_model_without_processor_says_what_is_missing() -> None:
    answer = ask(FakeEngineClient())
    assert answer.status == 400
    assert answer.json()["error"]["code"] == "no_io_processor"
    assert "--io-processor" in answer.json()["error"]["message"]


def test_an_unknown_model_is_not_found() -> None:
    call = Call("POST", "/v1/process", {"model": "other", "data": 1})
    answer = ask(FakeEngineClient(io_processor=Lengths()), call)
    assert (answer.status, answer.json()["error"]["code"]) == (404, "model_not_found")


@pytest.mark.parametrize("body", [{}, {"model": "fake"}, {"data": 1, "extra": 2}, {"data": 1, "model": 7}])
def test_bodies_of_another_form_are_refused(body: dict[str, Any]) -> None:
    assert ask(FakeEngineClient(io_processor=Lengths()), Call("POST", "/v1/process", body)).status == 400


def test_a_result_that_is_no_json_is_the_servers_fault() -> None:
    with pytest.raises(TypeError, match="IO processor of 'fake' returned what is no JSON"):
        ask(FakeEngineClient(io_processor=Lengths(result=object())))


def test_a_failed_request_fails_the_task() -> None:
    client = FakeEngineClient(io_processor=Lengths())
    client.fail_after = 1
    answer = ask(client)
    assert (answer.status, answer.json()["error"]["code"]) == (500, "request_failed")


def test_a_client_that_leaves_ends_all_its_prompts() -> None:
    client = FakeEngineClient(io_processor=Lengths())

    async def leave() -> bool:
        client.hold.clear()
        return await abandon(make_app(client), TASK, lambda: client.num_running == 2, KEY)

    assert asyncio.run(leave())
    assert (client.num_running, client.num_aborted) == (0, 2)


def test_it_opens_no_route_unless_listed() -> None:
    """R12.48, R12.51: not even among the defaults."""
    refused = [entry.name for entry in build_plan(discover(), PluginSelection(endpoints=("openai",))).refused]
    assert "process" in refused
    assert "process" not in ServerConfig().endpoints
    assert build_plan(discover(), PluginSelection(endpoints=("process",))).find("endpoint", "process").active


def test_without_a_server_it_cannot_be_made() -> None:
    with pytest.raises(ConfigError, match="needs a server's router"):
        create(EndpointContext("process", 1, frozenset({ProcessRole.API})), NoOptions())
