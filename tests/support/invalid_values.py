"""Values and bodies that both generating routes must refuse, for tests over a fake engine and over real ones."""

from __future__ import annotations

import re
from typing import Any

__all__ = [
    "BASE",
    "CHAT",
    "COMPLETIONS",
    "LEAK",
    "MALFORMED",
    "MAX_MODEL_LEN",
    "VOCAB_SIZE",
    "assert_refusal",
    "bad_values",
]

CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
BASE: dict[str, dict[str, Any]] = {
    CHAT: {"messages": [{"role": "user", "content": "hi"}]},
    COMPLETIONS: {"prompt": "hi"},
}
VOCAB_SIZE = 260
"""The corpus holds ids just outside vocabularies of at most this size."""
MAX_MODEL_LEN = 512
"""The corpus holds prompts too long for contexts of at most this length, for tokenizers that give an "x" one token."""
HUGE = 2**31
LEAK = re.compile(r"0x[0-9a-f]{6,}|Traceback|/work|/usr|\.py\b|object at")

_EVERYWHERE: list[tuple[str, Any]] = [
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
    *(
        (field, [value])
        for field in ("stop_token_ids", "allowed_token_ids")
        for value in (-1, VOCAB_SIZE, HUGE, 2**70, "3")
    ),
    *(("logit_bias", {key: 1}) for key in ("-1", str(VOCAB_SIZE), str(HUGE), str(2**70), "x", "1.5")),
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
_CHAT_ONLY: list[tuple[str, Any]] = [
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
_COMPLETIONS_ONLY: list[tuple[str, Any]] = [
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
    ("prompt", [VOCAB_SIZE]),
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
MALFORMED = [
    b"",
    b"{",
    b"null",
    b"[]",
    b'"x"',
    b"\xff\xfe",
    b'{"prompt": "\xff"}',
    b'{"temperature": NaN}',
    b'{"temperature": 1e999}',
    b'{"n": ' + b"9" * 10_000 + b"}",
    b'{"a": ' * 120 + b"1" + b"}" * 120,
    b"[" * 100_000,
    b'{"metadata": ' + b"[" * 120 + b"]" * 120 + b"}",
    b'{"prompt": "\\ud800", "messages": [{"role": "user", "content": "\\ud800"}]}',
    b'{"n": 1} trailing',
]
"""Bodies that are no request at all, of either route."""


def bad_values() -> list[tuple[str, str, Any]]:
    """(route, field, value) of everything that is refused."""
    listed = [(route, *case) for route in BASE for case in _EVERYWHERE]
    return listed + [(CHAT, *case) for case in _CHAT_ONLY] + [(COMPLETIONS, *case) for case in _COMPLETIONS_ONLY]


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
