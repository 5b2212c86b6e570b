"""``hardpoint plugins``: one row per subcommand. Only the module of the one that is called is imported."""

from __future__ import annotations

import argparse
import importlib
from collections.abc import Mapping, Sequence
from typing import NamedTuple


class Subcommand(NamedTuple):
    """``module`` offers ``add_arguments(parser)`` and ``run(arguments) -> exit status``."""

    module: str
    help: str


SUBCOMMANDS: Mapping[str, Subcommand] = {
    "list": Subcommand("hardpoint.plugins.list_command", "show installed plugins, from metadata alone"),
    "doctor": Subcommand(
        "hardpoint.plugins.doctor_command", "explain what is used, refused or wrong; exit status 1 if anything is"
    ),
    "manifest": Subcommand(
        "hardpoint.testing.commands.manifest", "write what a distribution's plugins offer to a file"
    ),
    "new": Subcommand("hardpoint.testing.commands.new", "write an installable package with a plugin that works"),
    "test": Subcommand("hardpoint.testing.commands.test", "hold installed plugins against the rules of their kinds"),
}


def run_plugins(arguments: Sequence[str]) -> int:
    """Run ``hardpoint plugins`` with ``arguments`` and return the exit status."""
    overview = argparse.ArgumentParser(prog="hardpoint plugins", description="list, explain, write and test plugins")
    choices = overview.add_subparsers(dest="subcommand", required=True, metavar="COMMAND")
    for name, row in SUBCOMMANDS.items():
        choices.add_parser(name, help=row.help, add_help=False)
    chosen: str = overview.parse_args(arguments[:1]).subcommand
    row = SUBCOMMANDS[chosen]
    module = importlib.import_module(row.module)
    parser = argparse.ArgumentParser(prog=f"hardpoint plugins {chosen}", description=row.help)
    module.add_arguments(parser)
    return int(module.run(parser.parse_args(arguments[1:])))
