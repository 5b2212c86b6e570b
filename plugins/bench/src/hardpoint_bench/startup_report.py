"""``--startup-report``: where the time from the start of a process to its first token went, as a table on stderr.

The same clock as that of ``hardpoint bench startup``, driven by hooks. Without the flag the plugin observes nothing.
"""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable, Mapping, MutableMapping, Sequence, Set
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces import EngineOutput, PluginContext, ProcessRole, plugin
from hardpoint.interfaces.hooks import hookimpl
from hardpoint_bench.programs.side import FrameworkClock, Phases, peak_memory_mib

__all__ = ["StartupObserver", "StartupReport", "StartupReportOptions", "create", "last_report"]

LAUNCHER_VARIABLE = "HARDPOINT_STARTUP_LAUNCHER"
"""Tells an engine process which process launched it, and when that one was started: ``pid seconds``."""
IDLE, FIRST_TOKEN = "waiting", "first_token"
_reports: list[StartupReport] = []


class StartupReportOptions(BaseModel):
    """Options under ``plugins.hooks.startup_report``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    enabled: bool = Field(
        default=False,
        description="print where the time from process start to the first token went, and the peak memory",
        json_schema_extra={"flag": "--startup-report"},
    )


@dataclass(frozen=True, slots=True)
class StartupReport:
    """Seconds by phase, in the order in which phases began; ``waiting`` is the time without any request.

    ``peak_memory_mib`` counts the process that was launched and those that it started.
    """

    phases: Mapping[str, float]
    peak_memory_mib: float

    @property
    def total_s(self) -> float:
        """From the start of the process to the first token, without the time in which nobody asked for one."""
        return sum(seconds for name, seconds in self.phases.items() if name != IDLE)

    def table(self) -> str:
        """For people: one line per phase."""
        total = self.total_s
        rows = [
            f"  {name.replace('_', ' '):<14}{seconds:8.3f} s"
            + (f"{seconds / total:7.1%}" if name != IDLE and total else "")
            for name, seconds in self.phases.items()
        ]
        head = f"first token {total:.2f} s after the process was started; peak memory {self.peak_memory_mib:.0f} MiB"
        return "\n".join([head, *rows])


def last_report() -> StartupReport | None:
    """Of the newest engine that was started in this process with the report switched on; None before its first
    token."""
    return _reports[-1] if _reports else None


@cache
def process_start() -> float:
    """When this process was started, on the monotonic clock; to a hundredth of a second, and always the same."""
    ticks = int(Path("/proc/self/stat").read_text(encoding="utf-8").rpartition(")")[2].split()[19])
    age = time.clock_gettime(time.CLOCK_BOOTTIME) - ticks / os.sysconf("SC_CLK_TCK")
    return time.monotonic() - age


class StartupObserver:
    """Follows the first engine of a process from its launch on; ``show`` gets the table."""

    def __init__(self, show: Callable[[str], None] = lambda text: print(text, file=sys.stderr, flush=True)) -> None:
        self._show = show
        self._phases: Phases | None = None
        self._launcher: int | None = None

    @hookimpl
    def process_booting(self, roles: Set[ProcessRole], environ: MutableMapping[str, str]) -> None:
        own = process_start()
        launched = environ.get(LAUNCHER_VARIABLE, "").split()
        if ProcessRole.LAUNCHER in roles or len(launched) != 2:
            self._phases = Phases(own, own)
            environ[LAUNCHER_VARIABLE] = f"{os.getpid()} {own}"
        else:
            self._launcher = int(launched[0])
            self._phases = Phases(float(launched[1]), own)
            self._phases.seconds = {"launcher": self._phases.seconds["interpreter"]}
        self._phases.seconds.pop("interpreter", None)
        if "torch" not in sys.modules:
            sys.meta_path.insert(0, FrameworkClock(self._phases))
        self._begin("plugins")

    @hookimpl
    def process_started(self, roles: Set[ProcessRole]) -> None:
        if ProcessRole.ENGINE not in roles:
            self._phases = None
        self._begin("set_up")

    @hookimpl
    def startup_phase(self, phase: str) -> None:
        self._begin(IDLE if phase == "ready" else phase)

    @hookimpl
    def request_added(self) -> None:
        if self._phases is not None and self._phases.current == IDLE:
            self._begin(FIRST_TOKEN)

    @hookimpl
    def step_finished(self, outputs: Sequence[EngineOutput]) -> None:
        phases = self._phases
        if phases is None or not any(output.new_token_ids or output.pooled is not None for output in outputs):
            return
        phases.begin("after")
        self._phases = None
        _reports.append(StartupReport(dict(phases.seconds), peak_memory_mib(self._launcher)))
        self._show(_reports[-1].table())

    def _begin(self, phase: str) -> None:
        if self._phases is not None:
            self._phases.begin(phase)


class _Nothing:
    """Observes nothing."""


@plugin("hooks", options=StartupReportOptions)
def create(ctx: PluginContext, options: StartupReportOptions) -> object:
    """Entry point ``hardpoint.hooks.v1`` ``startup_report``."""
    del ctx
    return StartupObserver() if options.enabled else _Nothing()
