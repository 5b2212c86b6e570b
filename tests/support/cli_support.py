"""Runs the command line: in this process for speed, in one of its own where the process itself is what is tested."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import pytest

from hardpoint.cli import main

__all__ = ["CommandLine", "Finished", "run_process"]

STARTED_WITH = [sys.executable, "-m", "hardpoint.cli"]


@dataclass(frozen=True, slots=True)
class Finished:
    """What a command left behind. ``seconds`` is wall time."""

    status: int
    out: str
    err: str
    seconds: float = 0.0

    def json_lines(self) -> list[dict[str, Any]]:
        """Standard output, which must be JSON objects, one a line. Raises ``AssertionError`` for a failed command."""
        assert self.status == 0, self.err
        return [json.loads(line) for line in self.out.splitlines()]

    def complaint(self) -> str:
        """The one line by which the command explains its failure.

        Raises ``AssertionError`` unless there is exactly one and nothing like a traceback anywhere.
        """
        assert self.status not in (0, None), self.out
        assert "Traceback" not in self.out + self.err, self.err
        lines = [line for line in self.err.replace("\r", "\n").splitlines() if line.strip()]
        said = [line for line in lines if line.startswith("hardpoint: ")]
        assert len(said) == 1, self.err
        # A progress bar may come before it; nothing comes after.
        assert lines[-1] == said[0], self.err
        return said[0]


class CommandLine:
    """``hardpoint ...`` in this process: plugins and torch are imported once for all tests of a file."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
        self._monkeypatch = monkeypatch
        self._capsys = capsys

    def __call__(self, *arguments: object, stdin: str = "") -> Finished:
        self._monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        self._capsys.readouterr()
        started = time.perf_counter()
        try:
            status = main([str(argument) for argument in arguments])
        except SystemExit as end:
            status = end.code if isinstance(end.code, int) else 1
        seconds = time.perf_counter() - started
        out, err = self._capsys.readouterr()
        return Finished(status, out, err, seconds)


def run_process(
    *arguments: object,
    command: Sequence[str] = STARTED_WITH,
    environ: Mapping[str, str] | None = None,
    stdin: str = "",
    timeout: float = 60.0,
) -> Finished:
    """``hardpoint ...`` as a process, with ``environ`` added to this one's environment."""
    started = time.perf_counter()
    done = subprocess.run(
        [*command, *(str(argument) for argument in arguments)],
        input=stdin,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1", **(environ or {})},
    )
    return Finished(done.returncode, done.stdout, done.stderr, time.perf_counter() - started)
