"""Conformance of the plugin kind ``cli_command``: derive from :class:`CliCommandSuite` and name your plugin."""

from __future__ import annotations

import argparse
import contextlib
import io
import os
import subprocess
import sys
from typing import ClassVar

import msgspec
import pytest

from hardpoint.errors import HardpointError
from hardpoint.interfaces import CliCommand
from hardpoint.plugins.plan import PlannedPlugin
from hardpoint.roles import ProcessRole
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["CliCommandSuite"]

FRAMEWORKS = ("torch", "transformers")
_HELP = """
import json, sys
from hardpoint.cli import main
try:
    status = main([sys.argv[1], "--help"])
except SystemExit as error:
    status = error.code
print()
print(json.dumps({"status": status or 0, "frameworks": [n for n in sys.argv[2].split(",") if n in sys.modules]}))
"""


class CliCommandSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.CliCommand`.

    ``runs`` are arguments with which the command succeeds within seconds; ``refused`` are ones that it must refuse,
    by an error made on purpose or by a status. ``passes_on`` declares that it hands unknown options to somebody else.
    """

    kind: ClassVar[str] = "cli_command"
    torch_free: ClassVar[bool] = True
    runs: ClassVar[tuple[tuple[str, ...], ...]] = ()
    refused: ClassVar[tuple[tuple[str, ...], ...]] = ()
    passes_on: ClassVar[bool] = False

    def create_command(self) -> CliCommand:
        """The command under test, as the command line makes it."""
        made: CliCommand = self.create_plugin(self.context(roles=frozenset({ProcessRole.LAUNCHER})))
        return made

    @pytest.fixture
    def command(self) -> CliCommand:
        return self.create_command()

    @pytest.fixture
    def parser(self, command: CliCommand) -> argparse.ArgumentParser:
        return parser_of(command)

    def test_it_says_what_it_is_for(self, command: CliCommand) -> None:
        assert command.help.strip(), "the command has no 'help'"

    def test_every_option_is_explained(self, parser: argparse.ArgumentParser) -> None:
        """The help is all that users have."""
        mute = ["/".join(action.option_strings) or action.dest for action in parser._actions if not action.help]
        assert mute == [], f"arguments without help: {', '.join(mute)}"
        assert parser.format_help()

    def test_defaults_are_not_shared_between_calls(self, command: CliCommand, parser: argparse.ArgumentParser) -> None:
        """R12.13: a second parser has the same arguments."""
        again = parser_of(command)
        assert [action.dest for action in again._actions] == [action.dest for action in parser._actions]

    def test_adding_arguments_prints_nothing(self, command: CliCommand) -> None:
        """Output of a command is its result, which others parse."""
        for stream in (contextlib.redirect_stdout, contextlib.redirect_stderr):
            with stream(io.StringIO()) as printed:
                parser_of(command)
            assert printed.getvalue() == ""

    def test_misspelt_arguments_are_refused(self, parser: argparse.ArgumentParser) -> None:
        """With the usage and the status of misuse."""
        if self.passes_on:
            pytest.skip("the command declares that it passes unknown options on")
        for arguments in (*self.runs, *self.refused, ()):
            with contextlib.redirect_stderr(io.StringIO()), pytest.raises(SystemExit) as ended:
                parser.parse_args([*arguments, "--no-such-option"])
            assert ended.value.code == 2

    def test_its_help_loads_no_framework(self, planned: PlannedPlugin) -> None:
        """Whoever asks what a command does waits for no device library."""
        done = subprocess.run(
            [sys.executable, "-c", _HELP, planned.name, ",".join(FRAMEWORKS)],
            capture_output=True,
            text=True,
            timeout=120,
            check=False,
            env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        )
        assert done.returncode == 0, done.stderr
        found = msgspec.json.decode(done.stdout.splitlines()[-1])
        assert found["status"] == 0
        assert found["frameworks"] == [], "the help imports what only a run needs"
        assert f"usage: hardpoint {planned.name}" in done.stdout

    def test_it_runs(self, command: CliCommand, parser: argparse.ArgumentParser) -> None:
        """An exit status, and zero for success."""
        if not self.runs:
            pytest.skip("no arguments are known with which the command succeeds quickly: set 'runs'")
        for arguments in self.runs:
            with contextlib.redirect_stdout(io.StringIO()):
                status = command.run(parser.parse_args(list(arguments)))
            assert type(status) is int, f"run returned {status!r}, not an exit status"
            assert status == 0, f"{' '.join(arguments)} ended with status {status}"

    def test_what_cannot_be_done_is_refused_in_words(
        self, command: CliCommand, parser: argparse.ArgumentParser
    ) -> None:
        """An error made on purpose becomes one line; anything else would be a traceback."""
        if not self.refused:
            pytest.skip("no arguments are known that the command must refuse: set 'refused'")
        for arguments in self.refused:
            parsed = parser.parse_args(list(arguments))
            told: int | str = 0
            with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
                try:
                    told = command.run(parsed)
                except HardpointError as error:
                    told = str(error).strip()
            assert told not in (0, None), f"{' '.join(arguments)} was not refused"
            assert told != "", f"{' '.join(arguments)} is refused without a word"


def parser_of(command: CliCommand) -> argparse.ArgumentParser:
    """As the command line makes it."""
    parser = argparse.ArgumentParser(prog="hardpoint under-test", description=command.help)
    command.add_arguments(parser)
    return parser
