"""The one step loop: schedule, execute, sample, update, with up to ``max_inflight_steps`` steps under way."""

from __future__ import annotations

from collections import deque
from concurrent.futures import Future
from dataclasses import dataclass

from hardpoint.interfaces.executor import Executor
from hardpoint.interfaces.request import EngineOutput
from hardpoint.interfaces.scheduler import Scheduler
from hardpoint.interfaces.step import Deferred, RunnerOutput, SchedulerOutput


@dataclass(frozen=True, slots=True)
class InflightStep:
    step: SchedulerOutput
    future: Future[RunnerOutput | Deferred]

    @property
    def bars_next(self) -> bool:
        """Whether no step can be submitted behind this one: a failed one leaves workers in an unknown state, and a
        deferred one has a mask that depends on the steps before it, of which a worker holds one at most."""
        return self.step.defers_sampling or (self.future.done() and self.future.exception() is not None)


class StepPipeline:
    """Owns the steps between ``schedule`` and ``update``; updates happen strictly in step order.

    An exception of the executor leaves the failed step in :attr:`inflight`: the engine core decides what to tell whom.
    """

    def __init__(self, scheduler: Scheduler, executor: Executor, *, max_inflight_steps: int = 1) -> None:
        self.scheduler = scheduler
        self.executor = executor
        self.max_inflight_steps = max_inflight_steps
        self.inflight: deque[InflightStep] = deque()
        self.num_steps_updated = 0

    def has_work(self) -> bool:
        return bool(self.inflight) or self.scheduler.has_work()

    def advance(self) -> list[EngineOutput]:
        """Submit what fits, then finish the oldest step. With nothing to finish, only outputs that needed no step."""
        self._submit()
        if not self.inflight:
            return self.scheduler.take_outputs()
        oldest = self.inflight[0]
        output = oldest.future.result()
        if isinstance(output, Deferred):
            output = self.executor.sample(output.step_id, None).result()
        self.inflight.popleft()
        self.num_steps_updated += 1
        return self.scheduler.update(oldest.step, output)

    def _submit(self) -> None:
        while len(self.inflight) < self.max_inflight_steps and self.scheduler.has_work():
            if self.inflight and self.inflight[-1].bars_next:
                return
            step = self.scheduler.schedule()
            if not step.must_execute:
                return
            self.inflight.append(InflightStep(step, self.executor.execute(step)))
