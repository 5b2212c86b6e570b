"""Our stat loggers keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.stat_logger_suite import StatLoggerSuite


class TestLog(StatLoggerSuite):
    plugin: ClassVar[str | None] = "log"


class TestPrometheus(StatLoggerSuite):
    plugin: ClassVar[str | None] = "prometheus"
