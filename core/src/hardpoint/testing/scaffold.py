"""Writes plugin packages from templates.

A kind's template is a folder ``templates/<kind>`` beside its conformance class: ``plugin.py.txt`` becomes the package,
``conformance.py.txt``, where there is one, the class that supplies what only an author knows, ``requires.txt`` further
requirements, ``notes.md.txt`` the middle of the README. ``$name`` and the like are filled in.
"""

from __future__ import annotations

import keyword
import re
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from string import Template
from typing import NamedTuple

from hardpoint.errors import ConfigError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.kinds import kind_spec
from hardpoint.plugins.suggest import did_you_mean
from hardpoint.version import __version__

__all__ = ["Blueprint", "available_kinds", "template_of", "write_package"]

_NAME = re.compile(r"[A-Za-z](?:[A-Za-z0-9_.-]*[A-Za-z0-9])?")
_CORE = "hardpoint-core"
_COMMON = Path(__file__).parent / "templates/common"


class _Kit(NamedTuple):
    module: str
    suite: str
    distribution: str


def _kits() -> dict[str, _Kit]:
    """Each kind's kit, from metadata."""
    found = {}
    for entry in discover().of("conformance"):
        module, _, suite = entry.entry_point.partition(":")
        if "." not in entry.name:
            found[entry.name] = _Kit(module, suite, entry.distribution)
    return found


def template_of(kind: str) -> Path | None:
    """The template folder of ``kind``, or ``None``. Imports at most the package that holds the kit."""
    kit = _kits().get(kind)
    if kit is None:
        return None
    spec = find_spec(kit.module.rpartition(".")[0] or kit.module)
    for folder in (spec.submodule_search_locations or ()) if spec else ():
        path = Path(folder) / "templates" / kind
        if (path / "plugin.py.txt").is_file():
            return path
    return None


def available_kinds() -> tuple[str, ...]:
    """Kinds for which a package can be written here."""
    return tuple(sorted(kind for kind in _kits() if template_of(kind) is not None))


@dataclass(frozen=True, slots=True)
class Blueprint:
    """What a package is to be. ``title`` is the plugin's name in CamelCase, for classes."""

    kind: str
    name: str
    distribution: str
    template: Path

    @classmethod
    def of(cls, kind: str, name: str, distribution: str | None = None) -> Blueprint:
        """Raises ``ConfigError`` naming what cannot be used and what can."""
        kinds = available_kinds()
        template = template_of(kind)
        if template is None:
            raise ConfigError(
                f"no package can be written for the kind {kind!r}{did_you_mean(kind, kinds)}; kinds with a kit and a "
                f"template here: {', '.join(kinds) or 'none'}"
            )
        distribution = distribution or f"hardpoint-{name.lower().replace('_', '-')}"
        for what, text in (("plugin name", name), ("distribution name", distribution)):
            if not _NAME.fullmatch(text):
                raise ConfigError(
                    f"the {what} {text!r} must begin with a letter, hold letters, digits, . _ and -, and end with a "
                    "letter or digit"
                )
        blueprint = cls(kind, name, distribution, template)
        if keyword.iskeyword(blueprint.package):
            raise ConfigError(
                f"the distribution name {distribution!r} gives the package {blueprint.package!r}, a word of Python's "
                "own; choose another --distribution"
            )
        if find_spec(blueprint.package) is not None:
            raise ConfigError(
                f"a package {blueprint.package!r} can be imported here already; choose another name or --distribution"
            )
        return blueprint

    @property
    def package(self) -> str:
        return re.sub(r"[-.]+", "_", self.distribution).lower()

    @property
    def title(self) -> str:
        plain = "".join(part[:1].upper() + part[1:] for part in re.split(r"[-_.]+", self.name))
        text = (self.template / "plugin.py.txt").read_text(encoding="utf-8")
        ends = re.findall(r"^class \$\{title\}(\w*)", text, re.MULTILINE)
        # A class must not take the name of one that the template imports, as "attention" would with its backend, nor a
        # word of Python's own, as "none" would.
        is_taken = keyword.iskeyword(plain) or any(re.search(rf"\b{plain}{end}\b", text) for end in ends)
        return f"{plain}Plugin" if is_taken else plain

    @property
    def code(self) -> str:
        return f"src/{self.package}/__init__.py"

    @property
    def brings_class(self) -> bool:
        """Whether the package supplies a conformance class of its own."""
        return (self.template / "conformance.py.txt").is_file()


def write_package(blueprint: Blueprint, into: Path) -> Path:
    """The folder written. Raises ``ConfigError`` when it exists and is not empty, or cannot be written."""
    folder = into / blueprint.distribution
    if folder.exists() and any(folder.iterdir() if folder.is_dir() else [folder]):
        raise ConfigError(f"{folder} is there already; choose another name, --distribution or --into")
    try:
        for path, text in _files(blueprint).items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(text, encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{folder} cannot be written: {error.strerror}; choose another --into") from None
    return folder


def _files(blueprint: Blueprint) -> dict[str, str]:
    values = _values(blueprint)

    def filled(path: Path) -> str:
        return Template(path.read_text(encoding="utf-8")).substitute(values)

    notes = blueprint.template / "notes.md.txt"
    values["notes"] = filled(notes).strip() if notes.is_file() else ""
    package = f"src/{blueprint.package}"
    files = {
        "pyproject.toml": filled(_COMMON / "pyproject.toml.txt"),
        "README.md": filled(_COMMON / "README.md.txt"),
        f"{package}/__init__.py": filled(blueprint.template / "plugin.py.txt"),
        f"{package}/py.typed": "",
    }
    if blueprint.brings_class:
        files[f"{package}/conformance.py"] = filled(blueprint.template / "conformance.py.txt")
        test = _COMMON / "test_own_class.py.txt"
    else:
        test = _COMMON / "test_kit_class.py.txt"
    return {**files, f"tests/test_{blueprint.package}_conformance.py": filled(test)}


def _values(blueprint: Blueprint) -> dict[str, str]:
    spec = kind_spec(blueprint.kind)
    kit = _kits()[blueprint.kind]
    requires = blueprint.template / "requires.txt"
    further = requires.read_text(encoding="utf-8").split("\n") if requires.is_file() else []
    own = (
        f'\n[project.entry-points."{kind_spec("conformance").group}"]\n'
        f'"{blueprint.kind}.{blueprint.name}" = "{blueprint.package}.conformance:Test{blueprint.title}"\n'
    )
    return {
        "kind": blueprint.kind,
        "name": blueprint.name,
        "title": blueprint.title,
        "distribution": blueprint.distribution,
        "package": blueprint.package,
        "group": spec.group,
        "variable": re.sub(r"[^A-Z0-9]", "_", blueprint.name.upper()) + "_PRESENT",
        "description": spec.description,
        "roles": ", ".join(sorted(spec.roles)),
        "phase": str(spec.phase),
        "suite": kit.suite,
        "suite_module": kit.module,
        "core_range": _core_range(),
        "kit_requirement": "" if kit.distribution == _CORE else f', "{kit.distribution}{_core_range()}"',
        "requires": "".join(f',\n    "{line.strip()}"' for line in further if line.strip()),
        "conformance_entry": own if blueprint.brings_class else "",
    }


def _core_range() -> str:
    """The core's minor version and nothing beyond: interfaces may change with the next one."""
    major, minor = __version__.split(".")[:2]
    return f">={major}.{minor},<{major}.{int(minor) + 1}"
