"""Writes ``hardpoint.json``, the manifest of a distribution, from what its plugins declare.

The schema of a plugin's options is pydantic's own, in the mode for values that come in. Where such a schema cannot
tell all that the model accepts (a validator that rewrites the value first, texts that are stripped, keys with two
names), it is marked ``unchecked``, and the launcher leaves the value to the model.
"""

from __future__ import annotations

import enum
import importlib
import importlib.util
import json
import re
from collections.abc import Callable, Iterator, Mapping
from operator import attrgetter
from os import PathLike
from pathlib import Path
from typing import Any

import msgspec
from pydantic import BaseModel
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from hardpoint.errors import PluginError, PluginNotFoundError
from hardpoint.interfaces.plugin import PluginDeclaration, declaration_of
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.manifest import MANIFEST_FILE, UNCHECKED
from hardpoint.plugins.metadata import canonical_name
from hardpoint.plugins.options import option_names
from hardpoint.plugins.records import DiscoveredPlugin
from hardpoint.plugins.suggest import did_you_mean

__all__ = ["FLAG", "manifest_text", "manifests_of", "options_schema"]

FLAG = "flag"
"""The key of a field's ``json_schema_extra`` that gives an option a flag of its own."""

_FLAG_FORM = re.compile(r"--[a-z][a-z0-9]*(-[a-z0-9]+)*")
_EXACT = frozenset(
    {
        *("any", "none", "bool", "int", "float", "str", "bytes", "date", "time", "datetime", "timedelta", "uuid"),
        *("url", "multi-host-url", "literal", "enum", "list", "tuple", "set", "frozenset", "dict", "nullable", "union"),
        *("tagged-union", "default", "definitions", "definition-ref", "function-after", "lax-or-strict"),
        *("model", "model-fields", "model-field", "computed-field", "dataclass", "dataclass-args", "dataclass-field"),
        *("typed-dict", "typed-dict-field"),
    }
)
"""Core schemas whose JSON schema admits at least what they accept, apart from the cases below."""

_REWRITES = ("strip_whitespace", "to_lower", "to_upper", "coerce_numbers_to_str")
_CONFIG = (
    *("str_strip_whitespace", "str_to_lower", "str_to_upper", "coerce_numbers_to_str", "regex_engine"),
    *("validate_by_name", "populate_by_name"),
)


class _OptionsSchema(GenerateJsonSchema):
    """Pydantic's generator, which marks each part that accepts more than it tells."""

    ignored_warning_kinds = {"skipped-choice", "non-serializable-default"}  # noqa: RUF012 (as the base class has it)

    def build_schema_type_to_method(self) -> dict[Any, Callable[[Any], JsonSchemaValue]]:
        methods = super().build_schema_type_to_method()
        return {kind: self._marking(method) for kind, method in methods.items()}

    def handle_invalid_for_json_schema(self, schema: Any, error_info: str) -> JsonSchemaValue:
        return {UNCHECKED: True}

    def _marking(self, method: Callable[[Any], JsonSchemaValue]) -> Callable[[Any], JsonSchemaValue]:
        def generate(schema: Any) -> JsonSchemaValue:
            told = method(schema)
            return told if _is_exact(schema) else {**told, UNCHECKED: True}

        return generate


def _is_exact(schema: Mapping[str, Any]) -> bool:
    kind = schema["type"]
    if kind == "json-or-python":  # the schema tells of JSON; of a path's other branch, options never are an instance
        other = schema["python_schema"]
        return other["type"] == "is-instance" and issubclass(other["cls"], PathLike)
    if kind not in _EXACT or any(schema.get(name) for name in _REWRITES):
        return False
    config = schema.get("config") or {}
    if any(config.get(name) for name in _CONFIG):
        return False
    if kind == "str":  # a compiled pattern is matched by another engine
        return isinstance(schema.get("pattern", ""), str)
    if kind == "enum":
        own = schema["cls"]._missing_.__func__ is not enum.Enum._missing_.__func__  # type: ignore[attr-defined]
        return not own and all(isinstance(member.value, str) for member in schema["members"])
    if kind == "function-after":  # a bound outside of a validator holds for what the validator returned
        inner = schema["schema"]["type"].startswith("function-")
        return not (inner and "pydantic_js_updates" in schema.get("metadata", {}))
    fields = schema.get("fields", ())
    rows = [row for row in (fields.values() if isinstance(fields, Mapping) else fields) if isinstance(row, Mapping)]
    return all(isinstance(row.get("validation_alias", ""), str) for row in rows)


