"""What a step of a scheduler costs, beside one that does next to nothing: ``schedule`` and ``update``, no worker.

``python -m hardpoint.testing.scheduler_benchmark NAME`` prints a table for an installed scheduler. Times depend on the
machine, so they are given as ratios to a reference measured in the same run; executed lines of Python do not, so they
show how the work grows with the number of requests. Nothing here passes or fails.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

import msgspec
import numpy as np

from hardpoint.interfaces import RunnerOutput, Scheduler, SchedulerContext, SchedulerLimits, SchedulerOutput
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint.testing.scheduler_loop import BLOCK_SIZE, make_request, scheduler_context

__all__ = ["Benchmark", "StepCost", "count_lines", "main", "measure", "measure_installed"]

COUNTS = (16, 64, 256)
STEEP = 1.5
"""Work that grows by this factor more than the number of requests is worth a look."""
_PROMPT = range(3, 11)
_TRACED_STEPS = 3
MakeScheduler = Callable[[SchedulerContext], Scheduler]


class StepCost(msgspec.Struct, frozen=True, kw_only=True):
    """Mean of one step in which ``num_requests`` decode. ``lines`` are executed lines of Python, its own and called."""

    num_requests: int
    microseconds: float
    lines: float
    reference_microseconds: float
    reference_lines: float

    @property
    def ratio(self) -> float:
        """Time as a multiple of the reference's."""
        return self.microseconds / max(self.reference_microseconds, 1e-3)


class Benchmark(msgspec.Struct, frozen=True):
    """Costs by number of running requests, ascending."""

    costs: tuple[StepCost, ...]

    @property
    def growth(self) -> float:
        """How much faster lines grow than requests, from the smallest to the largest count: 1 is proportional."""
        first, last = self.costs[0], self.costs[-1]
        if first is last:
            return 1.0
        return (last.lines / max(first.lines, 1.0)) / (last.num_requests / first.num_requests)

    @property
    def is_steep(self) -> bool:
        return self.growth > STEEP

    @property
    def summary(self) -> str:
        """One line."""
        parts = [f"{cost.num_requests}: {cost.microseconds:.0f} us ({cost.ratio:.1f}x)" for cost in self.costs]
        verdict = "MORE than in proportion to requests" if self.is_steep else "no more than in proportion to requests"
        return (
            f"cost of a step by running requests, and beside the kit's own scheduler: {', '.join(parts)}; "
            f"its work grows {verdict} (factor {self.growth:.2f})"
        )

    @property
    def table(self) -> str:
        rows = ["running   us/step   reference   ratio   lines/step   reference"]
        for cost in self.costs:
            rows.append(
                f"{cost.num_requests:>7} {cost.microseconds:>9.1f} {cost.reference_microseconds:>11.1f} "
                f"{cost.ratio:>7.2f} {cost.lines:>12.0f} {cost.reference_lines:>11.0f}"
            )
        return "\n".join(rows)


def measure(make: MakeScheduler, *, counts: Sequence[int] = COUNTS, num_steps: int = 60, rounds: int = 3) -> Benchmark:
    """Fresh schedulers in turns with the reference, so that both meet the same machine; the best round counts."""
    costs = []
    for num_requests in sorted(counts):
        context = _context(num_requests, num_steps)
        own, other = [], []
        for _ in range(rounds):
            own.append(_microseconds(make(context), num_requests, num_steps))
            other.append(_microseconds(_reference(context), num_requests, num_steps))
        costs.append(
            StepCost(
                num_requests=num_requests,
                microseconds=min(own),
                lines=_lines(make(context), num_requests),
                reference_microseconds=min(other),
                reference_lines=_lines(_reference(context), num_requests),
            )
        )
    return Benchmark(tuple(costs))


