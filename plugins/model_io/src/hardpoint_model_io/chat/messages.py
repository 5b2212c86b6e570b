"""Messages in the form that templates expect, however the client spelled them: typed parts, objects as arguments."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import InvalidRequestError
from hardpoint.logging import get_logger

_logger = get_logger(__name__)
_MAX_DEPTH = 100
_TEXT_PARTS = frozenset({"text", "input_text", "output_text"})
_MEDIA_WORDS = ("image", "audio", "video", "file", "embeds")


def normalize_messages(messages: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """``messages`` with ``content`` as a list of typed parts, and the arguments of tool calls as objects (R2.60).

    Roles, order and other fields are kept (R2.30), and what is given is not changed. Raises ``InvalidRequestError``
    naming message and part.
    """
    return [_normalize(message, f"messages[{index}]") for index, message in enumerate(messages)]


def _normalize(message: Mapping[str, Any], where: str) -> dict[str, Any]:
    role = message.get("role")
    if not isinstance(role, str) or not role:
        raise InvalidRequestError(f"{where}: 'role' must be a text such as 'user'", param=f"{where}.role")
    parts = [{"type": "text", "text": text} for text in _texts(message.get("content"), where)]
    copy = {**message, "content": parts}
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
            _logger.warning("%s has no text and is skipped", where)
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
            given = given if _is_shallow(given, _MAX_DEPTH) else None
        except (ValueError, RecursionError):
            given = None
    if isinstance(given, dict):
        return given
    _logger.warning("%s: arguments of a tool call are not a JSON object; taken as empty", where)
    return {}


def _is_shallow(value: Any, depth: int) -> bool:
    """Whether ``value`` has at most ``depth`` levels; a template that walks a deeper one would not come back."""
    items = value.values() if isinstance(value, dict) else value if isinstance(value, list) else ()
    return depth >= 0 and all(_is_shallow(item, depth - 1) for item in items)
