"""Options of installed plugins: as variables, as flags of their own, and as help. Manifests tell of them all.

No plugin is imported for any of it. Whatever a command line shows before it is parsed comes from files, so a plugin
that cannot be imported, or only slowly, costs nobody their ``--help``. A plugin therefore gets flags by declaring
them (``json_schema_extra={"flag": "--audit-file"}`` on a field of its options), not by code.
"""

from __future__ import annotations

import argparse
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hardpoint.config.errors import one_line
from hardpoint.errors import ConfigError, PluginError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.manifest import load_manifest
from hardpoint.plugins.suggest import did_you_mean, plain

_PREFIX = "HARDPOINT_PLUGIN__"
_FLAG = re.compile(r"--[a-z][a-z0-9-]*")
_MAX_PARTS = 100_000
_WORDS = {"string": "text", "boolean": "switch", "array": "list", "object": "mapping"}
_FIELD_KINDS = {"loader": "weight_loader", "hash_algorithm": "hash"}
"""Settings that name a plugin of a kind with another name than their own."""
_SIGNS = {"minimum": "≥", "exclusiveMinimum": ">", "maximum": "≤", "exclusiveMaximum": "<"}


class _Described(NamedTuple):
    """An installed plugin; ``options`` maps keys to schemas, and is None where no manifest tells of them."""

    kind: str
    name: str
    distribution: str
    options: dict[str, dict[str, Any]] | None

    @property
    def label(self) -> str:
        return plain(f"{self.kind}.{self.name} ({self.distribution})")

    def variable(self, key: str) -> str:
        return _PREFIX + "__".join(re.sub(r"[^A-Z0-9]", "_", part.upper()) for part in (self.kind, self.name, key))


def _described() -> Iterator[_Described]:
    for plugin in discover().plugins:
        if plugin.kind == "conformance":  # test classes: nobody sets anything there
            continue
        try:
            manifest = load_manifest(plugin)
        except PluginError:
            manifest = None  # the start fails if the options are needed, and the doctor says what is wrong
        options = manifest.option_schemas if manifest is not None and manifest.options is not None else None
        yield _Described(plugin.kind, plugin.name, plugin.distribution, options)


def option_settings(flags: Sequence[str], environ: Mapping[str, str]) -> Iterator[tuple[str, str, str, Any]]:
    """Kind, name, key and value of each option that is set, those of the environment first: the last one counts.

    Raises ``ConfigError`` for a flag or variable of another form or unknown meaning, and for a value that cannot be
    read.
    """
    variables = sorted(variable for variable in environ if variable.startswith(_PREFIX))
    plugins = list(_described()) if variables or flags else []
    schemas = {(plugin.kind, plugin.name): plugin.options or {} for plugin in plugins}
    for variable in variables:
        kind, name, key = _meaning(variable, plugins)
        yield kind, name, key, _read(environ[variable], schemas[kind, name].get(key, {}), variable)
    for flag in flags:
        path, equals, text = flag.partition("=")
        kind, _, rest = path.partition(".")
        name, _, key = rest.rpartition(".")
        if not (equals and kind and name and key):
            raise ConfigError(f"--plugin {flag!r:.200} is not of the form kind.name.key=value")
        yield kind, name, key, _read(text, schemas.get((kind, name), {}).get(key, {}), f"--plugin {flag!r:.200}")


def _meaning(variable: str, plugins: Sequence[_Described]) -> tuple[str, str, str]:
    wanted = variable.upper()
    known = {(p.kind, p.name, key): p.variable(key) for p in plugins for key in p.options or ()}
    for plugin in plugins:
        if plugin.options is None and wanted.startswith(start := plugin.variable("")):
            key = wanted.removeprefix(start).lower()
            known[plugin.kind, plugin.name, key] = plugin.variable(key)
    owners = [owner for owner, spelling in known.items() if spelling == wanted]
    if len(owners) != 1:
        fault = " and ".join(".".join(owner) for owner in owners) or f"nothing{did_you_mean(wanted, known.values())}"
        raise ConfigError(f"{variable} means {fault}; {_PREFIX}KIND__NAME__KEY sets one option of an installed plugin")
    return owners[0]


def _read(text: str, schema: Mapping[str, Any], source: str) -> Any:
    types = [str(part.get("type")) for part in schema.get("anyOf", [schema])]
    if "string" in types and {*types} <= {"string", "null"}:
        return None if text == "null" and "null" in types else text
    return read_yaml(text, f"{source}: the value")


def read_yaml(source: str | Path, what: str) -> Any:
    """Raises ``ConfigError`` for what cannot be read, holds itself, or by aliases holds beyond measure."""
    try:
        document = yaml.safe_load(source if isinstance(source, str) else source.read_text(encoding="utf-8"))
        for count, _ in enumerate(json.JSONEncoder(default=str, skipkeys=True).iterencode(document)):
            if count > _MAX_PARTS:
                raise ValueError(f"it holds more than {_MAX_PARTS} values")
        return document
    except (OSError, yaml.YAMLError, ValueError, RecursionError) as error:
        raise ConfigError(f"{what} cannot be read: {one_line(error):.500}") from None


