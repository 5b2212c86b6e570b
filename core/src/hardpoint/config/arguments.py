"""Command-line flags, environment variables and YAML, all derived from the configuration models.

A field ``max_num_seqs`` is ``--max-num-seqs`` and ``HARDPOINT_MAX_NUM_SEQS``. The command line wins over the
environment, the environment over the file, the file over the default; so it is with the options of plugins.
"""

from __future__ import annotations

import argparse
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo

from hardpoint.config.models import AppConfig, EngineConfig, PluginPolicy, ServerConfig
from hardpoint.config.plugin_options import PluginHelp, option_settings, read_yaml
from hardpoint.config.settle import settle
from hardpoint.errors import ConfigError
from hardpoint.plugins.selection import ALLOW_VARIABLE, STRICT_VARIABLE, parse_flag, parse_names

_ENGINE_SECTIONS = tuple(EngineConfig.model_fields)
_COMMA_LISTS = ("endpoints", "allowed_hosts")
"""Lists whose flag takes commas as well as repetition; keys may hold commas and do not."""


@dataclass(frozen=True, slots=True)
class _Flag:
    section: str
    field: str
    info: FieldInfo

    @property
    def annotation(self) -> Any:
        """The field's type without ``None``."""
        annotation = self.info.annotation
        if get_origin(annotation) in (Union, types.UnionType):
            annotation = next(part for part in get_args(annotation) if part is not type(None))
        return annotation

    @property
    def is_list(self) -> bool:
        return get_origin(self.annotation) is tuple

    @property
    def is_switch(self) -> bool:
        return self.annotation is bool


def _flags(with_server: bool) -> Iterator[_Flag]:
    models: dict[str, Any] = {section: info.annotation for section, info in EngineConfig.model_fields.items()}
    for section, model in (models | ({"server": ServerConfig} if with_server else {})).items():
        yield from (_Flag(section, field, info) for field, info in model.model_fields.items() if field != "name")
    for field in ("log_level", "log_interval_s"):
        yield _Flag("", field, AppConfig.model_fields[field])


def add_arguments(parser: argparse.ArgumentParser, *, with_server: bool) -> None:
    """Add every setting as a flag, the model as an optional positional, and the plugin options."""
    parser.add_argument("model", nargs="?", help="a known name, a folder, a .gguf file or a hub id")
    parser.add_argument("--config", metavar="FILE", help="YAML file with settings (also HARDPOINT_CONFIG)")
    groups: dict[str, argparse._ArgumentGroup] = {}
    for flag in _flags(with_server):
        group = groups.get(flag.section) or parser.add_argument_group(flag.section or "logging")
        groups[flag.section] = group
        default = flag.info.default
        text = flag.info.description or ""
        if default not in (None, (), False):
            text += f" (default: {' '.join(default) if flag.is_list else default})"
        settings: dict[str, Any] = {"dest": f"setting:{flag.section}:{flag.field}", "default": None}
        settings["help"] = text.replace("%", "%%")
        if flag.is_switch:
            settings["action"] = argparse.BooleanOptionalAction
        elif flag.is_list:
            settings.update(action="append", metavar="VALUE")
        else:
            choices = list(get_args(flag.annotation)) if get_origin(flag.annotation) is Literal else None
            settings.update(choices=choices, metavar=None if choices else "VALUE")
        group.add_argument("--" + flag.field.replace("_", "-"), **settings)
    add = parser.add_argument_group("plugins").add_argument
    # To argparse, an option that is spelt like this as a whole goes before -h and its value.
    text = "list the options of installed plugins"
    add("--help=plugins", action=PluginHelp, dest="help", nargs=0, default=argparse.SUPPRESS, help=text)
    add("--plugin", action="append", default=[], metavar="KIND.NAME.KEY=VALUE", help="a plugin's option")
    add("--plugins", metavar="NAMES", help="plugins that may load merely by being installed")
    add("--pin", action="append", default=[], metavar="KIND:NAME=DIST", help="settle a doubled name")
    add("--strict-plugins", action="store_true", help=PluginPolicy.model_fields["strict"].description)


