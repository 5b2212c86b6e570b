"""Configuration mistakes as messages a user can act on."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

from pydantic import ValidationError

from hardpoint.errors import ConfigError

__all__ = ["from_validation", "unknown_setting"]


def unknown_setting(key: str, known: Iterable[str]) -> ConfigError:
    """An error that names the nearest known setting."""
    names = sorted(set(known) - {"name"})
    near = difflib.get_close_matches(key, names, n=1)
    hint = f"; did you mean {near[0]!r}?" if near else f"; known settings: {', '.join(names)}"
    return ConfigError(f"unknown setting {key!r}{hint}")


def from_validation(error: ValidationError, where: str = "configuration") -> ConfigError:
    """All faults of a validation in one line each, without the given values of secrets."""
    lines = []
    for fault in error.errors(include_url=False):
        path = ".".join(str(part) for part in fault["loc"]) or where
        given = "" if "api_key" in path else f" (given: {fault['input']!r})"
        lines.append(f"{path}: {fault['msg']}{given}")
    return ConfigError(f"invalid {where}: " + "; ".join(lines))