def measure_installed(name: str, *, counts: Sequence[int] = COUNTS, num_steps: int = 60) -> Benchmark:
    """The installed scheduler ``name`` with its default options. Raises the plugin errors of creating it."""
    from hardpoint.plugins.discovery import discover
    from hardpoint.plugins.resolve import build_plan
    from hardpoint.plugins.runtime import PluginRuntime
    from hardpoint.plugins.selection import PluginSelection
    from hardpoint.roles import ProcessRole

    plan = build_plan(discover(), PluginSelection(choices={"scheduler": name}))
    runtime = PluginRuntime(plan, {ProcessRole.ENGINE})

    def make(context: SchedulerContext) -> Scheduler:
        fields = {"limits": context.limits, "kv_cache": context.kv_cache}
        made: Scheduler = runtime.create(
            "scheduler", name, runtime.context("scheduler", name, SchedulerContext, **fields)
        )
        return made

    return measure(make, counts=counts, num_steps=num_steps)


def _context(num_requests: int, num_steps: int) -> SchedulerContext:
    length = len(_PROMPT) + num_steps + 16
    limits = SchedulerLimits(
        max_num_seqs=num_requests,
        max_num_batched_tokens=max(1_024, num_requests * len(_PROMPT)),
        max_model_len=length + BLOCK_SIZE,
    )
    return scheduler_context(limits, num_requests * (-(-length // BLOCK_SIZE) + 1) + 1)


def _reference(context: SchedulerContext) -> Scheduler:
    return FakeScheduler(context.limits, num_blocks=context.kv_cache.num_blocks, block_size=BLOCK_SIZE)


def _decoding(scheduler: Scheduler, num_requests: int, num_steps: int) -> Scheduler:
    """With ``num_requests`` requests beyond their prompts, and ``num_steps`` steps to go."""
    for number in range(num_requests):
        scheduler.add(make_request(f"b{number}", _PROMPT, num_steps + 8, ignore_eos=True))
    for _ in range(8):
        step = scheduler.schedule()
        scheduler.update(step, _answer(step))
        if step.num_rows == num_requests and not step.new_rows:
            return scheduler
    raise ValueError(f"not all of {num_requests} requests run after 8 steps, so there is nothing to compare")


def _answer(step: SchedulerOutput) -> RunnerOutput:
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=step.samples.astype(np.int32),
        token_ids=np.full(int(step.samples.sum()), 7, dtype=np.int32),
    )


def _microseconds(scheduler: Scheduler, num_requests: int, num_steps: int) -> float:
    _decoding(scheduler, num_requests, num_steps)
    spent = 0.0
    for _ in range(num_steps):
        start = time.perf_counter()
        step = scheduler.schedule()
        middle = time.perf_counter()
        answer = _answer(step)
        resumed = time.perf_counter()
        scheduler.update(step, answer)
        spent += middle - start + time.perf_counter() - resumed
    return spent / num_steps * 1e6


def _lines(scheduler: Scheduler, num_requests: int) -> float:
    _decoding(scheduler, num_requests, _TRACED_STEPS)
    total = 0
    for _ in range(_TRACED_STEPS):
        with count_lines() as counted:
            step = scheduler.schedule()
        answer = _answer(step)
        with count_lines() as updating:
            scheduler.update(step, answer)
        total += counted[0] + updating[0]
    return total / _TRACED_STEPS


@contextmanager
def count_lines() -> Iterator[list[int]]:
    """The one number in the list is that of lines of Python executed in functions called meanwhile."""
    counted = [0]

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        if event == "line":
            counted[0] += 1
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield counted
    finally:
        sys.settrace(before)


def main(argv: Sequence[str] | None = None) -> int:
    """Print the table, or JSON. Raises the plugin errors of creating the scheduler."""
    parser = argparse.ArgumentParser(prog="python -m hardpoint.testing.scheduler_benchmark", description=__doc__)
    parser.add_argument("name", help="an installed scheduler")
    parser.add_argument(
        "--running", type=int, nargs="+", default=list(COUNTS), metavar="N", help="numbers of requests to decode"
    )
    parser.add_argument("--steps", type=int, default=60, metavar="N", help="steps that are timed (default: 60)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    if min(arguments.running) < 1 or arguments.steps < 1:
        parser.error("--running and --steps must be at least 1")
    benchmark = measure_installed(arguments.name, counts=arguments.running, num_steps=arguments.steps)
    if arguments.json:
        print(msgspec.json.encode({"scheduler": arguments.name, "costs": benchmark.costs}).decode())
    else:
        print(f"{arguments.name}\n{benchmark.table}\n{benchmark.summary}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
