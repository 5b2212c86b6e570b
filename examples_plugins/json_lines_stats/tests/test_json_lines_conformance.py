"""The logger keeps the rules of its kind, wherever its file is."""

from __future__ import annotations

import logging
from pathlib import Path

import pytest
from json_lines_stats import JsonLines, Options

from hardpoint.interfaces import StatLogger
from hardpoint.testing.stat_logger_suite import StatLoggerSuite


class TestJsonLines(StatLoggerSuite):
    plugin = "json_lines"

    @pytest.fixture(autouse=True)
    def _somewhere_else(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The default file is relative to the working folder."""
        monkeypatch.chdir(tmp_path)


class TestWithoutRoom(StatLoggerSuite):
    """A file that cannot be written costs its lines only."""

    def create_logger(self) -> StatLogger:
        return JsonLines(Options(path=Path("/proc/none")), logging.getLogger("hardpoint.test"))
