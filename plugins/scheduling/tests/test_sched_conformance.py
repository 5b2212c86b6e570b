"""Our scheduler, layout and hash keep the contracts of their kinds."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.interfaces import NoOptions, Scheduler, SchedulerContext
from hardpoint.testing.scheduler_suite import SchedulerSuite
from hardpoint_scheduling.schedulers.fcfs import create as create_fcfs


class TestFcfs(SchedulerSuite):
    preempts: ClassVar[bool] = True
    caches_prefixes: ClassVar[bool] = True
    deadlines: ClassVar[bool] = True
    unchunked: ClassVar[bool] = True

    def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
        return create_fcfs(ctx, NoOptions())
