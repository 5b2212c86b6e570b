"""``docs/reference/plugin-kinds.md``: what the table of kinds, entry points, factories, kits and templates say of each.

Nothing here is a list of its own: a kind, kit, template, example or page that comes or goes changes the page.
"""

from __future__ import annotations

import ast
import importlib
import inspect
import re
from collections.abc import Iterator
from dataclasses import dataclass, fields
from functools import cache
from pathlib import Path
from string import Template
from typing import Any, get_type_hints

import hardpoint.interfaces
from hardpoint.interfaces import PluginContext
from hardpoint.plugins.kinds import KINDS, KindSpec, Trust
from hardpoint.testing.plugin_suite import PluginSuite
from workspace import ROOT, Distribution, core, distributions, plugin_distributions, read_toml

__all__ = ["Signature", "interface_of", "kit_of", "kits_on_disk", "plugin_reference", "signature_of", "template_of"]

PUBLIC = "hardpoint.interfaces"
_CONFORMANCE = KINDS["conformance"]
_GENERAL_PAGES = ("write-a-plugin", "api-stability")
_NO_FACTORY = "–"
_FILLERS = dict.fromkeys(("package", "name", "title", "distribution", "kind", "group", "suite", "suite_module"), "x")


@dataclass(frozen=True, slots=True)
class Signature:
    """What a kind's factories take and give: classes of the public interfaces. ``result`` is None where each plugin
    returns an object of a class of its own."""

    context: type[PluginContext]
    result: type[Any] | None


def interface_of(kind: str) -> str:
    """The module whose docstring says that it defines ``kind``; empty while there is none."""
    if kind == _CONFORMANCE.name:
        return PluginSuite.__module__
    for path in sorted((core().source / "interfaces").glob("*.py")):
        text = path.read_text(encoding="utf-8")
        first = text.partition('"""')[2].partition("\n")[0]
        claims = f"Plugin kind ``{kind}``" in text or f"The kind ``{kind}``" in first
        if claims or (first.startswith("Plugin kinds") and f"``{kind}``" in first):
            return f"{PUBLIC}.{path.stem}"
    if f"a ``{kind}`` plugin" in (core().source / "interfaces/kv_cache.py").read_text(encoding="utf-8"):
        return f"{PUBLIC}.kv_cache"
    return ""


@cache
def kits_on_disk() -> dict[str, tuple[str, Distribution]]:
    """Entry point of each kind's kit, and the distribution that ships it."""
    return {
        name: (target, dist)
        for dist in distributions()
        for name, target in dist.entry_points.get(_CONFORMANCE.group, {}).items()
        if "." not in name
    }


def kit_of(kind: str) -> tuple[str, Distribution] | None:
    return kits_on_disk().get(kind)


def template_of(kind: str) -> Path | None:
    """The scaffold's template of the package's code."""
    kit = kit_of(kind)
    if kit is None:
        return None
    package = kit[0].partition(":")[0].rpartition(".")[0]
    path = kit[1].folder / "src" / package.replace(".", "/") / "templates" / kind / "plugin.py.txt"
    return path if path.is_file() else None


def signature_of(kind: str) -> Signature | None:
    """From the factories of this repository and the template; the most special context that any of them asks for."""
    found = [*_installed_signatures(kind), *_template_signatures(kind)]
    if not found:
        return None
    contexts = sorted({entry.context for entry in found}, key=lambda context: len(context.__mro__))
    results = {entry.result for entry in found if entry.result is not None}
    if len(results) > 1 or not all(issubclass(contexts[-1], context) for context in contexts):
        raise ValueError(f"factories of the kind {kind!r} disagree: {contexts}, {results}")
    return Signature(contexts[-1], results.pop() if results else None)


def _installed_signatures(kind: str) -> Iterator[Signature]:
    for dist in plugin_distributions():
        for target in dist.entry_points.get(KINDS[kind].group, {}).values():
            module, _, attribute = target.partition(":")
            factory: Any = getattr(importlib.import_module(module), attribute)
            is_class = isinstance(factory, type)
            hints = get_type_hints(factory.__init__ if is_class else factory)
            context = hints.get(next(iter(inspect.signature(factory).parameters), ""), PluginContext)
            yield Signature(context, _public(factory if is_class else hints.get("return")))


def _public(found: Any) -> type[Any] | None:
    """The first class of the public interfaces among ``found`` and its bases."""
    bases = found.__mro__ if isinstance(found, type) else ()
    return next((base for base in bases if base.__module__.startswith(PUBLIC)), None)


def _template_signatures(kind: str) -> Iterator[Signature]:
    path = template_of(kind)
    if path is None:
        return
    tree = ast.parse(Template(path.read_text(encoding="utf-8")).safe_substitute(_FILLERS))
    for node in tree.body:
        if isinstance(node, ast.FunctionDef) and node.name == "create":
            context, result = _named(node.args.args[0].annotation), _named(node.returns)
            if context is not None:
                yield Signature(context, result)


def _named(annotation: ast.expr | None) -> Any:
    return getattr(hardpoint.interfaces, annotation.id, None) if isinstance(annotation, ast.Name) else None


def _examples(spec: KindSpec) -> Iterator[str]:
    for project in sorted(ROOT.glob("examples_plugins/*/pyproject.toml")):
        if spec.group in read_toml(project)["project"].get("entry-points", {}):
            folder = project.parent.name
            yield f"[`{folder}`](../../examples_plugins/{folder}/README.md)"


