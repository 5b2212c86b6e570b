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


class TestWithFile(StatLoggerSuite):
    @pytest.fixture(autouse=True)
    def _file(self, tmp_path: Path) -> None:
        self.path = tmp_path / "stats.jsonl"

    def create_logger(self) -> StatLogger:
        return JsonLines(Options(path=self.path), logging.getLogger("hardpoint.test"))


class TestWithoutRoom(StatLoggerSuite):
    """A file that cannot be written costs its lines only."""

    def create_logger(self) -> StatLogger:
        return JsonLines(Options(path=Path("/proc/none")), logging.getLogger("hardpoint.test"))
