"""``hardpoint plugins test``: holds installed plugins against the conformance classes of their kinds."""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import math
import os
import sys

import msgspec

from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.metadata import canonical_name
from hardpoint.plugins.records import DiscoveredPlugin, Discovery, RefusedPlugin
from hardpoint.plugins.suggest import did_you_mean

__all__ = ["add_arguments", "run"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add("target", metavar="DIST", help="an installed distribution, or one of its plugins as KIND:NAME")
    add("--json", action="store_true", help="print stable JSON instead of text")
    add("-v", "--verbose", action="store_true", help="name every rule, also those that were kept")
    add("--only", metavar="EXPRESSION", default="", help="run only rules whose names match, as in pytest -k")
    add("--timeout", type=float, default=600.0, metavar="SECONDS", help="limit for one plugin (default: 600)")


def run(arguments: argparse.Namespace) -> int:
    """0 when every plugin keeps every rule, else 1.

    Raises ``PluginNotFoundError`` for an unknown target, ``ConfigError`` for flags that cannot be used.
    """
    if not (math.isfinite(arguments.timeout) and arguments.timeout > 0):
        raise ConfigError(f"--timeout {arguments.timeout:g} is no limit; give a number of seconds above 0")
    if importlib.util.find_spec("pytest") is None:
        raise ConfigError("the conformance kit runs on pytest; install hardpoint-core[testing]")
    from hardpoint.testing.suite_runner import run_suite
    from hardpoint.testing.verdict import examine, render

    if arguments.only:
        with contextlib.suppress(ValueError):  # Whether it matches a rule is seen later; here, whether it could.
            run_suite(_Anything, only=arguments.only)
    plugins, refused = _targets(discover(), arguments.target)
    verdicts = [examine(plugin, only=arguments.only, timeout_s=arguments.timeout) for plugin in plugins]
    if arguments.only and verdicts and all(verdict.is_empty for verdict in verdicts):
        raise ConfigError(f"--only {arguments.only!r} matches no rule; leave it out and add -v to see their names")
    if arguments.json:
        report = {"core_version": _core_version(), "refused": refused, "verdicts": verdicts}
        print(msgspec.json.encode(report).decode())
    else:
        color = sys.stdout.isatty() and "NO_COLOR" not in os.environ
        print(render(verdicts, refused, color=color, verbose=arguments.verbose))
    return 1 if refused or not all(verdict.passed for verdict in verdicts) else 0


def _targets(found: Discovery, target: str) -> tuple[list[DiscoveredPlugin], list[RefusedPlugin]]:
    """The plugins that ``target`` means, and those of them that the core refuses to load."""
    kind, colon, name = target.partition(":")
    if colon:
        plugins = [plugin for plugin in found.of(kind) if plugin.name == name]
        refused = [entry for entry in found.refused if (entry.kind, entry.name) == (kind, name)]
    else:
        wanted = canonical_name(target)
        plugins = [plugin for plugin in found.plugins if canonical_name(plugin.distribution) == wanted]
        refused = [entry for entry in found.refused if canonical_name(entry.distribution) == wanted]
    if not plugins and not refused:
        known = sorted({plugin.distribution for plugin in found.plugins})
        raise PluginNotFoundError(
            f"no installed plugin is meant by {target!r}{did_you_mean(target, known)}; give a distribution "
            f"({', '.join(known)}) or KIND:NAME; `hardpoint plugins list` shows all"
        )
    return [plugin for plugin in plugins if plugin.kind != "conformance"], refused


class _Anything:
    def test_anything(self) -> None: ...


def _core_version() -> str:
    from hardpoint.version import __version__

    return __version__
