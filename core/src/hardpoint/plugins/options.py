"""Turns the plain options of the plan into a plugin's own model."""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ValidationError

from hardpoint.errors import ConfigError
from hardpoint.plugins.resolve import unknown_options

__all__ = ["validate_options"]


def validate_options(kind: str, name: str, model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """An instance of ``model``. Unknown keys are refused whatever the model's own policy says.

    Raises ``ConfigError`` naming each faulty setting, what was given and, for unknown keys, the nearest known one.
    """
    known = [key for field, info in model.model_fields.items() for key in {field, info.alias or field}]
    faults = unknown_options(kind, name, values, known)
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        lines = [
            f"plugins.{kind}.{name}.{'.'.join(map(str, fault['loc']))}: {fault['msg']} (given: {fault['input']!r})"
            for fault in error.errors(include_url=False)
        ]
        raise ConfigError("\n".join(lines)) from error
