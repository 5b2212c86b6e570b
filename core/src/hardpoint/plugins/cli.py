"""``hardpoint plugins``: one row per subcommand. Only the module of the one that is called is imported."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence

_SUBCOMMANDS: Mapping[str, tuple[str, str]] = {
    "list": ("hardpoint.testing.commands.list", "show installed plugins, from metadata alone"),
    "doctor": ("hardpoint.testing.commands.doctor", "explain what is used or wrong; exit status 1 if anything is"),
    "manifest": ("hardpoint.testing.commands.manifest", "write what a distribution's plugins offer to a file"),
    "new": ("hardpoint.testing.commands.new", "write an installable package with a plugin that works"),
    "test": ("hardpoint.testing.commands.test", "hold installed plugins against the rules of their kinds"),
}
"""Module and help of each. A module offers ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""


def run_plugins(arguments: Sequence[str]) -> int:
    """Run ``hardpoint plugins`` with ``arguments`` and return the exit status."""
    overview = argparse.ArgumentParser(prog="hardpoint plugins", description="list, explain, write and test plugins")
    choices = overview.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, (_, told) in _SUBCOMMANDS.items():
        choices.add_parser(name, help=told, add_help=False)
    chosen: str = overview.parse_args(arguments[:1]).subcommand
    path, told = _SUBCOMMANDS[chosen]
    module = importlib.import_module(path)
    parser = argparse.ArgumentParser(prog=f"hardpoint plugins {chosen}", description=told)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments[1:])))
