"""Schedule and update in turns with a worker, each timed on its own: what the worker takes counts for nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from time import perf_counter_ns, thread_time_ns

from hardpoint.interfaces import EngineOutput, RunnerOutput, Scheduler, SchedulerOutput

__all__ = ["ClockedLoop", "Execute"]

Execute = Callable[[SchedulerOutput], RunnerOutput]


class ClockedLoop:
    """Keeps up to ``max_inflight`` steps between schedule and update, as the engine does.

    After :meth:`turn`: ``step`` is the step just scheduled (None when there was none), ``updated`` the one whose
    output was applied (None while the pipeline fills), ``schedule_ns`` and ``update_ns`` what the scheduler took by
    the wall clock, ``cpu_ns`` what both took of this thread's own time, without that which other processes got.
    """

    def __init__(self, scheduler: Scheduler, execute: Execute, max_inflight: int) -> None:
        self.scheduler = scheduler
        self.step: SchedulerOutput | None = None
        self.updated: SchedulerOutput | None = None
        self.schedule_ns = 0
        self.update_ns = 0
        self.schedule_cpu_ns = 0
        self.cpu_ns = 0
        self._execute = execute
        self._max_inflight = max_inflight
        self._inflight: deque[tuple[SchedulerOutput, RunnerOutput]] = deque()

    @property
    def nanoseconds(self) -> int:
        """Of the whole step."""
        return self.schedule_ns + self.update_ns

    def has_work(self) -> bool:
        return bool(self._inflight) or self.scheduler.has_work()

    def turn(self) -> list[EngineOutput]:
        """One step scheduled if there is one, the oldest one updated if enough are under way."""
        scheduler, inflight = self.scheduler, self._inflight
        self.step = self.updated = None
        outputs: list[EngineOutput] = []
        cpu, started = thread_time_ns(), perf_counter_ns()
        step = scheduler.schedule() if scheduler.has_work() else None
        self.schedule_ns = perf_counter_ns() - started
        self.cpu_ns = self.schedule_cpu_ns = thread_time_ns() - cpu
        self.update_ns = 0
        if step is not None and step.must_execute:
            self.step = step
            inflight.append((step, self._execute(step)))
        if inflight and (self.step is None or len(inflight) >= self._max_inflight):
            oldest, output = inflight.popleft()
            cpu, started = thread_time_ns(), perf_counter_ns()
            outputs = scheduler.update(oldest, output)
            self.update_ns = perf_counter_ns() - started
            self.cpu_ns += thread_time_ns() - cpu
            self.updated = oldest
        elif self.step is None:
            outputs = scheduler.take_outputs()
        return outputs
