"""``hardpoint plugins list``: what is installed, from metadata alone, under a selection. Imports no plugin.

The doctor shares its flags and its report.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

import msgspec

from hardpoint.errors import ConfigError, HardpointError
from hardpoint.plugins.kinds import kind_spec
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.selection import DEFAULT_ENDPOINTS, ENDPOINT_VARIABLE, PluginSelection, parse_names, parse_pins
from hardpoint.testing.doctor import Probes, diagnose
from hardpoint.testing.doctor_text import render

if TYPE_CHECKING:
    from hardpoint.config.models import AppConfig


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("kind", nargs="?", metavar="KIND", help="show plugins of this kind only")
    add("--json", action="store_true", help="print stable JSON instead of text")
    add("-v", "--verbose", action="store_true", help="show paths, requirements, manifests and capabilities too")
    add("--config", metavar="FILE", help="judge the selection that this settings file makes")
    add("--plugins", metavar="NAMES", help="allow-list, comma-separated; empty admits none (HARDPOINT_PLUGINS)")
    add("--endpoints", metavar="NAMES", help="endpoint allow-list, comma-separated")
    add("--pin", action="append", default=[], metavar="KIND:NAME=DIST", help="take a plugin from this distribution")
    add("--use", action="append", default=[], metavar="KIND=NAME", help="choose a plugin by name")
    add("--strict-plugins", action="store_true", help="any failing plugin stops the start")


def run(arguments: argparse.Namespace) -> int:
    """Always 0: a list judges nothing."""
    print_report(arguments, probe=False)
    return 0


def print_report(
    arguments: argparse.Namespace, *, probe: bool, probe_workers: Callable[[PluginPlan], Probes] | None = None
) -> tuple[str, ...]:
    """Examine and print; the problems found, of all kinds whichever is shown."""
    if arguments.kind is not None:
        kind_spec(arguments.kind)
    base, config, unread = _base(arguments, judges=probe)
    faults = (lambda plan: _start_faults(config, plan)) if probe else None
    report = diagnose(_selection(arguments, base), probe=probe, probe_workers=probe_workers, settings_faults=faults)
    if probe:
        report = msgspec.structs.replace(report, problems=(*unread, *report.problems, *_flag_faults()))
    if arguments.json:
        shown = tuple(kind for kind in report.kinds if arguments.kind in (None, kind.kind))
        print(msgspec.structs.replace(report, kinds=shown).to_json())
    else:
        print(render(report, color=wants_color(), verbose=arguments.verbose, kind=arguments.kind))
        if probe and not report.problems:
            print("no problems found")
    return report.problems


def _flag_faults() -> tuple[str, ...]:
    """What is wrong with the flags that installed plugins declare, beside those of ``hardpoint serve``."""
    # Deferred: these need what reads settings, and a list does without.
    from hardpoint.config.arguments import add_arguments as add_settings
    from hardpoint.config.plugin_options import add_plugin_flags

    parser = argparse.ArgumentParser()
    add_settings(parser, with_server=True)
    return add_plugin_flags(parser)


def wants_color() -> bool:
    return sys.stdout.isatty() and "NO_COLOR" not in os.environ


def _selection(arguments: argparse.Namespace, base: PluginSelection) -> PluginSelection:
    """``base`` with what the flags say instead."""
    used: dict[str, tuple[str, ...]] = {}
    for use in arguments.use:
        kind, equals, name = use.partition("=")
        if not (kind and equals and name):
            raise ConfigError(f"--use {use!r} is not of the form KIND=NAME")
        used[kind] = (*used.get(kind, ()), name)
    allow, endpoints = parse_names(arguments.plugins), parse_names(arguments.endpoints)
    return msgspec.structs.replace(
        base,
        allow=base.allow if allow is None else allow,
        endpoints=base.endpoints if endpoints is None else endpoints,
        choices={**base.choices, **used},
        defaults={kind: name for kind, name in base.defaults.items() if kind not in used},
        pins={**base.pins, **parse_pins(arguments.pin)},
        strict=base.strict or arguments.strict_plugins,
    )


def _unconfigured() -> PluginSelection:
    endpoints = parse_names(os.environ.get(ENDPOINT_VARIABLE))
    return PluginSelection.from_environment(os.environ, endpoints=DEFAULT_ENDPOINTS if endpoints is None else endpoints)


def _base(arguments: argparse.Namespace, *, judges: bool) -> tuple[PluginSelection, AppConfig | None, tuple[str, ...]]:
    """What the file and the environment select, the settings, and why the environment's cannot be read.

    A list without a file heeds the lists of names alone. Raises ``ConfigError`` for a file that cannot be used.
    """
    if not (arguments.config or judges):
        return _unconfigured(), None, ()
    # Deferred: a list without a file needs none of what reads settings.
    from hardpoint.testing.start_checks import configured

    try:
        return *configured(arguments.config), ()
    except HardpointError as error:
        if arguments.config:
            raise
        return _unconfigured(), None, (str(error),)


def _start_faults(config: AppConfig | None, plan: PluginPlan) -> Iterator[str]:
    from hardpoint.testing.start_checks import settings_faults, unknown_names

    yield from unknown_names(plan)
    yield from settings_faults(config, plan) if config is not None else ()
