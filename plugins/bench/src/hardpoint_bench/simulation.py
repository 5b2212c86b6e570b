"""A trace replayed against a scheduler in simulated time: how long requests wait, and what the blocks are used for."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from time import perf_counter_ns

import numpy as np

from hardpoint.errors import ConfigError, InvalidRequestError, OverloadedError
from hardpoint.interfaces import EngineOutput, FinishReason, RunnerOutput, SchedulerOutput
from hardpoint_bench.bounds import check_option
from hardpoint_bench.faults import SchedulerFault, blaming, in_words, require
from hardpoint_bench.outcome import Outcome
from hardpoint_bench.requests import make_request
from hardpoint_bench.rig import Rig
from hardpoint_bench.trace import Trace, TraceRequest

__all__ = ["MEASURED", "Simulation", "StepCost"]

MEASURED = "measured"
_MAX_BARREN_STEPS = 20_000
"""Steps in a row without a token for anybody, after which requests are taken to keep one another from going on."""
_PATIENCE = 3
"""Steps in a row with work but without rows, after which a scheduler counts as stuck."""


@dataclass(frozen=True, slots=True)
class StepCost:
    """Simulated seconds of a step: a base, and so much per prefill token and per decoding row.

    ``measured``: steps take what the scheduler itself takes here, as if the model cost nothing.
    """

    base_s: float = 0.0
    prefill_token_s: float = 0.0
    decode_row_s: float = 0.0
    measured: bool = False

    @classmethod
    def parse(cls, text: str) -> StepCost:
        """``measured``, or three numbers of microseconds. Raises ``ConfigError`` for anything else."""
        if text == MEASURED:
            return cls(measured=True)
        try:
            numbers = [float(part) for part in text.split(",")]
        except ValueError:
            numbers = []
        usable = len(numbers) == 3 and all(math.isfinite(number) and number >= 0 for number in numbers)
        if not usable or not any(numbers):
            form = "BASE,PREFILL,DECODE in microseconds, none below 0 and one above, or 'measured'"
            raise ConfigError(f"--step-cost {text!r} must be {form}, such as 5000,30,100")
        for number in filter(None, numbers):
            check_option("step-cost", number)
        base, prefill, decode = (number / 1e6 for number in numbers)
        return cls(base_s=base, prefill_token_s=prefill, decode_row_s=decode)

    def of(self, step: SchedulerOutput, scheduler_s: float) -> float:
        """``scheduler_s``: what the scheduler took for this step."""
        if self.measured:
            return scheduler_s
        decoding = int(np.count_nonzero(step.samples & (step.num_scheduled_tokens == 1)))
        return self.base_s + self.decode_row_s * decoding + self.prefill_token_s * (step.num_tokens - decoding)


class _Live:
    """A request between its arrival and its end."""

    __slots__ = ("arrival", "first", "output_length", "priority", "scheduled", "tenant", "tokens")

    def __init__(self, request: TraceRequest) -> None:
        self.arrival = request.arrival
        self.output_length = request.output_length
        self.priority = request.priority
        self.tenant = request.tenant
        self.scheduled: float | None = None
        self.first: float | None = None
        self.tokens = 0


@dataclass(frozen=True, slots=True)
class _Inflight:
    step: SchedulerOutput
    output: RunnerOutput
    done_at: float
    schedule_s: float


class Simulation:
    """One scheduler, one trace. The worker computes steps one after the other; the engine plans as many ahead as the
    limits say. Only live requests are held, so memory does not grow with the trace.

    Raises ``SchedulerFault`` for a scheduler that loses requests or blocks, gets stuck or breaks the rules of steps.
    """

    def __init__(self, rig: Rig, trace: Trace, cost: StepCost) -> None:
        self._rig = rig
        self._arrivals: Iterator[TraceRequest] = iter(trace())
        self._cost = cost
        self._scheduler, self._worker = rig.create()
        self._free_at_start = self._scheduler.stats().num_free_blocks
        self._next = next(self._arrivals, None)
        self._live: dict[str, _Live] = {}
        self._inflight: deque[_Inflight] = deque()
        self._now = 0.0
        self._device_free = 0.0
        self._update_s = 0.0
        self._barren_steps = 0
        self.outcome = Outcome()

    def run(self) -> Outcome:
        """All of the trace, and then until nobody is left."""
        with blaming(self._rig.plugin.label):
            return self._run()

    def _run(self) -> Outcome:
        fruitless = 0
        while True:
            self._add_arrived()
            self._submit()
            if self._inflight:
                self._observe()
                self._finish_oldest()
                fruitless = 0
            elif self._next is not None:
                self._now = max(self._now, self._next.arrival)
            elif self._scheduler.has_work() and fruitless < _PATIENCE:
                fruitless += 1
            else:
                break
        self._check_end()
        return self.outcome

    def _add_arrived(self) -> None:
        while self._next is not None and self._next.arrival <= self._now:
            request, self._next = self._next, next(self._arrivals, None)
            self._add(request)

    def _add(self, request: TraceRequest) -> None:
        name = str(request.number)
        record = make_request(
            name,
            request.prompt,
            request.output_length,
            arrival=request.arrival,
            priority=request.priority,
            tenant=request.tenant,
        )
        self.outcome.requests += 1
        try:
            refusal = self._scheduler.add(record)
        except OverloadedError:
            self.outcome.rejected += 1
            return
        except InvalidRequestError:
            self.outcome.refused += 1
            return
        if refusal is not None:
            self.outcome.refused += 1
            return
        self._live[name] = _Live(request)

    def _submit(self) -> None:
        scheduler, most = self._scheduler, self._rig.limits.max_inflight_steps
        while len(self._inflight) < most and scheduler.has_work():
            started = perf_counter_ns()
            step = scheduler.schedule()
            spent = (perf_counter_ns() - started) / 1e9
            if not step.must_execute:
                self._collect(scheduler.take_outputs())
                return
            if step.new_rows:
                self._note_scheduled(step)
            duration = self._cost.of(step, spent + self._update_s) if step.num_tokens else 0.0
            self._device_free = max(self._now, self._device_free) + duration
            self._inflight.append(_Inflight(step, self._worker.execute(step), self._device_free, spent))

    def _note_scheduled(self, step: SchedulerOutput) -> None:
        for row in step.new_rows:
            live = self._live.get(row.request_id)
            if live is not None and live.scheduled is None:
                live.scheduled = self._now
                self.outcome.queue.add(self._now - live.arrival)

    def _finish_oldest(self) -> None:
        entry = self._inflight.popleft()
        self._now = max(self._now, entry.done_at)
        started = perf_counter_ns()
        outputs = self._scheduler.update(entry.step, entry.output)
        self._update_s = (perf_counter_ns() - started) / 1e9
        self._barren_steps = 0 if outputs else self._barren_steps + 1
        if self._barren_steps > _MAX_BARREN_STEPS:
            rule = "some request gets on"
            stats = in_words(self._scheduler.stats())
            raise SchedulerFault(f"{rule}; nobody got a token in {_MAX_BARREN_STEPS} steps ({stats})")
        self._collect(outputs)
        if entry.step.num_tokens:
            self.outcome.steps += 1
            self.outcome.rows += entry.step.num_rows
            self.outcome.step.add(entry.schedule_s + self._update_s)
        # Who came during the step has waited since then, also in the picture.
        self._add_arrived()
        self._observe()

    def _observe(self) -> None:
        self.outcome.observe(self._now, self._scheduler.stats(), self._free_at_start)

    def _collect(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            live = self._live.get(output.request_id)
            if live is None:
                raise SchedulerFault(f"an output came for request {output.request_id}, which is not live")
            if output.new_token_ids:
                live.tokens += len(output.new_token_ids)
                if live.first is None:
                    live.first = self._now
            if output.finish_reason is not None:
                del self._live[output.request_id]
                self._record(output.request_id, live, output)

    def _record(self, name: str, live: _Live, output: EngineOutput) -> None:
        outcome = self.outcome
        outcome.tokens += live.tokens
        if output.finish_reason is not FinishReason.LENGTH or live.first is None:
            outcome.failed += 1
            outcome.last_failure = output.error or f"{name} ended with {output.finish_reason}"
            return
        due = live.output_length
        require(live.tokens <= due, f"request {name} asked for {due} tokens", f"it got {live.tokens}")
        if live.tokens < due:
            outcome.truncated += 1
        else:
            outcome.completed += 1
        outcome.record(live.arrival, live.first, self._now, live.tokens, live.tenant, live.priority)

    def _check_end(self) -> None:
        scheduler, outcome = self._scheduler, self.outcome
        if scheduler.has_work():
            rule = "the scheduler is stuck: it has work but schedules nothing"
            raise SchedulerFault(f"{rule} ({in_words(scheduler.stats())})")
        lost = len(self._live)
        require(not lost, "every request ends", f"{lost} never did, such as {next(iter(self._live), '')}")
        held = self._worker.num_held
        require(held == 0, "workers are told of every slot that is free", f"{held} were never given back")
        if self._rig.limits.max_inflight_steps == 1:
            due = self._worker.num_sampled
            require(outcome.tokens == due, f"{due} tokens were sampled", f"{outcome.tokens} were told")
        stats = scheduler.stats()
        outcome.blocks_leaked = self._free_at_start - stats.num_free_blocks
        rule = "every block is free again once everybody has ended"
        require(outcome.blocks_leaked == 0, rule, f"{outcome.blocks_leaked} of {stats.num_total_blocks} leaked")
        scheduler.check_integrity()
        outcome.close(self._now, stats)
