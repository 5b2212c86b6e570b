"""Messages as clients send them, turned into plain data a renderer can use. The caller's objects are not changed."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError

logger = logging.getLogger("hardpoint.rendering")

MAX_DEPTH = 100
MAX_MESSAGES = 4096
MAX_PARTS = 4096
"""Parts of one message's content."""
MAX_TOOL_CALLS = 128
"""Tool calls of one message."""
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MEDIA_WORDS = ("image", "audio", "video", "file", "embeds")


def normalize_messages(messages: Sequence[Mapping[str, Any]], *, max_chars: int | None = None) -> list[dict[str, Any]]:
    """Plain copies of ``messages`` with ``content`` as a list of typed parts, however the client spelled it.

    Roles, order and other fields are kept (R2.30); arguments of tool calls become objects (R2.60).
    Raises ``InvalidRequestError`` naming message and part, and for contents of more than ``max_chars`` characters.
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
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


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


def _normalize(message: Any, where: str) -> dict[str, Any]:
    if not isinstance(message, Mapping):
        raise InvalidRequestError(f"{where} must be an object with 'role' and 'content'", param=where)
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}: 'role' must be a text such as 'user'", param=f"{where}.role")
    # A field without a value is left out: templates handle a missing one, and would print "None".
    copy = {key: plain_copy(value) for key, value in message.items() if value is not None}
    copy["content"] = [{"type": "text", "text": text} for text in _texts(message.get("content"), where)]
    if calls := copy.get("tool_calls"):
        copy["tool_calls"] = [_normalize_call(call, where) for call in calls] if isinstance(calls, list) else calls
    return copy


def _texts(content: Any, where: str) -> list[str]:
    if content is None:
        return []
    if isinstance(content, str):
        return [content]
    if not isinstance(content, list):
        raise InvalidRequestError(f"{where}: 'content' must be a text or a list of parts", param=f"{where}.content")
    found = [_part_text(part, f"{where}.content[{index}]") for index, part in enumerate(content)]
    return [text for text in found if text is not None]


def _part_text(part: Any, where: str) -> str | None:
    """Text of one part; None for a text part without one, which is skipped (R2.26)."""
    if isinstance(part, str):
        return part
    kind = part.get("type", "text" if "text" in part else None) if isinstance(part, Mapping) else None
    if kind in _TEXT_PARTS:
        text: Any = part.get("text")
        if text is None:
            logger.warning("%s has no text and is skipped", where)
        elif not isinstance(text, str):
            raise InvalidRequestError(f"{where}: 'text' must be a text", param=where)
        return None if text is None else str(text)
    if isinstance(kind, str) and any(word in kind for word in _MEDIA_WORDS):
        raise InvalidRequestError(f"{where}: this model takes text only, not {kind[:40]!r} parts", param=where)
    raise InvalidRequestError(f"{where}: a part must have the type 'text', not {str(kind)[:40]!r}", param=where)


def _normalize_call(call: Any, where: str) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or "arguments" not in function:
        return call
    return {**call, "function": {**function, "arguments": _arguments(function["arguments"], where)}}


def _arguments(given: Any, where: str) -> dict[str, Any]:
    """R2.60: an object, from its JSON text if need be. Anything else is history that must not break later turns."""
    if isinstance(given, str):
        try:
            given = json.loads(given)
            plain_copy(given)
        except (ValueError, RecursionError, InvalidRequestError):
            given = None
    if isinstance(given, dict):
        return given
    logger.warning("%s: arguments of a tool call are not a JSON object; taken as empty", where)
    return {}


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
