"""The scheduler keeps the rules of its kind."""

from __future__ import annotations

from shortest_job_first import Options, create

from hardpoint.interfaces import Scheduler, SchedulerContext
from hardpoint.testing.scheduler_suite import SchedulerSuite


class TestShortestJobFirst(SchedulerSuite):
    plugin = "shortest_job_first"


class TestImpatient(SchedulerSuite):
    """Passing over at most once changes the order, and no token."""

    def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
        return create(ctx, Options(patience=1))
