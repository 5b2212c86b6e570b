"""The start-up report: phases without gaps, one table per engine, silence without the flag."""

from __future__ import annotations

import sys
import time
from collections.abc import Iterator
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces import EngineOutput, PluginContext, ProcessRole
from hardpoint.testing.hooks_suite import HooksSuite
from hardpoint_bench.startup_report import (
    LAUNCHER_VARIABLE,
    StartupObserver,
    StartupReport,
    StartupReportOptions,
    create,
    last_report,
    process_start,
)

LAUNCHER, ENGINE = frozenset({ProcessRole.LAUNCHER}), frozenset({ProcessRole.ENGINE, ProcessRole.WORKER})
STARTING = ("weights", "packing", "kv_cache", "warm_up", "ready")


@pytest.fixture(autouse=True)
def finders() -> Iterator[None]:
    """Observers watch for the framework's import; none of these outlives its test."""
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


class TestStartupReport(HooksSuite):
    plugin: ClassVar[str | None] = "startup_report"
    options: ClassVar[dict[str, Any]] = {"enabled": True}


def start(observer: StartupObserver, environ: dict[str, str], launches: bool = True) -> None:
    observer.process_booting(roles=LAUNCHER if launches else ENGINE, environ=environ)
    observer.process_started(roles=ENGINE)
    for phase in STARTING:
        observer.startup_phase(phase=phase)


def test_phases_follow_each_other_up_to_the_first_token() -> None:
    shown: list[str] = []
    observer = StartupObserver(shown.append)
    start(observer, {})
    observer.request_added()
    observer.step_finished(outputs=())
    assert shown == []
    observer.step_finished(outputs=(EngineOutput("r", [7]),))
    observer.step_finished(outputs=(EngineOutput("r", [8]),))
    (table,) = shown
    report = last_report()
    assert report is not None
    assert table == report.table()
    own = ("imports", "plugins", "set_up", *STARTING[:-1], "waiting", "first_token")
    assert tuple(report.phases) == own
    assert all(seconds >= 0 for seconds in report.phases.values())
    assert report.peak_memory_mib > 1


def test_the_engine_of_a_server_counts_from_its_launcher_on() -> None:
    environ: dict[str, str] = {}
    StartupObserver().process_booting(roles=LAUNCHER, environ=environ)
    pid, started = environ[LAUNCHER_VARIABLE].split()
    environ[LAUNCHER_VARIABLE] = f"{pid} {float(started) - 5}"
    shown: list[str] = []
    observer = StartupObserver(shown.append)
    start(observer, environ, launches=False)
    observer.request_added()
    observer.step_finished(outputs=(EngineOutput("r", [7]),))
    report = last_report()
    assert report is not None
    assert 4.9 < report.phases["launcher"] < 5.1
    assert next(iter(report.phases)) == "launcher"


def test_a_process_without_an_engine_reports_nothing() -> None:
    shown: list[str] = []
    observer = StartupObserver(shown.append)
    observer.process_booting(roles=LAUNCHER, environ={})
    observer.process_started(roles=frozenset({ProcessRole.API}))
    observer.startup_phase(phase="ready")
    observer.request_added()
    observer.step_finished(outputs=(EngineOutput("r", [7]),))
    assert shown == []


def test_the_total_leaves_out_the_time_without_a_request() -> None:
    report = StartupReport({"imports": 1.0, "weights": 2.0, "waiting": 60.0, "first_token": 1.0}, 512.0)
    assert report.total_s == 4.0
    lines = report.table().splitlines()
    assert lines[0] == "first token 4.00 s after the process was started; peak memory 512 MiB"
    assert lines[1].split() == ["imports", "1.000", "s", "25.0%"]
    assert lines[3].split() == ["waiting", "60.000", "s"]


def test_nothing_observes_without_the_flag() -> None:
    observer = create(PluginContext("startup_report", 1, LAUNCHER), StartupReportOptions())
    assert not any(hasattr(observer, hook) for hook in ("process_booting", "step_finished", "startup_phase"))


def test_the_start_of_this_process_is_in_its_past() -> None:
    assert 0 < process_start() < time.monotonic()