class _OptionFlag(argparse.Action):
    """Does what ``--plugin kind.name.key=value`` does; ``const`` is the path."""

    def __call__(self, parser: Any, namespace: Any, values: Any, option_string: str | None = None) -> None:
        text = str(not str(option_string).startswith("--no-")).lower() if self.nargs == 0 else values
        namespace.plugin = [*namespace.plugin, f"{self.const}={text}"]


def add_plugin_flags(parser: argparse.ArgumentParser) -> tuple[str, ...]:
    """Add the flags that manifests declare to a complete ``parser``, and return what is wrong with them.

    The help of settings that name a plugin lists the installed ones. ``load_config`` raises the same faults, so that
    no command starts with a flag of two meanings.
    """
    owners: dict[str, str] = {}
    faults = []
    plugins = list(_described())
    for setting in [action for action in parser._actions if action.dest.startswith("setting:")]:
        field = setting.dest.rpartition(":")[2]
        names = sorted({plugin.name for plugin in plugins if plugin.kind == _FIELD_KINDS.get(field, field)})
        if names:
            setting.help = f"{setting.help}; installed: {plain(', '.join(names)).replace('%', '%%')}"
    for plugin in plugins:
        group = parser.add_argument_group(plugin.label)
        flagged = [(key, schema) for key, schema in (plugin.options or {}).items() if "flag" in schema]
        for key, schema in flagged:
            flag, path = str(schema["flag"]), f"{plugin.kind}.{plugin.name}.{key}"
            owner = f"{path} ({plugin.distribution})"
            if owners.get(flag, "").startswith(f"{path} "):
                continue  # two distributions have the plugin; one of them must be pinned
            switch = {"nargs": 0} if schema.get("type") == "boolean" else {"metavar": "VALUE"}
            spellings = [flag, f"--no-{flag[2:]}"] if "nargs" in switch else [flag]
            _, told, default, meaning = _facts(key, schema)
            text = plain(f"{meaning} ({', '.join(filter(None, (told, default)))})").replace("%", "%%")
            settings: dict[str, Any] = {"dest": "plugin", "const": path, "default": argparse.SUPPRESS, "help": text}
            if not _FLAG.fullmatch(flag):
                faults.append(f"flag {flag} of {owner} is not of the form --two-words; uninstall {plugin.distribution}")
                continue
            try:
                group.add_argument(*spellings, action=_OptionFlag, **settings, **switch)
                owners.update(dict.fromkeys(spellings, owner))
            except argparse.ArgumentError:
                taken = next((owners[spelling] for spelling in spellings if spelling in owners), "the command itself")
                faults.append(f"flag {flag} of {owner} belongs to {taken} already; uninstall one")
    parser.set_defaults(plugin_faults=tuple(faults))
    return tuple(faults)


class PluginHelp(argparse.Action):
    """``--help=plugins``: prints the options of every installed plugin, and ends."""

    def __call__(self, parser: argparse.ArgumentParser, *_: Any) -> None:
        for plugin in sorted(_described(), key=lambda plugin: (not plugin.options, plugin.label)):
            rows = [_facts(key, schema) for key, schema in (plugin.options or {}).items()]
            widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
            note = ": no options" if plugin.options == {} else ""
            note = ": no manifest, so its options are known only where it loads" if plugin.options is None else note
            print(plugin.label + note)
            for row in rows:
                print(f"  {plain('  '.join(map(str.ljust, row, widths)).rstrip())}")
        print(f"\nSet one by its flag, as --plugin kind.name.option=value, as {_PREFIX}KIND__NAME__OPTION=value in the")
        print("environment, or under plugins in a file.")
        parser.exit()


def _facts(key: str, schema: Mapping[str, Any]) -> tuple[str, str, str, str]:
    """Option with its flag, type, default and description."""
    default = "" if schema.get("default") is None else f"default {json.dumps(schema['default'], ensure_ascii=False)}"
    named = f"{key} ({schema['flag']})" if "flag" in schema else key
    return named, _type(schema), "required" if schema["is_required"] else default, schema.get("description", "")


def _type(schema: Mapping[str, Any]) -> str:
    if "const" in schema or "enum" in schema:
        return " | ".join(map(str, schema.get("enum", [schema.get("const")])))
    if "anyOf" in schema:
        return " or ".join(_type(part) for part in schema["anyOf"] if part.get("type") != "null")
    told = str(schema.get("type", "value"))
    items = f" of {_type(schema['items'])}" if isinstance(schema.get("items"), dict) else ""
    bounds = "".join(f" {sign} {schema[bound]}" for bound, sign in _SIGNS.items() if bound in schema)
    return f"{_WORDS.get(told, told)}{items}{bounds}"