def options_schema(model: type[BaseModel]) -> dict[str, Any]:
    """The JSON schema of ``model`` for a manifest: it admits every value that ``model`` accepts.

    Raises ``PluginError`` for a flag that is none.
    """
    schema: dict[str, Any] = _sorted_sets(model.model_json_schema(schema_generator=_OptionsSchema))
    reference = str(schema.get("$ref", "")).rpartition("/")[2]
    whole = schema.get("$defs", {}).get(reference, schema)
    if set(option_names(model)) != set(whole.get("properties", {})):
        whole[UNCHECKED] = True
    for key, part in whole.get("properties", {}).items():
        if FLAG in part and not (isinstance(part[FLAG], str) and _FLAG_FORM.fullmatch(part[FLAG])):
            raise PluginError(
                f"option {key!r} of {model.__name__} has the flag {part[FLAG]!r}; a flag is written like --two-words"
            )
    return schema


def _sorted_sets(part: Any) -> Any:
    """``part`` with the defaults of sets in order, which would change from run to run."""
    if isinstance(part, list):
        return [_sorted_sets(entry) for entry in part]
    if not isinstance(part, dict):
        return part
    done = {key: _sorted_sets(value) for key, value in part.items()}
    if done.get("uniqueItems") is True and isinstance(done.get("default"), list):
        done["default"] = sorted(done["default"], key=repr)
    return done


def manifest_text(declared: Mapping[tuple[str, str], PluginDeclaration]) -> str:
    """The file for plugins given as ``{(kind, name): declaration}``; the same declarations give the same text.

    Raises ``PluginError`` for a flag that is none and for capabilities that are no plain data.
    """
    plugins: dict[str, dict[str, Any]] = {}
    for (kind, name), declaration in sorted(declared.items(), key=lambda row: row[0]):
        plugins.setdefault(kind, {})[name] = _entry(kind, name, declaration)
    return json.dumps({"manifest_version": 1, "plugins": plugins}, indent=2, ensure_ascii=False) + "\n"


def _entry(kind: str, name: str, declaration: PluginDeclaration) -> dict[str, Any]:
    entry: dict[str, Any] = {"options": options_schema(declaration.options)}
    if declaration.required_tasks:
        entry["required_tasks"] = sorted(declaration.required_tasks)
    if kind == "model":
        entry["architectures"] = [name]
    if declaration.capabilities:
        try:
            encoded = msgspec.json.encode(dict(declaration.capabilities), order="deterministic")
        except TypeError as error:
            raise PluginError(f"the capabilities of {kind}:{name} are no plain data: {error}") from error
        entry["capabilities"] = msgspec.json.decode(encoded)
    return entry


def manifests_of(distribution: str) -> dict[Path, str]:
    """Path and text of the manifest of each package in which ``distribution`` has plugins. Imports them all.

    Raises ``PluginNotFoundError`` when it has none, ``PluginError`` when one cannot be described.
    """
    packages: dict[str, dict[tuple[str, str], PluginDeclaration]] = {}
    for plugin in _plugins_of(distribution):
        package = plugin.entry_point.partition(":")[0].partition(".")[0]
        packages.setdefault(package, {})[plugin.kind, plugin.name] = _declaration(plugin)
    return {_folder(package) / MANIFEST_FILE: manifest_text(declared) for package, declared in packages.items()}


def _plugins_of(distribution: str) -> Iterator[DiscoveredPlugin]:
    found, wanted = discover(), canonical_name(distribution)
    refused = [entry for entry in found.refused if canonical_name(entry.distribution) == wanted]
    if refused:
        faults = "; ".join(f"{entry.kind}:{entry.name}: {entry.reason}" for entry in refused)
        raise PluginError(f"{distribution} has plugins that this core refuses, so they cannot be described: {faults}")
    # Conformance classes are there for authors alone: they have no options, and need a test runner to be imported.
    described = [plugin for plugin in found.plugins if plugin.kind != "conformance"]
    mine = [plugin for plugin in described if canonical_name(plugin.distribution) == wanted]
    if not mine:
        known = sorted({plugin.distribution for plugin in described})
        raise PluginNotFoundError(
            f"no installed distribution {distribution!r} has plugins{did_you_mean(distribution, known)}; "
            f"those that have: {', '.join(known) or 'none'}"
        )
    yield from mine


def _declaration(plugin: DiscoveredPlugin) -> PluginDeclaration:
    module, _, attribute = plugin.entry_point.partition(":")
    try:
        factory = attrgetter(attribute)(importlib.import_module(module))
    except Exception as error:
        raise PluginError(
            f"{plugin.kind}:{plugin.name} ({plugin.distribution}) cannot be imported: {type(error).__name__}: {error}"
        ) from error
    declaration: PluginDeclaration = declaration_of(factory) or PluginDeclaration(plugin.kind)
    if declaration.kind != plugin.kind:
        raise PluginError(
            f"{plugin.entry_point} is declared as a {declaration.kind} plugin, but its entry point says {plugin.kind}"
        )
    return declaration


def _folder(package: str) -> Path:
    spec = importlib.util.find_spec(package)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    if not folders:
        raise PluginError(f"{package!r} is a single module; a manifest lies in a package's folder, so make it one")
    return Path(folders[0])
