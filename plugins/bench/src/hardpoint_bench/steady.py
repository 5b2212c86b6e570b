"""Requests that all decode at once: what a step of the scheduler costs, and whether it did what a step must do."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from time import perf_counter_ns
from typing import NamedTuple

import numpy as np

from hardpoint.errors import ConfigError
from hardpoint.interfaces import EngineOutput, FinishReason, Int32Array, RunnerOutput, SchedulerOutput
from hardpoint_bench.bounds import check_option
from hardpoint_bench.clocked_loop import ClockedLoop
from hardpoint_bench.faults import SchedulerFault, blaming, in_words, require
from hardpoint_bench.hops import Hops
from hardpoint_bench.requests import make_request, own_tokens, prefix_tokens
from hardpoint_bench.rig import Rig, Sizes

__all__ = ["Load", "SteadyRun", "StepClock", "StepFigures"]

_PROBES = 8
_SPARE_STEPS = 16


@dataclass(frozen=True, slots=True)
class Load:
    """``running`` requests that decode during ``steps`` measured steps, ``waiting`` more in the queue.

    Prompts have ``prompt_len`` tokens, of which the first ``shared_prefix`` are the same in all. ``spread``: prompts
    differ in length, so that blocks fill up in turns and not all at once.
    """

    running: int
    waiting: int
    steps: int
    prompt_len: int
    shared_prefix: int
    spread: bool = False

    def check(self) -> None:
        """Raises ``ConfigError`` for numbers that make no run."""
        for name in ("running", "waiting", "steps", "prompt_len", "shared_prefix"):
            check_option(name.replace("_", "-"), getattr(self, name))
        if self.shared_prefix > self.prompt_len:
            raise ConfigError(
                f"--shared-prefix {self.shared_prefix} is longer than --prompt-len {self.prompt_len}; lower the former"
            )

    def prompt(self, number: int, block_size: int) -> Int32Array:
        """int32; request ``number``'s."""
        extra = number % block_size if self.spread else 0
        rest = own_tokens(number, self.prompt_len + extra - self.shared_prefix)
        return np.concatenate([prefix_tokens(0, self.shared_prefix), rest])

    def fill_steps(self, budget: int, chunk: int) -> int:
        """Steps after which all prompts are computed, generously. ``chunk``: most tokens of a prompt per step."""
        longest = self.prompt_len * 2
        return _SPARE_STEPS + 2 * -(-self.running * longest // budget) + -(-longest // chunk)

    def max_tokens(self, budget: int, chunk: int) -> int:
        """More than any request can generate before it is ended."""
        return self.steps + self.fill_steps(budget, chunk) + _SPARE_STEPS

    def sizes(self, block_size: int, *, budget: int | None, chunk: int) -> Sizes:
        """Room for everybody. Without a ``budget`` all prompts are computed in one step."""
        longest = self.prompt_len + (block_size if self.spread else 0)
        batched = self.running * longest if budget is None else budget
        model_len = longest + self.max_tokens(batched, chunk) + 1
        return Sizes(self.running, batched, model_len, self.running * (-(-model_len // block_size) + 1) + 1)


class StepClock(NamedTuple):
    """One measured step. ``wall_ns`` counts what hops take; ``cpu_ns`` is the thread's own time in the scheduler.

    ``rows`` are those of the step that was updated, ``boundary_rows`` those of the one scheduled that began a block.
    """

    wall_ns: int
    cpu_ns: int
    schedule_ns: int
    update_ns: int
    rows: int
    boundary_rows: int


@dataclass(frozen=True, slots=True)
class StepFigures:
    """What was measured. Times in nanoseconds: those of requests are means over all of them."""

    steps: tuple[StepClock, ...]
    tokens: int
    add_ns: float
    fill_ns: float
    finish_ns: float
    prefix_hit_rate: float
    preemptions: int
    blocks_leaked: int
    hashes_checked: int

    @property
    def rows(self) -> int:
        return sum(step.rows for step in self.steps)

    @property
    def aligned_boundaries(self) -> bool:
        """Whether a step in which any row began a block was one for all of them."""
        began = [step.boundary_rows for step in self.steps if step.boundary_rows]
        return bool(began) and min(began) * len(self.steps) >= self.rows

    def quantile_us(self, clock: str, percent: float, *, boundaries_only: bool = False) -> float:
        """Of one of the clocks, in microseconds; not a number when no step qualifies."""
        chosen = [step for step in self.steps if step.boundary_rows or not boundaries_only]
        values = [getattr(step, clock) for step in chosen]
        return float(np.percentile(values, percent)) / 1e3 if values else math.nan


class SteadyRun:
    """One scheduler from the first request to the last. With ``hops`` the steps and outputs travel, and it counts.

    Where blocks are short the scheduler preempts and the number of rows varies; otherwise each step must yield a token
    of every request. Raises ``SchedulerFault`` for whatever a scheduler may not do.
    """

    def __init__(self, rig: Rig, load: Load, *, hops: Hops | None = None) -> None:
        self._rig = rig
        self._load = load
        self._hops = hops
        self._scheduler, self._worker = rig.create()
        self._loop = ClockedLoop(self._scheduler, self._execute, rig.limits.max_inflight_steps)
        limits = rig.limits
        chunk = limits.long_prefill_threshold or limits.max_num_batched_tokens
        self._fill_steps = load.fill_steps(limits.max_num_batched_tokens, chunk)
        self._max_tokens = load.max_tokens(limits.max_num_batched_tokens, chunk)
        needed = load.sizes(rig.block_size, budget=limits.max_num_batched_tokens, chunk=chunk).num_blocks
        self.is_roomy = rig.num_blocks >= needed and not limits.watermark
        self._names = [f"r{number}" for number in range(load.running)]
        self._own = frozenset(self._names)
        self._queued = [f"w{number}" for number in range(load.waiting)]
        probes = np.linspace(0, load.running - 1, min(_PROBES, load.running)).astype(int).tolist()
        self._told: dict[str, list[int]] = {self._names[number]: [] for number in probes}
        self._ended: set[str] = set()
        self._num_told = 0

    def run(self) -> StepFigures:
        with blaming(self._rig.plugin.label):
            return self._run()

    def _run(self) -> StepFigures:
        before = self._scheduler.stats()
        add_ns, fill_ns = self._fill()
        steps, tokens = self._measure()
        stats = self._scheduler.stats()
        finish_ns = self._end()
        after = self._scheduler.stats()
        queries = stats.prefix_cache_queries - before.prefix_cache_queries
        hits = stats.prefix_cache_hits - before.prefix_cache_hits
        leaked = before.num_free_blocks - after.num_free_blocks
        rule = "every block is free again once everybody has ended"
        require(leaked == 0, rule, f"{leaked} of {after.num_total_blocks} blocks leaked")
        self._scheduler.check_integrity()
        checked = self._probe() if self.is_roomy and self._rig.caches_prefixes else 0
        if self._hops is not None:
            self._hops.settle()
        return StepFigures(
            steps=tuple(steps),
            tokens=tokens,
            add_ns=add_ns,
            fill_ns=fill_ns,
            finish_ns=finish_ns,
            prefix_hit_rate=hits / queries if queries else 0.0,
            preemptions=stats.num_preemptions - before.num_preemptions,
            blocks_leaked=leaked,
            hashes_checked=checked,
        )

    def _execute(self, step: SchedulerOutput) -> RunnerOutput:
        output = self._worker.execute(step)
        return output if self._hops is None else self._hops.execute(step, output, ending=self._worker.ending)

    def _turn(self) -> tuple[list[EngineOutput], int]:
        """Outputs of one turn, and the nanoseconds it took."""
        if self._hops is None:
            return self._loop.turn(), self._loop.nanoseconds
        self._hops.nanoseconds = 0
        outputs = self._loop.turn()
        if outputs:
            self._hops.deliver(outputs, self._scheduler.stats())
        return outputs, self._loop.nanoseconds + self._hops.nanoseconds

    def _fill(self) -> tuple[float, float]:
        """Everybody in; those who run have their first token afterwards. Nanoseconds per request to add and to fill."""
        load, size = self._load, self._rig.block_size
        names = [*self._names, *self._queued]
        requests = [make_request(name, load.prompt(i, size), self._max_tokens) for i, name in enumerate(names)]
        started = perf_counter_ns()
        refused = [output for request in requests if (output := self._scheduler.add(request)) is not None]
        spent = (perf_counter_ns() - started) / len(names)
        if refused:
            raise ConfigError(
                f"{len(refused)} requests of {load.prompt_len} prompt tokens can never run "
                f"({refused[0].error or 'too long'}); raise --blocks or --max-model-len, or lower --prompt-len"
            )
        total = 0
        for _ in range(self._fill_steps):
            outputs, spent_ns = self._turn()
            self._take(outputs)
            total += spent_ns
            if self._is_steady():
                return spent, total / load.running
        if self.is_roomy:
            found = in_words(self._scheduler.stats())
            raise SchedulerFault(f"{load.running} requests should run; after {self._fill_steps} steps {found}")
        return spent, total / load.running

    def _is_steady(self) -> bool:
        step, updated = self._loop.step, self._loop.updated
        if step is None or updated is None or step.new_rows or updated.new_rows or not step.samples.all():
            return False
        return step.num_rows == updated.num_rows and (not self.is_roomy or step.num_rows == self._load.running)

    def _measure(self) -> tuple[list[StepClock], int]:
        """The steps, and the tokens in all of them."""
        steps: list[StepClock] = []
        tokens = 0
        loop = self._loop
        for _ in range(self._load.steps):
            outputs, spent = self._turn()
            if loop.step is None and loop.updated is None:
                raise ConfigError(
                    f"nobody runs any more after {len(steps)} of {self._load.steps} steps: sequences are cut off where "
                    f"the {self._rig.num_blocks} blocks end; raise --blocks or lower --steps"
                )
            rows = 0 if loop.updated is None else loop.updated.num_rows
            began = 0 if loop.step is None else int(np.count_nonzero(loop.step.new_blocks[0].counts))
            steps.append(StepClock(spent, loop.cpu_ns, loop.schedule_ns, loop.update_ns, rows, began))
            tokens += self._take(outputs)
            if self.is_roomy:
                told = {output.request_id for output in outputs if len(output.new_token_ids) == 1}
                if told != self._own or len(outputs) != len(self._own):
                    rule = f"each step yields one token of each of the {len(self._own)} running requests"
                    raise SchedulerFault(f"{rule}; one yielded {len(outputs)} outputs of {len(told)} requests")
        expected = self._load.running * self._load.steps
        if self.is_roomy:
            require(tokens == expected, f"{expected} tokens are due", f"{tokens} came")
        return steps, tokens

    def _take(self, outputs: Iterable[EngineOutput]) -> int:
        """Count tokens, remember those of the probes, and see that nobody ends twice or speaks after the end."""
        tokens = 0
        for output in outputs:
            name = output.request_id
            require(name not in self._ended, "a request ends once", f"{name} was heard of after its end")
            tokens += len(output.new_token_ids)
            if name in self._told:
                self._told[name].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self._ended.add(name)
                self._check_reason(output)
        self._num_told += tokens
        return tokens

    def _check_reason(self, output: EngineOutput) -> None:
        """A pool that is too small may cut sequences off; otherwise only stop tokens end those who run."""
        name, reason = output.request_id, output.finish_reason
        if reason is FinishReason.ERROR:
            raise SchedulerFault(f"request {name} failed: {output.error}")
        stopped = reason is FinishReason.STOP or not self.is_roomy or name not in self._own
        require(stopped, "requests end with their stop token", f"{name} ended for another reason ({reason})")

    def _end(self) -> float:
        """The queue is aborted, those who run get their end of sequence. Nanoseconds per running request."""
        self._take(self._scheduler.finish(self._queued, FinishReason.ABORT))
        self._worker.ending = True
        spent, turns, most = 0, 0, self._fill_steps + len(self._names) + _SPARE_STEPS
        while self._loop.has_work():
            outputs, spent_ns = self._turn()
            self._take(outputs)
            spent += spent_ns
            turns += 1
            require(turns <= most, "requests end with their stop token", f"some run on after {turns} steps")
        lost = {*self._names, *self._queued} - self._ended
        require(not lost, "every request ends", f"{len(lost)} never did, such as {min(lost, default='')}")
        due = self._worker.num_sampled
        if self._rig.limits.max_inflight_steps == 1:
            require(self._num_told == due, f"{due} tokens were sampled", f"{self._num_told} were told")
        held = self._worker.num_held
        require(held == 0, "workers are told of every slot that is free", f"{held} were never given back")
        return spent / len(self._names)

    def _probe(self) -> int:
        """Whether full blocks were hashed: a prompt that repeats what a request read and wrote must find them."""
        self._worker.ending = False
        size = self._rig.block_size
        for name, tokens in self._told.items():
            prompt = self._load.prompt(int(name[1:]), size)
            longer = np.concatenate([prompt, np.asarray(tokens[:-1], dtype=np.int32)])
            self._scheduler.add(make_request(f"probe-{name}", longer, 1))
            found = 0
            while self._loop.has_work():
                found += sum(output.num_cached_tokens for output in self._turn()[0])
            # A block filled by the very last step need not be known.
            due = (len(longer) - 1) // size * size - size
            require(found >= due, f"{name} left {due} or more tokens to be found by their hashes", f"{found} were")
        return len(self._told)
