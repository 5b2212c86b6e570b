"""Reference pages that are written by the code they describe.

python tests/support/generate_docs.py           say which pages are out of date
python tests/support/generate_docs.py --write   write them
"""

from __future__ import annotations

import importlib
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from attention_rules import BOOK as ATTENTION_RULES
from gguf_page import gguf_page
from hardpoint.config import AppConfig, EngineConfig, PluginPolicy
from hardpoint.interfaces.plugin import declaration_of
from hardpoint.plugins.kinds import KINDS
from model_sizes import architectures_page
from models_page import FACTS, packaged_facts
from plugin_reference import plugin_reference
from plugin_rules import BOOK as PLUGIN_RULES
from runner_rules import BOOK as RUNNER_RULES
from scheduling_rules import BOOK as SCHEDULING_RULES
from workspace import ROOT, plugin_distributions

__all__ = ["PAGES", "configuration", "options_models", "plugin_kinds", "plugin_options", "stale_pages"]

_NOTE = "<!-- Written by tests/support/generate_docs.py; change the code it reads, then run it with --write. -->"
_ENGINE_SECTIONS = tuple(EngineConfig.model_fields)
_COMMA_LISTS = ("endpoints", "allowed_hosts")
_PLUGIN_FLAGS: Mapping[str, tuple[str, str]] = {
    "allow": ("`--plugins NAMES`", "`HARDPOINT_PLUGINS`"),
    "pins": ("`--pin KIND:NAME=DIST`, repeatable", "–"),
    "strict": ("`--strict-plugins`", "`HARDPOINT_PLUGINS_STRICT`"),
}


def _section_model(owner: type[BaseModel], field: str) -> type[BaseModel]:
    annotation: Any = owner.model_fields[field].annotation
    found: type[BaseModel] = annotation
    return found


def _type(info: FieldInfo) -> str:
    """The field's type in a reader's words, with its bounds."""
    annotation: Any = info.annotation
    parts = [part for part in get_args(annotation) if part is not type(None)]
    if len(parts) == 1 and get_origin(parts[0]) is Literal:
        parts = list(get_args(parts[0]))
    if get_origin(annotation) is tuple:
        words = "list of texts"
    elif parts and all(isinstance(part, str) for part in parts):
        words = " \\| ".join(f"`{part}`" for part in parts)
    else:
        plain = parts[0] if parts else annotation
        words = _scalar(plain, info)
    bounds = [f"{sign} {value}" for sign, value in _bounds(info)]
    return f"{words}, {', '.join(bounds)}" if bounds else words


def _scalar(annotation: Any, info: FieldInfo) -> str:
    if get_origin(annotation) is tuple:
        return "list of texts"
    validators = {getattr(part, "func", None) for part in (*info.metadata, *getattr(annotation, "__metadata__", ()))}
    names = {getattr(function, "__name__", "") for function in validators}
    if "parse_bytes" in names:
        return "size"
    if "parse_count" in names:
        return "count"
    return {bool: "switch", int: "integer", float: "number", str: "text"}.get(annotation, str(annotation))


def _bounds(info: FieldInfo) -> Iterator[tuple[str, Any]]:
    for part in info.metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            value = getattr(part, name, None)
            if value is not None:
                yield sign, value


def _default(info: FieldInfo) -> str:
    value = info.default
    if value is PydanticUndefined:
        return "required"
    if value is None or value == ():
        return "–"
    if isinstance(value, bool):
        return "on" if value else "off"
    if isinstance(value, tuple):
        return f"`{', '.join(value)}`"
    return f"`{_size(value) if _type(info).startswith('size') else value}`"


def _size(number: int) -> str:
    for power, unit in ((3, "GiB"), (2, "MiB"), (1, "KiB")):
        if number % 1024**power == 0:
            return f"{number // 1024**power}{unit}"
    return str(number)


def _flag(field: str, info: FieldInfo) -> str:
    option = "--" + field.replace("_", "-")
    if _type(info).startswith("switch"):
        return f"`{option}`, `--no-{option[2:]}`"
    if "list" not in _type(info):
        return f"`{option}`"
    return f"`{option}`, repeatable" + (" or with commas" if field in _COMMA_LISTS else "")


def _table(
    model: type[BaseModel], flags: Callable[[str, FieldInfo], tuple[str, str]], only: tuple[str, ...] = ()
) -> str:
    lines = ["| key | flag | environment | value | default | meaning |", "|---|---|---|---|---|---|"]
    for field, info in model.model_fields.items():
        if not only or field in only:
            flag, variable = flags(field, info)
            meaning = (info.description or "").replace("|", "\\|")
            lines.append(f"| `{field}` | {flag} | {variable} | {_type(info)} | {_default(info)} | {meaning} |")
    return "\n".join(lines)


def _common(field: str, info: FieldInfo) -> tuple[str, str]:
    if field == "name":
        return "first argument", "–"
    return _flag(field, info), f"`HARDPOINT_{field.upper()}`"


def configuration() -> str:
    """``docs/reference/configuration.md`` from the pydantic models."""
    parts = [_NOTE, "# Settings", _INTRODUCTION.strip()]
    for section in _ENGINE_SECTIONS:
        model = _section_model(EngineConfig, section)
        parts += [f"## `{section}`", (model.__doc__ or "").strip(), _table(model, _common)]
    server = _section_model(AppConfig, "server")
    parts += ["## `server`", (server.__doc__ or "").strip() + " `hardpoint serve` only.", _table(server, _common)]
    parts += ["## Logging", _LOGGING_TEXT.strip(), _table(AppConfig, _common, ("log_level", "log_interval_s"))]
    policy = _table(PluginPolicy, lambda field, _: _PLUGIN_FLAGS[field])
    parts += ["## `plugin_policy`", (PluginPolicy.__doc__ or "").strip(), policy, _PLUGIN_OPTIONS.strip()]
    return "\n\n".join(parts) + "\n"


