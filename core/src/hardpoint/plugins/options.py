"""Turns the plain options of the plan into a plugin's own model."""

from __future__ import annotations

from typing import Any

from pydantic import AliasChoices, BaseModel, ValidationError

from hardpoint.errors import ConfigError
from hardpoint.plugins.resolve import unknown_options
from hardpoint.plugins.schema import describe_faults


def validate_options(kind: str, name: str, model: type[BaseModel], values: dict[str, Any]) -> BaseModel:
    """An instance of ``model``. Unknown keys are refused whatever the model's own policy says.

    Raises ``ConfigError`` naming each faulty setting, what was given and, for unknown keys, the nearest known one.
    """
    faults = unknown_options(kind, name, values, option_names(model))
    if faults:
        raise ConfigError("\n".join(faults))
    try:
        return model.model_validate(values)
    except ValidationError as error:
        raise ConfigError("\n".join(describe_faults(kind, name, error))) from error


def option_names(model: type[BaseModel]) -> list[str]:
    """Every key under which ``model`` takes a value, aliases included."""
    by_name = model.model_config.get("validate_by_name") or model.model_config.get("populate_by_name")
    names: list[str] = []
    for field, info in model.model_fields.items():
        alias = info.validation_alias
        choices = alias.choices if isinstance(alias, AliasChoices) else [alias]
        aliases = [choice for choice in choices if isinstance(choice, str)]
        names += [field, *aliases] if by_name or not aliases else aliases
    return names
