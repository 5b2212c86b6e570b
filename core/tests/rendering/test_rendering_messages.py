"""Messages become bounded plain data; the caller's objects stay as they are (spec 2.3)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint.errors import InvalidRequestError
from hardpoint.rendering import plain_copy, plain_messages

json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@pytest.mark.parametrize(
    ("messages", "param", "message"),
    [
        ([], "messages", "at least one"),
        ("hi", "messages", "must be a list"),
        ({"role": "user"}, "messages", "must be a list"),
        (["hi"], "messages[0]", "must be an object"),
        ([{"role": "user", "content": "x"}, 3], "messages[1]", "must be an object"),
        ([{"role": "user", "content": "x", "extra": object()}], "messages", "JSON values only"),
    ],
)
def test_what_cannot_be_used_is_named(messages: Any, param: str, message: str) -> None:
    with pytest.raises(InvalidRequestError, match=message) as caught:
        plain_messages(messages)
    assert caught.value.param == param


def test_excessive_nesting_is_refused() -> None:
    """Class 40."""
    deep: Any = "x"
    for _ in range(5_000):
        deep = [deep]
    with pytest.raises(InvalidRequestError, match="deeper than 100"):
        plain_messages([{"role": "user", "content": "x", "extra": deep}])


def test_order_and_fields_with_a_value_survive() -> None:
    """R2.30."""
    messages: list[dict[str, Any]] = [
        {"role": "system", "content": "s", "name": "n"},
        {"role": 3, "content": ({"type": "text", "text": None},), "gone": None, "tool_calls": "text"},
    ]
    parts = [{"type": "text", "text": None}]
    assert plain_messages(messages) == [messages[0], {"role": 3, "content": parts, "tool_calls": "text"}]


@given(extra=st.dictionaries(st.text(), json_values, max_size=3))
def test_input_is_neither_changed_nor_shared(extra: dict[str, Any]) -> None:
    """I2.5."""
    message = {**extra, "role": "user", "content": [{"type": "text", "text": "x"}], "tool_calls": [{"function": {}}]}
    before = copy.deepcopy(message)
    found = plain_messages([message])[0]
    assert message == before
    found["tool_calls"][0]["function"]["name"] = "changed"
    found["content"].clear()
    assert message == before


TOO_MANY: list[tuple[list[dict[str, Any]], str, int]] = [
    ([{"role": "user", "content": ""}] * 4097, "messages", 4096),
    ([{"role": "user", "content": "a"}, {"role": "user", "content": [""] * 4097}], "messages[1].content", 4096),
    ([{"role": "assistant", "tool_calls": [{}] * 129}], "messages[0].tool_calls", 128),
]


@pytest.mark.parametrize(("messages", "field", "limit"), TOO_MANY, ids=["messages", "parts", "tool_calls"])
def test_too_many_of_anything_is_refused_before_any_is_looked_at(
    messages: list[dict[str, Any]], field: str, limit: int
) -> None:
    # The one message that is no good otherwise comes first, and is not what is complained about.
    messages = [{"role": 1}, *messages[1:]] if len(messages) > 1 else messages
    with pytest.raises(InvalidRequestError) as caught:
        plain_messages(messages)
    assert (caught.value.param, caught.value.code) == (field, "invalid_value")
    assert str(caught.value) == f"{field} has {limit + 1} entries; at most {limit} are allowed"


def test_as_many_as_allowed_pass() -> None:
    messages: list[dict[str, Any]] = [
        {"role": "user", "content": ["a"] * 4096},
        {"role": "assistant", "tool_calls": [{"id": "1"}] * 128},
        *([{"role": "user", "content": "x"}] * 4094),
    ]
    assert len(plain_messages(messages)) == 4096


@pytest.mark.parametrize(
    "content",
    ["x" * 101, ["x" * 50, {"type": "text", "text": "y" * 51}], "<|e|>" * 30],
    ids=["text", "parts", "control"],
)
def test_long_contents_are_refused_before_they_are_rendered(content: Any) -> None:
    with pytest.raises(InvalidRequestError, match=r"the messages have 1\d\d characters; at most 100") as caught:
        plain_messages([{"role": "user", "content": content}], max_chars=100)
    assert (caught.value.param, caught.value.code) == ("messages", "context_length_exceeded")


def test_as_many_characters_as_allowed_pass() -> None:
    assert plain_messages([{"role": "user", "content": ["x" * 60, "y" * 40]}], max_chars=100)


class Loud(str):
    """A text with a way of its own of becoming one."""

    __slots__ = ()


@given(value=json_values)
def test_plain_copies_are_equal_and_share_nothing(value: Any) -> None:
    found = plain_copy(value)
    assert found == value
    if isinstance(value, list | dict) and value:
        value.clear()
        assert found != value


def test_plain_copies_hold_plain_types() -> None:
    found = plain_copy({Loud("key"): (Loud("text"), 1)})
    assert found == {"key": ["text", 1]}
    assert {type(key) for key in found} == {type(found["key"][0])} == {str}


@pytest.mark.parametrize("value", [object(), b"x", {1, 2}, [object()]])
def test_what_is_no_json_is_not_copied(value: Any) -> None:
    with pytest.raises(InvalidRequestError, match="JSON values only"):
        plain_copy(value)
