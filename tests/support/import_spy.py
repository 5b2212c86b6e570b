"""Every installed plugin, seen through a module that writes down who imports it.

The metadata written here come first on the path, so they hide those of the same distributions: same names and versions,
but each entry point leads to a module of its own, which takes note and hands on the plugin itself. Kinds that nobody
implements get a made-up plugin.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import KINDS
from hardpoint.plugins.records import DiscoveredPlugin
from scratch_install import write_metadata

__all__ = ["Import", "ImportSpy", "install_import_spy"]

_FILE = "IMPORT_SPY_FILE"
_PACKAGE = """
import json
import os
import sys


def note(kind, name, **facts):
    is_child = "hardpoint.process" in " ".join(sys.orig_argv)
    where = sys.argv[1].partition("-")[0] if is_child else "launcher"
    line = {"kind": kind, "name": name, "pid": os.getpid(), "where": where, **facts}
    with open(os.environ["IMPORT_SPY_FILE"], "a") as file:
        file.write(json.dumps(line) + "\\n")
"""
_REAL = """
import importlib, operator
import import_spy
import_spy.note({kind!r}, {name!r})
create = operator.attrgetter({attribute!r})(importlib.import_module({module!r}))
"""
_MADE_UP = """
import import_spy
import_spy.note({kind!r}, {name!r})
def create(ctx, options): return object()
"""
_HOOKS = """
import sys
import import_spy
from hardpoint.interfaces.hooks import hookimpl
import_spy.note({kind!r}, {name!r})

class Witness:
    @hookimpl
    def process_stopping(self):
        packages = {{name.partition(".")[0] for name in sys.modules}}
        watched = sorted(name for name in packages if name == "torch" or name.startswith("hardpoint_"))
        import_spy.note("", "at the end", modules=watched)

def create(ctx, options): return Witness()
"""


@dataclass(frozen=True, slots=True)
class Import:
    """One module of a plugin imported by one process; or, with no kind, ``modules`` of a process at its end."""

    kind: str
    name: str
    pid: int
    where: str
    modules: tuple[str, ...] = ()


class ImportSpy:
    """What was imported, by process."""

    def __init__(self, site: Path, file: Path) -> None:
        self.site = site
        self.file = file
        self.environ: Mapping[str, str] = {
            "PYTHONPATH": os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH")])]),
            _FILE: str(file),
        }

    def imports(self) -> list[Import]:
        lines = self.file.read_text(encoding="utf-8").splitlines() if self.file.exists() else []
        return [Import(**json.loads(line)) for line in lines]

    def kinds(self, where: str) -> set[str]:
        return {entry.kind for entry in self.imports() if entry.where == where and entry.kind}

    def modules_at_the_end(self, where: str) -> set[str]:
        """Packages of plugins, and torch, in a process that has done its work."""
        (last,) = [entry for entry in self.imports() if entry.where == where and not entry.kind]
        return set(last.modules)


def install_import_spy(folder: Path) -> ImportSpy:
    """A place of installed packages below ``folder`` that must come first on the path of what is watched."""
    site = folder / "site"
    package = site / "import_spy"
    package.mkdir(parents=True)
    (package / "__init__.py").write_text(_PACKAGE, encoding="utf-8")
    by_distribution: dict[tuple[str, str], list[DiscoveredPlugin]] = {}
    for plugin in discover().plugins:
        by_distribution.setdefault((plugin.distribution, plugin.version), []).append(plugin)
    for number, ((name, version), plugins) in enumerate(by_distribution.items()):
        groups: dict[str, dict[str, str]] = {}
        for index, plugin in enumerate(plugins):
            module, _, attribute = plugin.entry_point.partition(":")
            text = _REAL.format(kind=plugin.kind, name=plugin.name, module=module, attribute=attribute)
            (package / f"d{number}_{index}.py").write_text(text, encoding="utf-8")
            groups.setdefault(KINDS[plugin.kind].group, {})[plugin.name] = f"import_spy.d{number}_{index}:create"
        write_metadata({"name": name, "version": version, "entry-points": groups}, site)
    missing = {"hooks", *KINDS} - {plugin.kind for plugin in discover().plugins if plugin.kind != "hooks"}
    for kind in missing:
        text = _HOOKS if kind == "hooks" else _MADE_UP
        (package / f"{kind}.py").write_text(text.format(kind=kind, name="made_up"), encoding="utf-8")
    groups = {KINDS[kind].group: {"made_up": f"import_spy.{kind}:create"} for kind in sorted(missing)}
    write_metadata({"name": "import-spy", "version": "1.0", "entry-points": groups}, site)
    return ImportSpy(site, folder / "imports.jsonl")
