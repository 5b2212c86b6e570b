"""``hardpoint plugins list`` and ``hardpoint plugins doctor``. Building the parser imports nothing heavy."""

from __future__ import annotations

import argparse
import os
import sys
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from hardpoint.plugins.selection import PluginSelection

__all__ = ["add_plugin_commands", "doctor_command", "list_command"]


def add_plugin_commands(subparsers: Any) -> None:
    """Add ``plugins`` and its subcommands to what ``ArgumentParser.add_subparsers()`` returned.

    Each sets ``args.run``, a function of the parsed arguments that returns the exit status.
    """
    parser = subparsers.add_parser("plugins", help="list and explain installed plugins")
    commands = parser.add_subparsers(dest="plugins_command", required=True, metavar="COMMAND")
    for name, run, text in (
        ("list", list_command, "show installed plugins, from metadata alone"),
        ("doctor", doctor_command, "explain what is used, refused or wrong; exit status 1 if anything is"),
    ):
        command = commands.add_parser(name, help=text, description=text)
        command.add_argument("--json", action="store_true", help="print stable JSON instead of text")
        _add_selection(command)
        command.set_defaults(run=run)


def _add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--plugins", metavar="NAMES", help="allow-list, comma-separated; empty admits none (HARDPOINT_PLUGINS)")
    add("--endpoints", metavar="NAMES", help="endpoint allow-list, comma-separated")
    add("--pin", action="append", default=[], metavar="KIND:NAME=DIST", help="take a plugin from this distribution")
    add("--use", action="append", default=[], metavar="KIND=NAME", help="choose a plugin by name")
    add("--strict-plugins", action="store_true", help="any failing plugin stops the start")


def list_command(args: argparse.Namespace) -> int:
    """Print what is installed. Imports no plugin."""
    _print(args, probe=False)
    return 0


def doctor_command(args: argparse.Namespace) -> int:
    """Print the examination, probing platforms. The status is 1 when there are problems."""
    return 1 if _print(args, probe=True) else 0


def _print(args: argparse.Namespace, *, probe: bool) -> tuple[str, ...]:
    from hardpoint.plugins.doctor import diagnose
    from hardpoint.plugins.render import render

    report = diagnose(_selection(args), probe=probe)
    if args.json:
        print(report.to_json())
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(render(report, color=color, verbose=probe))
    return report.problems


def _selection(args: argparse.Namespace) -> PluginSelection:
    from hardpoint.errors import ConfigError
    from hardpoint.plugins.selection import (
        DEFAULT_ENDPOINTS,
        ENDPOINT_VARIABLE,
        PluginSelection,
        parse_names,
        parse_pins,
    )

    endpoints = parse_names(os.environ.get(ENDPOINT_VARIABLE) if args.endpoints is None else args.endpoints)
    choices: dict[str, tuple[str, ...]] = {}
    for use in args.use:
        kind, equals, name = use.partition("=")
        if not (kind and equals and name):
            raise ConfigError(f"--use {use!r} is not of the form KIND=NAME")
        choices[kind] = (*choices.get(kind, ()), name)
    return PluginSelection.from_environment(
        os.environ,
        allow=parse_names(args.plugins),
        endpoints=DEFAULT_ENDPOINTS if endpoints is None else endpoints,
        choices=choices,
        pins=parse_pins(args.pin),
        strict=args.strict_plugins,
    )
