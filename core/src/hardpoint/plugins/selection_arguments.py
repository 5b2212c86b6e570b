"""What ``plugins list`` and ``plugins doctor`` share: the flags of a selection and the report about it."""

from __future__ import annotations

import argparse
import os
import sys

from hardpoint.errors import ConfigError
from hardpoint.plugins.doctor import diagnose
from hardpoint.plugins.render import render
from hardpoint.plugins.selection import (
    DEFAULT_ENDPOINTS,
    ENDPOINT_VARIABLE,
    PluginSelection,
    parse_names,
    parse_pins,
)

__all__ = ["add_selection", "print_report"]


def add_selection(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("--json", action="store_true", help="print stable JSON instead of text")
    add("--plugins", metavar="NAMES", help="allow-list, comma-separated; empty admits none (HARDPOINT_PLUGINS)")
    add("--endpoints", metavar="NAMES", help="endpoint allow-list, comma-separated")
    add("--pin", action="append", default=[], metavar="KIND:NAME=DIST", help="take a plugin from this distribution")
    add("--use", action="append", default=[], metavar="KIND=NAME", help="choose a plugin by name")
    add("--strict-plugins", action="store_true", help="any failing plugin stops the start")


def print_report(arguments: argparse.Namespace, *, probe: bool) -> tuple[str, ...]:
    """Examine and print; the problems found."""
    report = diagnose(_selection(arguments), probe=probe)
    if arguments.json:
        print(report.to_json())
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(render(report, color=color, verbose=probe))
    return report.problems


def _selection(arguments: argparse.Namespace) -> PluginSelection:
    endpoints = parse_names(os.environ.get(ENDPOINT_VARIABLE) if arguments.endpoints is None else arguments.endpoints)
    choices: dict[str, tuple[str, ...]] = {}
    for use in arguments.use:
        kind, equals, name = use.partition("=")
        if not (kind and equals and name):
            raise ConfigError(f"--use {use!r} is not of the form KIND=NAME")
        choices[kind] = (*choices.get(kind, ()), name)
    return PluginSelection.from_environment(
        os.environ,
        allow=parse_names(arguments.plugins),
        endpoints=DEFAULT_ENDPOINTS if endpoints is None else endpoints,
        choices=choices,
        pins=parse_pins(arguments.pin),
        strict=arguments.strict_plugins,
    )
