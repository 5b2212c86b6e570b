"""Configuration mistakes as messages a user can act on."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, get_args

from pydantic import BaseModel, ValidationError

from hardpoint.errors import ConfigError
from hardpoint.plugins.suggest import did_you_mean

_ENGINES = "engines"


def unknown_setting(key: str, known: Iterable[str]) -> ConfigError:
    """An error that names the nearest known setting."""
    return ConfigError(f"unknown setting {key!r}{_nearest(key, set(known) - {'name'})}")


def from_validation(error: ValidationError, root: type[BaseModel]) -> ConfigError:
    """All faults of validating ``root``, which holds engines, on one line, without the given values of secrets.

    Settings are named as in a file for one engine: ``cache.block_size``.
    """
    faults = []
    for fault in error.errors(include_url=False):
        location = fault["loc"]
        # In a file for one engine, its sections stand at the top.
        shown = location[2:] if location[:1] == (_ENGINES,) and len(location) > 2 else location
        path = ".".join(str(part) for part in shown) or "configuration"
        if fault["type"] == "extra_forbidden":
            hint = _misplaced(root, location) or _nearest(str(location[-1]), _siblings(root, location))
            faults.append(f"unknown setting {path!r}{hint}")
        else:
            given = "" if "_key" in path else f" (given: {fault['input']!r:.200})"
            faults.append(f"{path}: {fault['msg']}{given}")
    return ConfigError(f"invalid configuration: {'; '.join(faults)}")


def one_line(error: Exception) -> str:
    """The text of a library's error that draws pictures over several lines."""
    return " ".join(str(error).split())


def _nearest(key: str, known: Iterable[str]) -> str:
    names = sorted(known)
    return did_you_mean(key, names) or f"; known settings: {', '.join(names)}"


def _misplaced(root: type[BaseModel], location: Sequence[int | str]) -> str:
    """Where a setting at the top of the file belongs, if a section has one of that name."""
    if len(location) == 1:
        for section, info in {**_engine_fields(root), **root.model_fields}.items():
            if location[0] in getattr(info.annotation, "model_fields", ()):
                return f"; did you mean '{section}.{location[0]}'?"
    return ""


def _siblings(root: type[BaseModel], location: Sequence[int | str]) -> list[str]:
    """The fields that exist where the last part of ``location`` does not."""
    model: Any = root
    for part in location[:-1]:
        is_model = isinstance(model, type) and issubclass(model, BaseModel)
        model = model.model_fields[part].annotation if is_model else get_args(model)[-1]
    return [*model.model_fields, *(_engine_fields(root) if len(location) == 1 else ())]


def _engine_fields(root: type[BaseModel]) -> dict[str, Any]:
    """The sections of one engine, which may stand at the top of a file as well."""
    return dict(get_args(root.model_fields[_ENGINES].annotation)[-1].model_fields)