def _guides(spec: KindSpec) -> Iterator[str]:
    """Pages that lead through a package of the kind."""
    marks = re.compile(rf"^hardpoint plugins new {spec.name} |^\[project\.entry-points\.\"{spec.group}\"\]", re.M)
    for page in sorted(ROOT.glob("docs/extend/*.md")):
        text = page.read_text(encoding="utf-8")
        if marks.search(text) and page.stem not in _GENERAL_PAGES:
            yield f"[{text.partition(chr(10))[0].removeprefix('# ')}](../extend/{page.name})"


def _built_in(spec: KindSpec) -> list[str]:
    found = [(name, dist.name) for dist in plugin_distributions() for name in dist.entry_points.get(spec.group, {})]
    return [f"`{name}` ({dist})" for name, dist in sorted(found)]


def _overview() -> str:
    rows = ["| kind | what it is | processes | when | how many | interface |", "|---|---|---|---|---|---|"]
    for spec in KINDS.values():
        module = interface_of(spec.name)
        title = f"[`{spec.name}`](#{spec.name})" if _has_section(spec) else f"`{spec.name}`"
        processes = "all" if len(spec.roles) == 4 else ", ".join(sorted(spec.roles))
        many = spec.cardinality + (", if allow-listed" if spec.trust is Trust.ALLOW_LIST else "")
        interface = f"`{module}`" if module else "with its first plugin"
        cells = (title + (" *" if spec.required else ""), spec.description, processes, spec.phase, many, interface)
        rows.append(f"| {' | '.join(cells)} |")
    return "\n".join(rows)


def _has_section(spec: KindSpec) -> bool:
    return bool(interface_of(spec.name))


def _section(spec: KindSpec) -> str:
    if spec.name == _CONFORMANCE.name:
        return _CONFORMANCE_TEXT.strip().replace("GROUP", spec.group)
    kit, signature = kit_of(spec.name), signature_of(spec.name)
    rows = {
        "group": f"`{spec.group}`",
        "interface": f"`{interface_of(spec.name)}`",
        "context": _NO_FACTORY if signature is None else _context(signature.context),
        "the factory returns": _NO_FACTORY if signature is None else _result(signature.result),
        "kit": "–" if kit is None else f"`{kit[0].replace(':', '.')}` ({kit[1].name})",
        "template": "–" if template_of(spec.name) is None else f"`hardpoint plugins new {spec.name} NAME`",
        "guide": ", ".join(_guides(spec)) or "[Write a plugin](../extend/write-a-plugin.md)",
        "example": ", ".join(_examples(spec)) or "–",
        "in this repository": ", ".join(_built_in(spec)) or "–",
    }
    return "| | |\n|---|---|\n" + "\n".join(f"| {key} | {value} |" for key, value in rows.items())


def _context(context: type[PluginContext]) -> str:
    shared = {field.name for field in fields(PluginContext)}
    own = [f"`{field.name}`" for field in fields(context) if field.name not in shared]
    return f"`{context.__name__}`" + (f", which adds {', '.join(own)}" if own else "")


def _result(result: type[Any] | None) -> str:
    return "an object of the plugin's own class" if result is None else f"`{result.__name__}`"


_INTRODUCTION = """
A plugin is an entry point in the group `hardpoint.<kind>.v<major>`; every kind below is at version 1, so an
endpoint is registered under `hardpoint.endpoint.v1`. An entry point for another version is seen, refused and
reported, never imported.
"""

_LEGEND = """
\\* a kind without which no engine starts.

*Processes* whose code may be the plugin's: asking for it elsewhere is an error. *When*: the moment at which its
code first runs there. *How many* are active: `exactly one` and `one` need a choice when
several are installed; of a `keyed` kind those that something names; of `many` all that
are admitted. *With its first plugin*: name and group are reserved, the interface is not written yet.

See [Plugins](../concepts/plugins.md) for how they are chosen and [Write a plugin](../extend/write-a-plugin.md) for
how to make one. Below, for each kind: the *context* that its factory gets, on top of the fields that all have
(CONTEXT); the *kit*, whose test class `hardpoint plugins test` runs; the *template* to begin with, if there is one.
"""

_CONFORMANCE_TEXT = """
Not for plugins of the engine but for their tests. In the group `GROUP` an entry named like a kind is that kind's
kit; one named `KIND.PLUGIN` is the class, derived from it, that a plugin's author ships because the kit needs more
than the plugin's name. `hardpoint plugins test` looks for the second, then for the first.
"""


def plugin_reference(note: str) -> str:
    """The whole page; ``note`` is its first line."""
    if {spec.api_version for spec in KINDS.values()} != {1}:
        raise ValueError("kinds have different versions now: say each kind's own in the introduction")
    shared = ", ".join(f"`{field.name}`" for field in fields(PluginContext))
    parts = [note, "# Plugin reference", _INTRODUCTION.strip(), _overview(), _LEGEND.strip().replace("CONTEXT", shared)]
    for spec in KINDS.values():
        if _has_section(spec):
            parts += [f"## `{spec.name}`", spec.description[:1].upper() + spec.description[1:] + ".", _section(spec)]
    return "\n\n".join(parts) + "\n"
