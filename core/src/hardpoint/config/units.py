"""Numbers as people write them: ``4GiB``, ``512MB``, ``1k``."""

from __future__ import annotations

import re
from typing import Annotated

from pydantic import BeforeValidator

_COUNT = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmM]?)()")
_BYTES = re.compile(r"(\d+(?:\.\d+)?)\s*([kKmMgGtT]?)(i?)[bB]?")
_DECIMAL = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12}
_BINARY = {"": 1, "k": 2**10, "m": 2**20, "g": 2**30, "t": 2**40}


def parse_count(value: object) -> object:
    """``"8k"`` is 8000. Anything but text passes unchanged; raises ``ValueError`` for unreadable text."""
    return _parse(value, _COUNT, "a count; write a number such as 2048 or 2k")


def parse_bytes(value: object) -> object:
    """``"4GiB"`` is 4 * 2**30, ``"4GB"`` 4 * 10**9. Raises ``ValueError`` for unreadable text."""
    return _parse(value, _BYTES, "a size; write bytes or a size such as 512MiB or 4GiB")


def _parse(value: object, pattern: re.Pattern[str], wanted: str) -> object:
    if not isinstance(value, str):
        return value
    match = pattern.fullmatch(value.strip())
    if match is None:
        raise ValueError(f"{value!r} is not {wanted}")
    number = float(match[1]) * (_BINARY if match[3] else _DECIMAL)[match[2].lower()]
    if not (number.is_integer() and number < 2**63):
        raise ValueError(f"{value!r} is not a whole number below 2**63")
    return int(number)


Count = Annotated[int, BeforeValidator(parse_count)]
"""An integer that may be written with k or m."""

Bytes = Annotated[int, BeforeValidator(parse_bytes)]
"""A number of bytes that may be written with a unit."""
