"""The ``hardpoint`` command. Each subcommand is imported only when it is the one called."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence

from hardpoint.plugins.suggest import did_you_mean, plain

_COMMANDS = {"serve": "serve a model over HTTP", "plugins": "list, explain, write and test plugins"}

_USAGE, _FAILURE, _INTERRUPTED = 2, 1, 130
"""Exit statuses, as shells expect them."""


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status. Errors made on purpose become one line on standard error."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    if arguments[:1] in (["--version"], ["-V"]):
        from hardpoint.version import __version__

        print(f"hardpoint {__version__}")
        return 0
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_overview())
        return 0 if arguments else _USAGE
    from hardpoint.errors import HardpointError

    try:
        return _run(arguments[0], arguments[1:])
    except HardpointError as error:
        if os.environ.get("HARDPOINT_TRACEBACK"):
            raise
        text = "\n".join(map(plain, str(error).splitlines()))
        print(f"hardpoint: {type(error).__name__}: {text}", file=sys.stderr)
        return _FAILURE
    except BrokenPipeError:
        # The reader of our output has gone; a second failure while flushing at exit would only be noise.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return _FAILURE
    except KeyboardInterrupt:
        return _INTERRUPTED


def _run(command: str, rest: list[str]) -> int:
    if command == "plugins":
        from hardpoint.plugins.cli import run_plugins

        return run_plugins(rest)
    if command in _COMMANDS:
        parser = argparse.ArgumentParser(prog=f"hardpoint {command}", description=_COMMANDS[command])
        from hardpoint.commands import serve

        serve.add_arguments(parser)
        return int(serve.run(_parse(parser, rest)))
    return _run_plugin_command(command, rest)


def _plugin_commands() -> dict[str, str]:
    """Further commands and their distributions, from metadata alone."""
    from hardpoint.plugins.discovery import discover

    found = [plugin for plugin in discover().plugins if plugin.kind == "cli_command"]
    return {plugin.name: plugin.distribution for plugin in sorted(found, key=lambda plugin: plugin.name)}


def _run_plugin_command(name: str, rest: list[str]) -> int:
    names = _plugin_commands()
    if name not in names:
        from hardpoint.plugins.kinds import install_hint

        known = (*_COMMANDS, *names)
        fault = f"unknown command {name!r}{did_you_mean(name, known)}; commands: {', '.join(known)}"
        print(f"hardpoint: {fault}; {install_hint('cli_command', name)}", file=sys.stderr)
        return _USAGE
    from hardpoint.logging import LEVEL_VARIABLE, configure_logging
    from hardpoint.plugins.discovery import discover
    from hardpoint.plugins.resolve import build_plan
    from hardpoint.plugins.runtime import PluginRuntime
    from hardpoint.plugins.selection import PluginSelection
    from hardpoint.roles import ProcessRole

    installed = discover()
    plan = build_plan(installed, PluginSelection.from_environment(os.environ))
    runtime = PluginRuntime(plan, {ProcessRole.LAUNCHER}, installed=installed)
    command = runtime.make("cli_command", name)
    parser = argparse.ArgumentParser(prog=f"hardpoint {name}", description=command.help)
    command.add_arguments(parser)
    parsed = _parse(parser, rest)
    level = getattr(parsed, "setting::log_level", None) or os.environ.get(LEVEL_VARIABLE)
    # What such a command prints is its result: the story before it is told when asked for.
    configure_logging(name, level or "WARNING")
    return int(command.run(parsed))


def _parse(parser: argparse.ArgumentParser, rest: list[str]) -> argparse.Namespace:
    if parser.get_default("plugin") is not None:  # the command takes settings, so plugins' options too
        from hardpoint.config.plugin_options import add_plugin_flags

        add_plugin_flags(parser)
    parsed, unknown = parser.parse_known_args(rest)
    if unknown:
        flag = next((word.partition("=")[0] for word in unknown if word.startswith("--") and len(word) > 4), "")
        hint = did_you_mean(flag, parser._option_string_actions)
        parser.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
    return parsed


def _overview() -> str:
    from importlib.metadata import metadata

    installed = {name: f"{metadata(owner)['Summary']} ({owner})" for name, owner in _plugin_commands().items()}
    lines = ["usage: hardpoint COMMAND [options]", "", "A plugin-first inference platform.", "", "commands:"]
    lines += [plain(f"  {name:<10} {text}") for name, text in {**_COMMANDS, **installed}.items()]
    lines += ["", "options:", "  -h, --help     show this help", "  -V, --version  show the version"]
    lines += ["", "`hardpoint COMMAND --help` shows a command's options."]
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