_INTRODUCTION = """
Every setting exists in three spellings: a key in a YAML file (`--config FILE` or `HARDPOINT_CONFIG`), a flag, and
an environment variable. The command line wins over the environment, the environment over the file, the file over
the default. In Python the engine's settings are keyword arguments: `LLM("smollm2", max_num_seqs=8)`. Unknown keys
and values out of range stop the start, with one message that lists them all.

Values: a *count* may be written `8k` or `2m` (thousands, millions); a *size* `512MiB`, `4GB` or plain bytes; a
*list* is a YAML list, a repeated flag, or a comma-separated environment variable (the flags `--endpoints` and
`--allowed-hosts` take commas too, those of keys do not); a *switch* in the environment is one of 1, true, yes, on, 0,
false, no, off. "–" is unset. Where it says that the platform decides, the start of the log tells what was decided.
"""

_LOGGING_TEXT = """
At the top level of a file. Logs go to standard error. `log_level` in a file and the default below are those of `serve`;
the other commands log from WARNING on, unless the flag or the variable says otherwise.
"""

_PLUGIN_OPTIONS = """
## `plugins`

Each plugin's own options, under `plugins.<kind>.<name>` in a file, as `--plugin kind.name.key=value`, or as
`HARDPOINT_PLUGIN__KIND__NAME__KEY=value` in the environment:

```yaml
model: smollm2
scheduler:
  max_num_seqs: 16
server:
  endpoints: [openai, ops]
plugins:
  endpoint:
    openai:
      keepalive_s: 5
```

The plugin's options model decides what is allowed; an unknown key is an error that names the nearest known one. Those
of the built-in plugins: [Options](plugin-options.md).
"""


def plugin_kinds() -> str:
    """``docs/reference/plugin-kinds.md`` from the table of kinds, the interfaces and the entry points on disk."""
    return plugin_reference(_NOTE)


def options_models() -> Iterator[tuple[str, str, type[BaseModel]]]:
    """Kind, name and options model of every plugin of this repository that has options."""
    for spec in KINDS.values():
        for dist in plugin_distributions():
            for name, target in sorted(dist.entry_points.get(spec.group, {}).items()):
                module, _, attribute = target.partition(":")
                declared = declaration_of(getattr(importlib.import_module(module), attribute))
                if declared is not None and declared.options.model_fields:
                    yield spec.name, name, declared.options


def _option_value(info: FieldInfo) -> str:
    if get_origin(info.annotation) is dict:
        return "mapping of texts"
    return _type(info)


def _option_default(info: FieldInfo) -> str:
    if info.default_factory is not None:
        return "–"
    if isinstance(info.default, tuple) and info.default:
        return ", ".join(f"`{part}`" for part in info.default)
    return _default(info)


def plugin_options() -> str:
    """``docs/reference/plugin-options.md`` from the options models of the plugins of this repository."""
    parts = [_NOTE, "# Options of the built-in plugins", _OPTIONS_TEXT.strip()]
    for kind, name, model in options_models():
        lines = ["| option | value | default | meaning |", "|---|---|---|---|"]
        for field, info in model.model_fields.items():
            cells = (f"`{field}`", _option_value(info), _option_default(info), info.description or "")
            lines.append(f"| {' | '.join(cells)} |")
        parts += [f"## `{kind}.{name}`", "\n".join(lines)]
    return "\n\n".join(parts) + "\n"


_OPTIONS_TEXT = """
Set them with `--plugin kind.name.key=value`, as `HARDPOINT_PLUGIN__KIND__NAME__KEY=value`, or in a file under
`plugins.<kind>.<name>`; lists and mappings are written as in YAML:
`--plugin 'endpoint.openai.template_arguments=[enable_thinking]'`. `hardpoint serve --help=plugins` lists them too.
Plugins that are not listed here have no options. What holds for the whole engine or server is a
[setting](configuration.md) instead.
"""


def architectures() -> str:
    """``docs/models/architectures.md`` from the plugins of models."""
    return architectures_page(_NOTE)


PAGES: Mapping[str, Callable[[], str]] = {
    "docs/models/architectures.md": architectures,
    "docs/models/gguf.md": lambda: gguf_page(_NOTE),
    FACTS: packaged_facts,
    "docs/reference/configuration.md": configuration,
    "docs/reference/plugin-kinds.md": plugin_kinds,
    "docs/reference/plugin-options.md": plugin_options,
    PLUGIN_RULES.page: PLUGIN_RULES.render,
    SCHEDULING_RULES.page: SCHEDULING_RULES.render,
    RUNNER_RULES.page: RUNNER_RULES.render,
    ATTENTION_RULES.page: ATTENTION_RULES.render,
}


def stale_pages() -> list[str]:
    """Pages on disk that differ from what the code says."""
    found = []
    for name, render in PAGES.items():
        path = ROOT / name
        if not path.is_file() or path.read_text(encoding="utf-8") != render():
            found.append(name)
    return found


def main() -> None:
    stale = stale_pages()
    print("\n".join(stale) or "all generated pages are up to date")
    if "--write" in sys.argv[1:]:
        for name in stale:
            Path(ROOT / name).write_text(PAGES[name](), encoding="utf-8")


if __name__ == "__main__":
    main()
