"""``hardpoint plugins new``: writes an installable package with a working plugin, its conformance test and a README."""

from __future__ import annotations

import argparse
from pathlib import Path

from hardpoint.testing.scaffold import Blueprint, available_kinds, write_package

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("kind", metavar="KIND", help=f"one of {', '.join(available_kinds()) or 'none: no kit is installed'}")
    add("name", metavar="NAME", help="how users will name the plugin")
    add("--distribution", metavar="DIST", help="name of the package to install (default: hardpoint-NAME)")
    add("--into", metavar="FOLDER", default=".", help="where to make the package's folder (default: here)")


def run(arguments: argparse.Namespace) -> int:
    """Raises ``ConfigError`` for names that cannot be used and for a folder that is there already."""
    blueprint = Blueprint.of(arguments.kind, arguments.name, arguments.distribution)
    folder = write_package(blueprint, Path(arguments.into))
    print(f"wrote {folder}: plugin {blueprint.name!r} of the kind {blueprint.kind}")
    print(f"  install it:  python -m pip install -e {folder}")
    print(f"  look at it:  hardpoint plugins list {blueprint.kind}")
    print(f"  test it:     hardpoint plugins test {blueprint.distribution}")
    print(f"  describe it: hardpoint plugins manifest {blueprint.distribution}")
    print(f"  its code is in {blueprint.code}, what to do next in README.md")
    return 0
