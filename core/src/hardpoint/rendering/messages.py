"""What any chat renderer is spared: messages as clients send them become bounded, plain data of the renderer's own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError

MAX_DEPTH = 100
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_TOOL_CALLS = 128
"""Tool calls of one message."""


def plain_messages(messages: Sequence[Mapping[str, Any]], *, max_chars: int | None = None) -> list[dict[str, Any]]:
    """Plain copies of ``messages``, in their order and with all their fields that have a value (R2.30).

    Raises ``InvalidRequestError`` for what is no list of objects, holds more than JSON can, or is too much: entries,
    levels, or contents of more than ``max_chars`` characters. What the fields mean is the renderer's to judge.
    """
    if isinstance(messages, str | bytes | Mapping) or not isinstance(messages, Sequence) or not messages:
        raise InvalidRequestError("messages must be a list with at least one message", param="messages")
    _check_counts(messages)
    size = sum(map(_content_length, messages))
    if max_chars is not None and size > max_chars:
        raise InvalidRequestError(
            f"the messages have {size} characters; at most {max_chars} are allowed for this model's context length",
            param="messages",
            code="context_length_exceeded",
        )
    return [_plain(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _plain(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with 'role' and 'content'", param=where)
    # A field without a value is left out: templates handle a missing one, and would print "None".
    return {str(key): plain_copy(value) for key, value in message.items() if value is not None}


def _check_counts(messages: Sequence[Any]) -> None:
    """Refuse what is numerous rather than long: each item costs far more to copy and render than its characters."""
    _check_count(messages, "messages", MAX_MESSAGES)
    for index, message in enumerate(messages):
        if isinstance(message, Mapping):
            _check_count(message.get("content"), f"messages[{index}].content", MAX_PARTS)
            _check_count(message.get("tool_calls"), f"messages[{index}].tool_calls", MAX_TOOL_CALLS)


def _check_count(items: Any, field: str, limit: int) -> None:
    if isinstance(items, Sequence) and not isinstance(items, str) and len(items) > limit:
        message = f"{field} has {len(items)} entries; at most {limit} are allowed"
        raise InvalidRequestError(message, param=field, code="invalid_value")


def _content_length(message: Any) -> int:
    """Characters of a message's content. What is no text counts nothing: it is refused later, by name."""
    content = message.get("content") if isinstance(message, Mapping) else None
    parts = content if isinstance(content, list) else [content]
    texts = (part.get("text") if isinstance(part, Mapping) else part for part in parts)
    return sum(len(text) for text in texts if isinstance(text, str))


def plain_copy(value: Any, depth: int = 0) -> Any:
    """A copy of JSON-like data. Raises ``InvalidRequestError`` for anything else, and for more than 100 levels."""
    if depth > MAX_DEPTH:
        raise InvalidRequestError(f"the request is nested deeper than {MAX_DEPTH} levels", param="messages")
    if isinstance(value, str):
        return str(value)
    if value is None or isinstance(value, bool | int | float):
        return value
    if isinstance(value, Mapping):
        return {str(key): plain_copy(item, depth + 1) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [plain_copy(item, depth + 1) for item in value]
    raise InvalidRequestError(f"messages may hold JSON values only, not {type(value).__name__}", param="messages")
