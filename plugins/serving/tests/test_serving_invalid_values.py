"""Rule U: whatever a client sends, both generating routes answer 4xx in the OpenAI form within a second and go on."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from hardpoint.interfaces.engine import Prompt
from hardpoint.testing import FakeEngineClient
from hardpoint_serving.openai import endpoint
from hardpoint_serving.openai.protocol import OFF_VALUES, ChatRequest, CompletionRequest, GenerationRequest
from hardpoint_serving.openai.translate import chat_messages
from invalid_values import BASE, CHAT, COMPLETIONS, HUGE, MALFORMED, assert_refusal, bad_values


def cases() -> Iterator[Any]:
    for route, field, value in bad_values():
        shown = json.dumps(value)
        yield pytest.param(route, field, value, id=f"{route.rpartition('v1/')[2]}-{field}-{shown[:30]}")


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("route", "field", "value"), list(cases()))
async def test_bad_values(in_process: Any, route: str, field: str, value: Any, streaming: bool) -> None:
    body = {**BASE[route], "stream": streaming, field: value}
    begun = time.monotonic()
    response = await in_process.http.post(route, json=body)
    assert time.monotonic() - begun < 30.0, "a refusal may not compute with what it was given"
    error = assert_refusal(response, 400)
    assert (error["param"] or field).partition("[")[0].partition(".")[0] == field
    assert in_process.client.num_running == 0
    # Of several prompts the good ones may have begun; they are aborted.
    assert in_process.client.seen == [] or value == [[5], [HUGE]]
    control = await in_process.http.post(COMPLETIONS, json=BASE[COMPLETIONS])
    assert control.json()["choices"][0]["text"] == "Hello, world"


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"prompt": ["x"] * 200, "n": 2}, "n"),
        ({"stream": False, "stream_options": {"include_usage": True}}, "stream_options"),
        ({"prompt": "x" * 500, "max_tokens": 100}, "max_tokens"),
        ({"echo": True, "logprobs": 21}, "logprobs"),
        ({"echo": True, "max_tokens": 0}, "max_tokens"),
        ({"n": 2, "temperature": 0}, "n"),
    ],
)
async def test_values_that_are_bad_together(in_process: Any, fields: dict[str, Any], param: str) -> None:
    response = await in_process.http.post(COMPLETIONS, json={**BASE[COMPLETIONS], **fields})
    assert assert_refusal(response, 400)["param"] == param


async def test_both_token_limits_must_agree(in_process: Any) -> None:
    body = {**BASE[CHAT], "max_tokens": 3, "max_completion_tokens": 3}
    assert (await in_process.http.post(CHAT, json=body)).status_code == 200
    assert_refusal(await in_process.http.post(CHAT, json={**body, "max_tokens": 4}), 400)


@pytest.mark.parametrize("route", list(BASE))
@pytest.mark.parametrize("content", MALFORMED)
async def test_bodies_that_are_no_request(in_process: Any, route: str, content: bytes) -> None:
    response = await in_process.http.post(route, content=content, headers={"content-type": "application/json"})
    assert_refusal(response, 400)


@pytest.mark.parametrize("route", list(BASE))
@pytest.mark.parametrize("kind", ["text/plain", "multipart/form-data; boundary=x", "application/xml", ""])
async def test_other_content_types(in_process: Any, route: str, kind: str) -> None:
    content = json.dumps(BASE[route])
    response = await in_process.http.post(route, content=content, headers={"content-type": kind} if kind else {})
    assert_refusal(response, 415)


@pytest.mark.parametrize("route", list(BASE))
async def test_fields_without_effect_are_accepted(in_process: Any, route: str) -> None:
    extra = {
        "user": "me",
        "metadata": {"a": "b"},
        "store": True,
        "service_tier": "auto",
        "safety_identifier": "x",
        "prompt_cache_key": "k",
        "response_format": {"type": "text"},
        "seed": None,
        "stop": None,
        "logit_bias": None,
        "top_k": -1,
    }
    assert (await in_process.http.post(route, json={**BASE[route], **extra})).status_code == 200


async def test_off_values_of_unsupported_fields_are_accepted(in_process: Any) -> None:
    off = {"tools": [], "tool_choice": "none", "modalities": ["text"], "parallel_tool_calls": True, "audio": None}
    assert (await in_process.http.post(CHAT, json={**BASE[CHAT], **off})).status_code == 200


BODIES: dict[str, type[GenerationRequest]] = {CHAT: ChatRequest, COMPLETIONS: CompletionRequest}
UNREAD = [
    (route, field)
    for route, body in BODIES.items()
    for field in (*OFF_VALUES, "chat_template")
    if field in body.__struct_fields__
]


@pytest.mark.parametrize("value", [b"1e400", b"[1e400]", b'"\xff"', b'["\xed\xa0\x80"]', b'{"a":-1e999}'])
@pytest.mark.parametrize(("route", "field"), UNREAD)
async def test_values_that_decoding_the_body_does_not_look_into(
    in_process: Any, route: str, field: str, value: bytes
) -> None:
    content = json.dumps(BASE[route]).encode()[:-1] + b', "%s": %s}' % (field.encode(), value)
    response = await in_process.http.post(route, content=content, headers={"content-type": "application/json"})
    assert assert_refusal(response, 400)["param"] == field


async def test_listed_template_arguments_reach_the_renderer(in_process: Any) -> None:
    body = {**BASE[CHAT], "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    assert (await in_process.http.post(CHAT, json=body)).status_code == 200
    assert in_process.client.seen[-1][0].text == "<user>hi\n[enable_thinking=False]"


async def test_no_template_runs_on_the_event_loop(make_in_process: Any) -> None:
    """It may take two seconds, however short the messages are."""

    class Watched(FakeEngineClient):
        def render_chat(self, messages: Any, **options: Any) -> Prompt:
            assert threading.current_thread() is not threading.main_thread()
            return super().render_chat(messages, **options)

    served = make_in_process(Watched())
    answer = await served.http.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
    assert answer.status_code == 200


async def test_no_conversation_is_converted_on_the_event_loop(in_process: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """A body full of short messages takes long to convert; the real conversion runs, seen from outside."""
    threads = []

    def watched(messages: Any) -> Any:
        threads.append(threading.current_thread())
        return chat_messages(messages)

    monkeypatch.setattr(endpoint, "chat_messages", watched)
    body = {"messages": [{"role": "user", "content": "a"}] * 3000}
    assert_refusal(await in_process.http.post(CHAT, json=body), 400)
    assert threads
    assert threading.main_thread() not in threads


async def test_what_the_template_decides_cannot_be_asked_for(in_process: Any) -> None:
    body = {"messages": [{"role": "user", "content": "hi"}], "add_special_tokens": True}
    answer = await in_process.http.post("/v1/chat/completions", json=body)
    assert (answer.status_code, answer.json()["error"]["param"]) == (400, "add_special_tokens")
    assert (await in_process.http.post("/v1/chat/completions", json={**body, "add_special_tokens": False})).is_success


async def test_a_long_conversation_is_rendered_all_the_same(in_process: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}]}
    error = assert_refusal(await in_process.http.post(CHAT, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_the_servers_ceiling_bounds_the_timeout(make_in_process: Any) -> None:
    served = make_in_process(request_timeout_s=5.0)
    for given, effective in ((None, 5.0), (3, 3.0), (60, 5.0)):
        await served.http.post(COMPLETIONS, json={**BASE[COMPLETIONS], "timeout": given})
        assert served.client.seen[-1][2].timeout_s == effective
