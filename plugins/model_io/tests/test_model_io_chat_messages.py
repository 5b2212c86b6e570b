"""Messages in the form templates expect; what is given stays as it is (spec 2.3, 2.6)."""

from __future__ import annotations

import copy
import json
import logging
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import InvalidRequestError
from hardpoint_model_io.chat.messages import normalize_messages

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        (None, []),
        ("", [""]),
        ("text", ["text"]),
        ([], []),
        ([{"type": "text", "text": "a"}, "b", {"type": "input_text", "text": "c"}], ["a", "b", "c"]),
        ([{"text": "untyped"}], ["untyped"]),
        ([{"type": "text", "text": None}, {"type": "text", "text": "kept"}], ["kept"]),
    ],
)
def test_content_becomes_typed_parts(content: Any, expected: list[str]) -> None:
    """R2.20, R2.21, R2.25, R2.26."""
    parts = [{"type": "text", "text": text} for text in expected]
    assert normalize_messages([{"role": "user", "content": content}]) == [{"role": "user", "content": parts}]


def test_a_message_without_content_has_no_parts() -> None:
    assert normalize_messages([{"role": "assistant"}]) == [{"role": "assistant", "content": []}]


def test_a_text_part_without_text_is_skipped_with_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    """R2.26."""
    with caplog.at_level(logging.WARNING):
        normalize_messages([{"role": "user", "content": [{"type": "text", "text": None}]}])
    assert "messages[0].content[0]" in caplog.text


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([{"content": "x"}], "messages[0].role", "'role'"),
        ([{"role": 3, "content": "x"}], "messages[0].role", "'role'"),
        ([{"role": "user", "content": 3}], "messages[0].content", "text or a list"),
        ([{"role": "user", "content": [{"type": "text", "text": 3}]}], "messages[0].content[0]", "must be a text"),
        (
            [{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}],
            "messages[0].content[0]",
            "text only",
        ),
        ([{"role": "user", "content": ["a", {"type": "hologram"}]}], "messages[0].content[1]", "'hologram'"),
        ([{"role": "user", "content": [{"uuid": "x"}]}], "messages[0].content[0]", "must have the type"),
        ([{"role": "user", "content": [3]}], "messages[0].content[0]", "must have the type"),
    ],
)
def test_what_cannot_be_used_is_named(messages: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        normalize_messages(messages)
    assert caught.value.param == param


def test_roles_order_and_other_fields_survive() -> None:
    """R2.30."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "name": "n"},
        {"role": "tool", "content": "r", "tool_call_id": "1"},
        {"role": "made-up", "content": "x", "reasoning_content": "why"},
    ]
    found = normalize_messages(messages)
    assert [message["role"] for message in found] == ["system", "tool", "made-up"]
    assert (found[0]["name"], found[1]["tool_call_id"], found[2]["reasoning_content"]) == ("n", "1", "why")


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c1", "type": "function", "function": {"name": "f", "arguments": arguments}}


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ('{"a": [1, {"b": null}]}', {"a": [1, {"b": None}]}),
        ({"a": 1}, {"a": 1}),
        ("{}", {}),
        ('{"a": 1', {}),
        ("", {}),
        ("[1]", {}),
        ('"text"', {}),
        ("null", {}),
        ("3", {}),
        ([1], {}),
        (3, {}),
        ('{"a":' * 200 + "1" + "}" * 200, {}),
        ('{"a":' * 100_000, {}),
    ],
)
def test_arguments_of_tool_calls_become_objects(arguments: Any, expected: dict[str, Any]) -> None:
    """R2.60, R2.62."""
    messages = [{"role": "assistant", "content": None, "tool_calls": [call(arguments), call("{}")]}]
    before = copy.deepcopy(messages)
    found = normalize_messages(messages)[0]["tool_calls"]
    assert found == [call(expected), call({})]
    assert messages == before


def test_a_malformed_call_in_history_does_not_stop_later_turns(caplog: pytest.LogCaptureFixture) -> None:
    """R2.61: it warns, and the conversation goes on."""
    history: list[dict[str, Any]] = [
        {"role": "assistant", "content": None, "tool_calls": [call("{broken")]},
        {"role": "tool", "content": "r"},
        {"role": "user", "content": "next"},
    ]
    with caplog.at_level(logging.WARNING):
        assert normalize_messages(history)[2]["content"] == [{"type": "text", "text": "next"}]
    assert "messages[0]" in caplog.text


@given(arguments=json_values, text=st.text(), cut=st.integers(0, 40))
def test_no_arguments_ever_raise(arguments: Any, text: str, cut: int) -> None:
    """I2.6: any JSON value, truncated JSON, noise."""
    calls = [call(arguments), call(json.dumps(arguments)), call(json.dumps(arguments)[:cut]), call(text)]
    found = normalize_messages([{"role": "assistant", "content": "", "tool_calls": calls}])
    assert all(isinstance(entry["function"]["arguments"], dict) for entry in found[0]["tool_calls"])


@given(extra=st.dictionaries(st.text(), json_values, max_size=3))
def test_input_is_not_changed(extra: dict[str, Any]) -> None:
    """I2.5."""
    message = {**extra, "role": "user", "content": [{"type": "text", "text": "x"}], "tool_calls": [call("{}")]}
    before = copy.deepcopy(message)
    normalize_messages([message])
    assert message == before


@pytest.mark.parametrize("calls", [[], "text", [3], [{"function": "f"}], [{"function": {"name": "f"}}]])
def test_odd_tool_calls_are_left_to_the_template(calls: Any) -> None:
    assert normalize_messages([{"role": "assistant", "content": "", "tool_calls": calls}])[0]["tool_calls"] == calls
