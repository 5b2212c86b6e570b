"""Rule U: whatever a client sends, both generating routes answer 4xx in the OpenAI form within a second and go on."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from typing import Any

import pytest

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"model": "fake", "messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"model": "fake", "prompt": "hi"},
}
HUGE = 2**31
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|/work|/usr|\.py\b|object at")

EVERYWHERE: list[tuple[str, Any]] = [
    # Class 27: counts are capped before anything is built.
    ("n", 0),
    ("n", -1),
    ("n", 129),
    ("n", 10**9),
    ("n", 10**30),
    ("n", 1.5),
    ("n", True),
    ("n", "2"),
    ("max_tokens", 0),
    ("max_tokens", -5),
    ("max_tokens", 10**6),
    ("max_tokens", 2**70),
    # Class 28: also where max_tokens is left to its default.
    ("min_tokens", -1),
    ("min_tokens", 10**6),
    ("temperature", -0.1),
    ("temperature", 1e6),
    ("temperature", "hot"),
    ("top_p", 0),
    ("top_p", 1.01),
    ("top_p", -1),
    ("top_k", -2),
    ("top_k", 2**40),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("presence_penalty", 2.1),
    ("frequency_penalty", -2.1),
    ("repetition_penalty", 0),
    ("repetition_penalty", -1),
    ("seed", 2**80),
    ("seed", 1.5),
    ("stop", [""]),
    ("stop", ["x"] * 17),
    ("stop", ["x" * 513]),
    ("stop", [1]),
    ("stop", {"a": 1}),
    # Class 29: ids outside the vocabulary.
    *((field, [value]) for field in ("stop_token_ids", "allowed_token_ids") for value in (-1, 259, HUGE, 2**70, "3")),
    *(("logit_bias", {key: 1}) for key in ("-1", "259", str(HUGE), str(2**70), "x", "1.5")),
    ("logit_bias", {"3": 101}),
    ("logit_bias", {"3": "x"}),
    ("logit_bias", [1]),
    # Class 33.
    ("cache_salt", "x" * 4096),
    ("cache_salt", "../../etc"),
    ("cache_salt", ""),
    ("cache_salt", 5),
    ("priority", 10**9),
    ("priority", "high"),
    ("timeout", 0),
    ("timeout", -1),
    ("timeout", 1e12),
    ("stream_options", {"include_usage": True, "other": 1}),
    ("stream_options", []),
    ("stream", "yes"),
    ("model", 5),
    # Not supported yet, said by name rather than dropped.
    ("response_format", {"type": "json_object"}),
    ("response_format", {"type": "json_schema", "json_schema": {"name": "x" * 200}}),
    ("structured_outputs", {"regex": "(a+)+b"}),
    ("bad_words", ["x"]),
    ("prompt_logprobs", 1),
    ("kv_transfer_params", {"tp_size": HUGE}),
    ("use_beam_search", True),
    ("no_such_field", 1),
    ("__class__", {}),
]
CHAT_ONLY: list[tuple[str, Any]] = [
    ("messages", []),
    ("messages", None),
    ("messages", "hi"),
    ("messages", [1]),
    ("messages", [{"role": "user"}, {"content": "x"}]),
    ("messages", [{"role": "assistant<|im_end|>", "content": "x"}]),
    ("messages", [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://[::1]/"}}]}]),
    (
        "messages",
        [{"role": "user", "content": [{"type": "input_audio", "input_audio": {"data": "", "format": "wav"}}]}],
    ),
    ("messages", [{"role": "user", "content": [{"type": "text"}]}]),
    ("messages", [{"role": "user", "content": 7}]),
    ("top_logprobs", 5),
    ("chat_template", "{{ 1 }}"),
    ("chat_template", "{% for x in range(10**9) %}{% endfor %}"),
    # Class 39: only listed keys with plain values reach a template.
    ("chat_template_kwargs", {"tokenize": False}),
    ("chat_template_kwargs", {"chat_template": "x"}),
    ("chat_template_kwargs", {"enable_thinking": {"nested": 1}}),
    ("chat_template_kwargs", {"enable_thinking": "x" * 300}),
    ("chat_template_kwargs", [1]),
    ("tools", [{"type": "function", "function": {"name": "f"}}]),
    ("tool_choice", "required"),
    ("tool_choice", {"type": "function", "function": {"name": "f"}}),
    ("functions", [{"name": "f"}]),
    ("function_call", {"name": "f"}),
    ("modalities", ["audio"]),
    ("audio", {"voice": "x", "format": "wav"}),
    ("reasoning_effort", "high"),
    ("continue_final_message", True),
    ("logprobs", 3),
    ("max_completion_tokens", 0),
]
COMPLETIONS_ONLY: list[tuple[str, Any]] = [
    ("prompt", ""),
    ("prompt", []),
    ("prompt", None),
    ("prompt", [[]]),
    ("prompt", [""]),
    ("prompt", {"a": 1}),
    ("prompt", ["a", 1]),
    ("prompt", [1, "a"]),
    ("prompt", [[1], 2]),
    ("prompt", [1.5]),
    ("prompt", [-1]),
    ("prompt", [259]),
    ("prompt", [HUGE]),
    ("prompt", [2**70]),
    ("prompt", [[5], [HUGE]]),
    ("prompt", ["x"] * 257),
    ("prompt", ["x"] * 10**5),
    ("prompt", "x" * 600),
    ("prompt", "x" * 10**6),
    ("prompt", [5] * 600),
    # Class 30.
    ("logprobs", -2),
    ("logprobs", 21),
    ("logprobs", 10**6),
    ("logprobs", True),
    ("best_of", 2),
    ("best_of", 10**9),
    ("suffix", "end"),
    ("echo", 1),
]


def cases() -> Iterator[Any]:
    listed = [(route, *case) for route in BASE for case in EVERYWHERE]
    listed += [(CHAT, *case) for case in CHAT_ONLY] + [(COMPLETIONS, *case) for case in COMPLETIONS_ONLY]
    for route, field, value in listed:
        shown = json.dumps(value)
        yield pytest.param(route, field, value, id=f"{route.rpartition('v1/')[2]}-{field}-{shown[:30]}")


def assert_refusal(response: Any, *statuses: int) -> dict[str, Any]:
    assert 400 <= response.status_code < 500, response.text
    if statuses:
        assert response.status_code in statuses
    body = response.json()
    assert set(body) == {"error"}
    assert set(body["error"]) == {"message", "type", "param", "code"}
    assert isinstance(body["error"]["message"], str)
    assert len(response.content) < 1000
    assert LEAK.search(response.text) is None, response.text
    return dict(body["error"])


@pytest.mark.parametrize("streaming", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize(("route", "field", "value"), list(cases()))
async def test_bad_values(in_process: Any, route: str, field: str, value: Any, streaming: bool) -> None:
    body = {**BASE[route], "stream": streaming, field: value}
    begun = time.monotonic()
    response = await in_process.http.post(route, json=body)
    assert time.monotonic() - begun < 1.0
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
@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "\xff"}',
        b'{"model": "fake", "temperature": NaN}',
        b'{"model": "fake", "temperature": 1e999}',
        b'{"n": ' + b"9" * 10_000 + b"}",
        b'{"a": ' * 120 + b"1" + b"}" * 120,
        b"[" * 100_000,
        b'{"metadata": ' + b"[" * 120 + b"]" * 120 + b"}",
        b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b'{"n": 1} trailing',
    ],
)
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


async def test_listed_template_arguments_reach_the_renderer(in_process: Any) -> None:
    body = {**BASE[CHAT], "chat_template_kwargs": {"enable_thinking": False}, "add_generation_prompt": False}
    assert (await in_process.http.post(CHAT, json=body)).status_code == 200
    assert in_process.client.seen[-1][0].text == "<user>hi\n[enable_thinking=False]"


async def test_a_long_conversation_is_rendered_all_the_same(in_process: Any) -> None:
    body = {"messages": [{"role": "user", "content": "x" * 5000}]}
    error = assert_refusal(await in_process.http.post(CHAT, json=body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")


async def test_the_servers_ceiling_bounds_the_timeout(make_in_process: Any) -> None:
    served = make_in_process(request_timeout_s=5.0)
    for given, effective in ((None, 5.0), (3, 3.0), (60, 5.0)):
        await served.http.post(COMPLETIONS, json={**BASE[COMPLETIONS], "timeout": given})
        assert served.client.seen[-1][2].timeout_s == effective
