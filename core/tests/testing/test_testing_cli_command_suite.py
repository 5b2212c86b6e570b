"""The kit for commands accepts a sound one and rejects each mutant."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import CliCommand
from hardpoint.testing import plugin_suite
from hardpoint.testing.cli_command_suite import CliCommandSuite
from hardpoint.testing.suite_runner import run_suite


class Count(CliCommand):
    help = "Count words."

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        parser.add_argument("text", help="whose words are counted")
        parser.add_argument("--most", type=int, default=100, help="more are an error")

    def run(self, arguments: argparse.Namespace) -> int:
        count = len(arguments.text.split())
        if count > arguments.most:
            raise ConfigError(f"{count} words are more than {arguments.most}; raise --most")
        print(count)
        return 0


def make_suite(kind: type[CliCommand], **fields: Any) -> type[CliCommandSuite]:
    class Suite(CliCommandSuite):
        runs: ClassVar[tuple[tuple[str, ...], ...]] = (("some words",), ("x", "--most", "1"))
        refused: ClassVar[tuple[tuple[str, ...], ...]] = (("some words", "--most", "1"),)

        def create_command(self) -> CliCommand:
            return kind()

    return type("Suite", (Suite,), fields)


class TestCount(make_suite(Count)):  # type: ignore[misc]
    pass


class Silent(Count):
    help = ""


class Mute(Count):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--quick", action="store_true")


class BadHelp(Count):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("--share", help="in % of all")


class AddsOnce(Count):
    done = False

    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        if not self.done:
            super().add_arguments(parser)
        self.done = True


class Greets(Count):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        print("count 1.0")


class Swallows(Count):
    def add_arguments(self, parser: argparse.ArgumentParser) -> None:
        super().add_arguments(parser)
        parser.add_argument("others", nargs=argparse.REMAINDER, help="ignored")


class ReturnsNothing(Count):
    def run(self, arguments: argparse.Namespace) -> Any:
        super().run(arguments)


class AlwaysFails(Count):
    def run(self, arguments: argparse.Namespace) -> int:
        super().run(arguments)
        return 1


class NeverRefuses(Count):
    def run(self, arguments: argparse.Namespace) -> int:
        return 0


class Crashes(Count):
    def run(self, arguments: argparse.Namespace) -> int:
        return {1: 0}[len(arguments.text.split()) - arguments.most or 2]


MUTANTS: dict[type[CliCommand], str] = {
    Silent: "test_it_says_what_it_is_for",
    Mute: "test_every_option_is_explained",
    BadHelp: "test_every_option_is_explained",
    AddsOnce: "test_defaults_are_not_shared_between_calls",
    Greets: "test_adding_arguments_prints_nothing",
    Swallows: "test_misspelt_arguments_are_refused",
    ReturnsNothing: "test_it_runs",
    AlwaysFails: "test_it_runs",
    NeverRefuses: "test_what_cannot_be_done_is_refused_in_words",
    Crashes: "test_what_cannot_be_done_is_refused_in_words",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[CliCommand]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant), only=MUTANTS[mutant]).failed


def test_what_is_passed_on_is_declared() -> None:
    outcome = run_suite(make_suite(Swallows, passes_on=True, refused=()))
    assert outcome.failed == {}
    assert {"test_misspelt_arguments_are_refused", "test_what_cannot_be_done_is_refused_in_words"} <= set(
        outcome.skipped
    )


COMMAND = """
from hardpoint.interfaces import CliCommand
from hardpoint.interfaces.plugin import plugin

class Acme(CliCommand):
    help = "Say hello."
    def add_arguments(self, parser):
        {body}
    def run(self, arguments):
        return 0

@plugin("cli_command")
def create(ctx, options):
    return Acme()
"""


@pytest.fixture
def site(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder with an installed command and a framework."""
    monkeypatch.syspath_prepend(str(tmp_path))
    plugin_suite._plan.cache_clear()
    folder = tmp_path / "acme_command-1.0.dist-info"
    folder.mkdir()
    headers = "Metadata-Version: 2.3\nName: acme-command\nVersion: 1.0\nSummary: a command\n"
    (folder / "METADATA").write_text(headers + "Requires-Dist: hardpoint-core<1\n")
    (folder / "entry_points.txt").write_text("[hardpoint.cli_command.v1]\nacme = acme_command:create\n")
    (tmp_path / "transformers.py").write_text("")
    yield tmp_path
    sys.modules.pop("acme_command", None)
    plugin_suite._plan.cache_clear()


class AcmeSuite(CliCommandSuite):
    plugin: ClassVar[str | None] = "acme"


@pytest.mark.slow
def test_an_installed_command_passes(site: Path) -> None:
    (site / "acme_command.py").write_text(COMMAND.format(body="pass"))
    outcome = run_suite(AcmeSuite)
    assert outcome.failed == {}
    assert "test_its_help_loads_no_framework" in outcome.passed


@pytest.mark.slow
def test_a_help_that_loads_a_framework_fails(site: Path) -> None:
    (site / "acme_command.py").write_text(COMMAND.format(body="import transformers"))
    failed = run_suite(AcmeSuite, only="help_loads").failed
    assert "what only a run needs" in failed["test_its_help_loads_no_framework"]
