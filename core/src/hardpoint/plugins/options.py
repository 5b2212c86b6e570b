"""Options of plugins: against their own model where they load, and before that against the schema of a manifest.

The latter imports nothing of the plugin. The schema is translated to what pydantic itself validates with, so values are
converted and faults are worded the same. Whatever the schema says that is not understood here, and whatever is marked
``unchecked``, accepts any value: the launcher must never refuse what the plugin's own model would accept.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import AliasChoices, BaseModel, TypeAdapter, ValidationError

from hardpoint.errors import ConfigError
from hardpoint.plugins.manifest import UNCHECKED
from hardpoint.plugins.suggest import did_you_mean

_logger = logging.getLogger("hardpoint.plugins")
_ANY = {"type": "any"}
_SCALARS = {"string": "str", "integer": "int", "number": "float", "boolean": "bool", "null": "none"}
_BOUNDS = {
    **{"minimum": "ge", "exclusiveMinimum": "gt", "maximum": "le", "exclusiveMaximum": "lt"},
    **{"multipleOf": "multiple_of", "minLength": "min_length", "maxLength": "max_length", "pattern": "pattern"},
    **{"minItems": "min_length", "maxItems": "max_length"},
}
_TEXT_FORMATS = (None, "path", "password")
"""Formats of which the model takes texts only; of a date or a duration, for example, it takes numbers as well."""


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


def unknown_options(kind: str, name: str, given: Iterable[str], known: Iterable[str]) -> list[str]:
    """One message for each key of ``given`` that the plugin does not know."""
    known = sorted(known)
    return [
        f"unknown option plugins.{kind}.{name}.{key}{did_you_mean(key, known)}; "
        f"{kind} plugin {name!r} knows: {', '.join(known) or 'no options'}"
        for key in given
        if key not in known
    ]


def schema_faults(kind: str, name: str, schema: Mapping[str, Any], values: Mapping[str, Any]) -> list[str]:
    """What the model behind ``schema`` would refuse in ``values``, one message each, worded as the model would."""
    translation: Any = _Translation(schema)
    try:
        TypeAdapter(translation).validate_python(values)
    except ValidationError as error:
        return describe_faults(kind, name, error)
    except Exception as error:  # of many types; a plugin whose schema is odd is still checked where it loads
        _logger.debug("the options schema of %s:%s cannot be used: %s", kind, name, error)
    return []


def describe_faults(kind: str, name: str, error: ValidationError) -> list[str]:
    """One message for each fault, with the setting and what was given."""
    return [
        f"plugins.{kind}.{name}.{'.'.join(map(str, fault['loc']))}: {fault['msg']} (given: {fault['input']!r:.200})"
        for fault in error.errors(include_url=False)
    ]


class _Translation:
    """To pydantic, a type that validates what a JSON schema describes."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        self._schema = schema

    def __get_pydantic_core_schema__(self, source: Any, handler: Any) -> Any:
        named = self._schema.get("$defs", {})
        definitions = [{**_translate(part), "ref": f"#/$defs/{name}"} for name, part in named.items()]
        return {"type": "definitions", "schema": _translate(self._schema), "definitions": definitions}


def _translate(schema: Mapping[str, Any]) -> dict[str, Any]:
    kind = str(schema.get("type"))
    if schema.get(UNCHECKED) or schema.get("format") not in _TEXT_FORMATS:
        return _ANY
    if "$ref" in schema:
        return {"type": "definition-ref", "schema_ref": schema["$ref"]}
    if "const" in schema or "enum" in schema:
        return {"type": "literal", "expected": [schema["const"]] if "const" in schema else schema["enum"]}
    if parts := schema.get("anyOf", schema.get("oneOf")):
        choices = [_translate(part) for part in parts if part.get("type") != "null"]
        union = choices[0] if len(choices) == 1 else {"type": "union", "choices": choices}
        return union if len(choices) == len(parts) else {"type": "nullable", "schema": union}
    if kind == "array":
        return _translate_list(schema)
    if kind == "object":
        return _translate_object(schema)
    return {"type": _SCALARS[kind], **_bounds(schema)} if kind in _SCALARS else _ANY


def _bounds(schema: Mapping[str, Any]) -> dict[str, Any]:
    return {_BOUNDS[key]: value for key, value in schema.items() if key in _BOUNDS}


def _translate_list(schema: Mapping[str, Any]) -> dict[str, Any]:
    # Where the first items have schemas of their own, "items" speaks of the rest; equal items of a set count once.
    items = {} if "prefixItems" in schema else schema.get("items", {})
    bounds = {} if schema.get("uniqueItems") else _bounds(schema)
    return {"type": "list", "items_schema": _translate(items), **bounds}


def _translate_object(schema: Mapping[str, Any]) -> dict[str, Any]:
    extra = schema.get("additionalProperties")
    if "properties" not in schema:
        return {"type": "dict", "values_schema": _translate(extra if isinstance(extra, Mapping) else {})}
    required = schema.get("required", ())
    fields = {
        key: {"type": "typed-dict-field", "schema": _translate(part), "required": key in required}
        for key, part in schema["properties"].items()
    }
    return {"type": "typed-dict", "fields": fields, "extra_behavior": "forbid" if extra is False else "ignore"}
