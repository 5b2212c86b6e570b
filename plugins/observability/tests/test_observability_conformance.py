"""Our stat loggers keep the contract of their kind."""

from __future__ import annotations

import logging

from hardpoint.interfaces import StatLogger
from hardpoint.testing.stat_logger_suite import StatLoggerSuite
from hardpoint_observability.log import LogStats
from hardpoint_observability.prometheus import PrometheusOptions, PrometheusStats


class TestLog(StatLoggerSuite):
    def create_logger(self) -> StatLogger:
        return LogStats(logging.getLogger("hardpoint.test"))


class TestPrometheus(StatLoggerSuite):
    def create_logger(self) -> StatLogger:
        return PrometheusStats(PrometheusOptions())
