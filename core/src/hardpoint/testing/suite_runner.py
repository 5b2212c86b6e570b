"""Runs one conformance class in this process and says which of its tests failed: how mutants are held against a kit."""

from __future__ import annotations

import contextlib
import io
import itertools
import tempfile
from pathlib import Path
from typing import Any

import pytest

from hardpoint.errors import ConfigError

__all__ = ["SuiteOutcome", "run_suite"]

_UNDER_TEST: list[type[Any]] = []
_NUMBERS = itertools.count()
_MODULE = "from hardpoint.testing.suite_runner import _UNDER_TEST\n\nTestUnderTest = _UNDER_TEST[-1]\n"
_SETTINGS = "[pytest]\n"


class SuiteOutcome:
    """Names of tests by outcome, without parameters; ``skipped`` maps to the reason.

    ``figures`` are texts that tests gave to pytest's ``record_property`` under the name "figure".
    """

    def __init__(self) -> None:
        self.passed: set[str] = set()
        self.failed: dict[str, str] = {}
        self.skipped: dict[str, str] = {}
        self.figures: list[str] = []

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        """A failure in setup or teardown counts as one of the test."""
        name = report.nodeid.rpartition("::")[2].partition("[")[0]
        if report.failed:
            self.failed[name] = str(report.longrepr)
        elif report.skipped:
            self.skipped[name] = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
        elif report.when == "call":
            self.passed.add(name)
            self.figures += [str(value) for key, value in report.user_properties if key == "figure"]

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        """A class that cannot be collected has failed as a whole."""
        if report.failed:
            self.failed["collection"] = str(report.longrepr)


def run_suite(suite: type[Any], *, first_failure: bool = False, only: str = "") -> SuiteOutcome:
    """Run the tests of the conformance class ``suite``; nothing is printed.

    ``first_failure`` stops at the first one, which is all that a mutant needs; ``only`` is a ``-k`` expression.
    Raises ``ValueError`` when not a single test ran, ``ConfigError`` for an ``only`` that pytest does not understand.
    """
    outcome, told = SuiteOutcome(), io.StringIO()
    _UNDER_TEST.append(suite)
    try:
        with tempfile.TemporaryDirectory() as folder, contextlib.redirect_stdout(io.StringIO()):
            root = Path(folder)
            # Imported modules are remembered by name, so every run needs a name of its own.
            module = root / f"test_under_test_{next(_NUMBERS)}.py"
            module.write_text(_MODULE)
            (root / "pytest.ini").write_text(_SETTINGS)
            arguments = [f"--rootdir={root}", f"--confcutdir={root}", "-c", str(root / "pytest.ini"), "--capture=no"]
            # Its own folder for temporary files: making room in the shared one can take long.
            arguments += [f"--basetemp={root / 'files'}"]
            arguments += ["--import-mode=importlib", "-q", "-p", "no:cacheprovider", "-p", "no:xdist", "-W", "ignore"]
            arguments += ["-x"] if first_failure else []
            arguments += ["-k", only] if only else []
            with contextlib.redirect_stderr(told) if only else contextlib.nullcontext():
                status = pytest.main([*arguments, str(module)], plugins=[outcome])
    finally:
        _UNDER_TEST.pop()
    if not (outcome.passed or outcome.failed or outcome.skipped):
        if only and status == pytest.ExitCode.USAGE_ERROR:
            reason = told.getvalue().strip().partition("\n")[0].removeprefix("ERROR: ")
            raise ConfigError(f"--only {only!r} is no choice of rules, as names joined by and, or, not are: {reason}")
        if only:
            raise ValueError(f"{suite.__name__} has no rule whose name matches {only!r}")
        raise ValueError(f"{suite.__name__} has no tests; derive it from a class of the conformance kit")
    return outcome
