"""Reads a JSON body into a typed record. What does not fit is a 400 that names the field and echoes no value."""

from __future__ import annotations

import re
from typing import TypeVar

import msgspec
from fastapi import Request

from hardpoint.errors import InvalidRequestError

__all__ = ["decode_body"]

T = TypeVar("T")
_PATH = re.compile(r" - at (?:`key` in )?`\$\.?([^`]*)`")
_UNKNOWN = re.compile(r"unknown field `(.*)`", re.DOTALL)
_MISSING = re.compile(r"missing required field `(\w+)`")


async def decode_body(request: Request, kind: type[T]) -> T:
    """Raises ``InvalidRequestError``: 415 for another content type, 400 for anything that is not a ``kind``."""
    content_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if content_type != "application/json":
        raise InvalidRequestError(
            "the body must be JSON; send the header Content-Type: application/json",
            code="unsupported_media_type",
            status=415,
        )
    body = await request.body()
    try:
        return msgspec.json.decode(body, type=kind)
    except msgspec.ValidationError as error:
        raise _describe(str(error)) from None
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError, ValueError):
        raise InvalidRequestError("the body is not valid JSON", code="invalid_json") from None


def _describe(text: str) -> InvalidRequestError:
    path = _PATH.search(text)
    field = path[1] if path else ""
    message = text[: path.start()] if path else text
    unknown = _UNKNOWN.search(message)
    if unknown:
        name = f"{field}.{unknown[1]}"[:64] if field else unknown[1][:64]
        return InvalidRequestError(f"unknown field {name!r}", param=name, code="unknown_field")
    missing = _MISSING.search(message)
    if missing:
        field = f"{field}.{missing[1]}" if field else missing[1]
    field = field.replace("[...]", "")
    message = message.replace("`", "")[:300]
    return InvalidRequestError(f"{field}: {message}" if field else message, param=field or None, code="invalid_type")