def load_config(arguments: argparse.Namespace, environ: Mapping[str, str]) -> AppConfig:
    """The validated configuration. Raises ``ConfigError`` that names the setting, its value and what is allowed."""
    document = _read_file(arguments.config or environ.get("HARDPOINT_CONFIG"))
    engine, rest = _split_document(document)
    for flag in _flags(with_server=True):
        value = _given(flag, arguments, environ)
        if value is not None:
            holder = engine if flag.section in _ENGINE_SECTIONS else rest
            (_section(holder, flag.section) if flag.section else holder)[flag.field] = value
    if arguments.model is not None:
        _section(engine, "model")["name"] = arguments.model
    if "name" not in _section(engine, "model"):
        raise ConfigError("no model is named; give one as the first argument or as model.name in the file")
    _apply_plugin_arguments(arguments, environ, rest)
    name = engine["model"].get("served_name") or engine["model"]["name"]
    return settle({"engines": {str(name): engine}, **rest})


def _given(flag: _Flag, arguments: argparse.Namespace, environ: Mapping[str, str]) -> Any:
    value = getattr(arguments, f"setting:{flag.section}:{flag.field}", None)
    if value is not None and flag.field in _COMMA_LISTS:
        value = tuple(part.strip() for given in value for part in given.split(",") if part.strip())
    variable = "HARDPOINT_" + flag.field.upper()
    text = environ.get(variable)
    if value is not None or text is None:
        return value
    if flag.is_list:
        return parse_names(text)
    return parse_flag(variable, text) if flag.is_switch else text


def _read_file(path: str | None) -> dict[str, Any]:
    if path is None:
        return {}
    document = read_yaml(Path(path), f"configuration file {path!r}")
    if not isinstance(document, dict):
        raise ConfigError(f"configuration file {path!r} holds no mapping of sections")
    return document


def _split_document(document: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The one engine's sections, and the rest. ``model: name`` is short for ``model: {name: name}``."""
    rest = {key: value for key, value in document.items() if key not in (*_ENGINE_SECTIONS, "engines")}
    engines = document.get("engines")
    if engines is not None:
        if not isinstance(engines, dict) or len(engines) != 1:
            raise ConfigError("'engines' must hold exactly one engine; one server runs one model for now")
        if beside := [key for key in _ENGINE_SECTIONS if key in document]:
            raise ConfigError(f"{', '.join(beside)} must stand under the engine in 'engines', not beside it")
        ((name, given),) = engines.items()
        if not isinstance(given, dict):
            raise ConfigError(f"the entry under 'engines' must hold sections like model and cache, not {given!r:.200}")
        engine = dict(given)
    else:
        engine = {key: document[key] for key in _ENGINE_SECTIONS if key in document}
    if isinstance(engine.get("model"), str):
        engine["model"] = {"name": engine["model"]}
    for holder in (engine, rest):
        for key, value in holder.items():
            if isinstance(value, dict):
                holder[key] = dict(value)
    if engines is not None:
        _section(engine, "model").setdefault("served_name", str(name))
    return engine, rest


def _section(holder: dict[str, Any], name: str) -> dict[str, Any]:
    """The section as a place to put flags into. Raises ``ConfigError`` where the file holds something else."""
    section = holder.setdefault(name, {})
    if not isinstance(section, dict):
        raise ConfigError(f"{name!r} must be a section with settings of its own, not {section!r:.200}")
    return section


def _apply_plugin_arguments(arguments: argparse.Namespace, environ: Mapping[str, str], rest: dict[str, Any]) -> None:
    if faults := getattr(arguments, "plugin_faults", ()):
        raise ConfigError("\n".join(faults))
    for kind, name, key, value in option_settings(arguments.plugin, environ):
        _section(_section(_section(rest, "plugins"), kind), name)[key] = value
    policy = _section(rest, "plugin_policy")
    allow = parse_names(environ.get(ALLOW_VARIABLE) if arguments.plugins is None else arguments.plugins)
    if allow is not None:
        policy["allow"] = allow
    if arguments.pin:
        policy["pins"] = tuple(arguments.pin)
    if arguments.strict_plugins or environ.get(STRICT_VARIABLE):
        policy["strict"] = arguments.strict_plugins or parse_flag(STRICT_VARIABLE, environ[STRICT_VARIABLE])
