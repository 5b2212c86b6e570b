"""What travels on the wire while a client reads, waits, stalls or leaves."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from typing import Any

import pytest

from hardpoint.testing import FakeEngineClient
from hardpoint_serving.openai import OpenAIOptions

CHAT: dict[str, Any] = {"messages": [{"role": "user", "content": "hi"}]}
ROUTES: dict[str, dict[str, Any]] = {"/v1/chat/completions": CHAT, "/v1/completions": {"prompt": "hi"}}


async def read_raw(served: Any, route: str, body: dict[str, Any]) -> str:
    async with served.http.stream("POST", route, json=body) as response:
        assert response.status_code == 200
        assert response.headers["content-type"].startswith("text/event-stream")
        assert response.headers["cache-control"] == "no-cache"
        return "".join([part async for part in response.aiter_text()])


@pytest.mark.parametrize("route", list(ROUTES))
async def test_frames_are_one_data_line_each_and_end_with_done(served: Any, route: str) -> None:
    text = await read_raw(served, route, {**ROUTES[route], "stream": True})
    frames = text.split("\n\n")
    assert frames.pop() == ""
    assert frames.pop() == "data: [DONE]"
    assert all(frame.startswith("data: {") and "\n" not in frame for frame in frames)
    assert len({json.loads(frame[6:])["id"] for frame in frames}) == 1


async def test_chat_chunks_have_exactly_the_expected_keys(served: Any) -> None:
    text = await read_raw(served, "/v1/chat/completions", {**CHAT, "stream": True, "max_tokens": 1})
    first, second, third = (json.loads(frame[6:]) for frame in text.split("\n\n")[:3])
    common = {"id", "object", "created", "model", "system_fingerprint", "choices"}
    assert set(first) == set(second) == set(third) == common
    assert first["choices"] == [
        {"index": 0, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}
    ]
    assert second["choices"] == [{"index": 0, "delta": {"content": "H"}, "logprobs": None, "finish_reason": None}]
    assert third["choices"] == [
        {"index": 0, "delta": {}, "logprobs": None, "finish_reason": "length", "stop_reason": None}
    ]


async def test_usage_is_null_in_all_chunks_but_the_last(served: Any) -> None:
    for route, body in ROUTES.items():
        text = await read_raw(served, route, {**body, "stream": True, "stream_options": {"include_usage": True}})
        chunks = [json.loads(frame[6:]) for frame in text.split("\n\n")[:-2]]
        assert all(chunk["usage"] is None for chunk in chunks[:-1])
        assert chunks[-1]["choices"] == []
        assert chunks[-1]["usage"]["completion_tokens"] == 12


async def test_text_beyond_ascii_survives(serve: Callable[..., Any]) -> None:
    served = await serve(FakeEngineClient(reply='a"\\\n\u2028b'))
    whole = (await served.http.post("/v1/completions", json={"prompt": "x"})).json()["choices"][0]["text"]
    text = await read_raw(served, "/v1/completions", {"prompt": "x", "stream": True})
    chunks = [json.loads(frame[6:]) for frame in text.split("\n\n")[:-2]]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == whole == 'a"\\\n\u2028b'


@pytest.mark.parametrize("route", list(ROUTES))
async def test_a_comment_keeps_a_silent_stream_open(serve: Callable[..., Any], route: str) -> None:
    client = FakeEngineClient()
    served = await serve(client, options=OpenAIOptions(keepalive_s=0.05))
    client.hold.clear()
    asyncio.get_running_loop().call_later(0.4, client.hold.set)
    text = await read_raw(served, route, {**ROUTES[route], "stream": True})
    assert text.count(": keep-alive\n\n") >= 3
    assert text.endswith("data: [DONE]\n\n")


async def test_a_stream_that_waits_for_its_first_token_is_kept_alive_too(serve: Callable[..., Any]) -> None:
    served = await serve(FakeEngineClient(step_s=0.3), options=OpenAIOptions(keepalive_s=0.05))
    text = await read_raw(served, "/v1/completions", {"prompt": "hi", "stream": True, "max_tokens": 1})
    assert text.startswith(": keep-alive\n\n")
    assert text.endswith("data: [DONE]\n\n")


@pytest.mark.parametrize("prompts", [1, 3])
@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
async def test_a_client_that_leaves_ends_its_generations(
    serve: Callable[..., Any], streaming: bool, prompts: int
) -> None:
    client = FakeEngineClient()
    served = await serve(client)
    client.hold.clear()
    body = {"prompt": ["hi"] * prompts, "stream": streaming}
    request = asyncio.create_task(served.http.post("/v1/completions", json=body))
    await served.running(prompts)
    await asyncio.sleep(0.05)
    request.cancel()
    await asyncio.wait({request})
    await served.settled()
    assert client.num_aborted == prompts


async def test_a_client_that_leaves_before_the_first_token_too(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient(step_s=30)
    served = await serve(client)
    for streaming in (False, True):
        request = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "hi", "stream": streaming}))
        await served.running(1)
        request.cancel()
        await asyncio.wait({request})
        await served.settled()


async def test_a_disconnect_storm_leaves_nothing_behind(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient()
    served = await serve(client)
    client.hold.clear()
    body = b'{"prompt": "hi", "stream": true}'
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    message = head + b"Content-Length: %d\r\n\r\n" % len(body) + body
    port = int(served.url.rpartition(":")[2])
    writers = []
    for _ in range(100):
        _, writer = await asyncio.open_connection("127.0.0.1", port)
        writer.write(message)
        writers.append(writer)
    await served.running(100)
    for writer in writers:
        writer.transport.abort()
    await served.settled()
    assert client.num_aborted == 100


async def test_a_stalled_reader_is_not_buffered_without_end(serve: Callable[..., Any]) -> None:
    """The producer waits for a reader that takes nothing: its outputs are not piled up here."""
    client = FakeEngineClient(reply="x" * 400)
    served = await serve(client)
    port = int(served.url.rpartition(":")[2])
    reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=1024)
    body = json.dumps({"prompt": ["hi"] * 100, "n": 1, "max_tokens": 400, "stream": True}).encode()
    head = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    writer.write(head + b"Content-Length: %d\r\n\r\n" % len(body) + body)
    await reader.readexactly(100)
    for _ in range(100):
        await asyncio.sleep(0.02)
        if client.num_running < 100:
            break
    assert client.num_running > 0
    writer.transport.abort()
    await served.settled()


async def test_draining_refuses_new_requests_and_finishes_running_ones(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient()
    served = await serve(client)
    client.hold.clear()
    running = asyncio.create_task(served.http.post("/v1/completions", json={"prompt": "hi"}))
    await served.running(1)
    served.engines.draining = True
    for route, body in ROUTES.items():
        refused = await served.http.post(route, json=body)
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "not_ready"
        assert refused.headers["retry-after"] == "1"
    assert (await served.http.get("/ready")).status_code == 503
    assert (await served.http.get("/live")).status_code == 200
    assert (await served.http.get("/v1/models")).status_code == 200
    client.hold.set()
    assert (await running).json()["choices"][0]["text"] == "Hello, world"


async def test_a_dead_engine_is_told_on_every_route(serve: Callable[..., Any]) -> None:
    client = FakeEngineClient()
    served = await serve(client)
    client.die()
    for route, body in ROUTES.items():
        for streaming in (False, True):
            response = await served.http.post(route, json={**body, "stream": streaming})
            assert (response.status_code, response.json()["error"]["code"]) == (503, "engine_dead")
    assert (await served.http.get("/ready")).status_code == 503
    assert (await served.http.get("/live")).status_code == 503
    assert (await served.http.get("/health")).json()["models"] == {"fake": "dead"}


async def test_client_ids_are_echoed_and_never_keys(serve: Callable[..., Any]) -> None:
    """Class 44: two clients with the same id do not meet."""
    served = await serve(FakeEngineClient(step_s=0.01))
    headers = {"x-request-id": "same"}
    answers = await asyncio.gather(
        *(served.http.post("/v1/completions", json={"prompt": text}, headers=headers) for text in ("a", "b"))
    )
    assert [answer.headers["x-request-id"] for answer in answers] == ["same", "same"]
    assert len({answer.json()["id"] for answer in answers}) == 2
    assert all("same" not in answer.text for answer in answers)
    assert {options.external_id for _, _, options in served.client.seen} == {"same"}


@pytest.mark.parametrize(("header", "tenant"), [("", ""), ("x-tenant", "search")])
async def test_a_tenant_comes_from_the_header_the_operator_trusts_or_from_none(
    serve: Callable[..., Any], header: str, tenant: str
) -> None:
    """Class 45: a header that no option names is anybody's to set, so it counts for nothing."""
    served = await serve(FakeEngineClient(), options=OpenAIOptions(tenant_header=header))
    for sent in ({"X-Tenant": "search"}, {}):
        await served.http.post("/v1/completions", json={"prompt": "a"}, headers=sent)
    assert [options.tenant for _, _, options in served.client.seen] == [tenant, ""]


async def test_an_impossible_tenant_is_refused(serve: Callable[..., Any]) -> None:
    """The engine's rule for tenants holds for those of headers as well."""
    served = await serve(FakeEngineClient(), options=OpenAIOptions(tenant_header="x-tenant"))
    answer = await served.http.post("/v1/completions", json={"prompt": "a"}, headers={"x-tenant": "a/b"})
    assert answer.status_code == 400
    assert "tenant" in answer.json()["error"]["message"]
