"""The steady form: what is counted, and that a scheduler which breaks a rule is found."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from bench_support import BLOCK_SIZE, make_rig
from hardpoint.errors import ConfigError, EngineDeadError
from hardpoint.interfaces import EngineOutput, FinishReason, RunnerOutput, SchedulerOutput
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint_bench.faults import SchedulerFault
from hardpoint_bench.hops import Hops
from hardpoint_bench.lookup import lookup_sizes, measure_lookup
from hardpoint_bench.rig import Rig
from hardpoint_bench.steady import Load, SteadyRun, StepFigures

LOAD = Load(running=5, waiting=3, steps=12, prompt_len=6, shared_prefix=2)


def rig_for(load: Load, *further: Any, **settings: Any) -> Rig:
    return make_rig(load.sizes(BLOCK_SIZE, budget=None, chunk=2**30), *further, **settings)


def run(*further: Any, load: Load = LOAD, **settings: Any) -> StepFigures:
    return SteadyRun(rig_for(load, *further, **settings), load).run()


def test_each_step_is_a_token_of_everybody() -> None:
    figures = run()
    assert (figures.rows, figures.tokens) == (5 * 12, 5 * 12)
    assert len(figures.steps) == 12
    assert {step.rows for step in figures.steps} == {5}
    assert all(step.wall_ns == step.schedule_ns + step.update_ns > 0 for step in figures.steps)
    assert 0 < figures.quantile_us("wall_ns", 50) <= figures.quantile_us("wall_ns", 99)
    at_boundaries = figures.quantile_us("wall_ns", 50, boundaries_only=True)
    assert math.isnan(at_boundaries), "the fake reserves blocks at admission"
    assert (figures.preemptions, figures.blocks_leaked, figures.prefix_hit_rate) == (0, 0, 0.0)
    assert figures.hashes_checked == 0, "the fake scheduler shares no prefixes"


def test_prompts_share_what_was_asked_for() -> None:
    one, two = LOAD.prompt(0, 16), LOAD.prompt(1, 16)
    assert len(one) == len(two) == 6
    assert one[:2].tolist() == two[:2].tolist()
    assert not set(one[2:].tolist()) & set(two[2:].tolist())


def test_spread_prompts_end_at_every_place_of_a_block() -> None:
    load = Load(running=8, waiting=0, steps=1, prompt_len=6, shared_prefix=0, spread=True)
    assert sorted({len(load.prompt(number, 4)) % 4 for number in range(8)}) == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("changes", "fault"),
    [
        ({"running": 0}, "--running 0 must be at least 1"),
        ({"waiting": -1}, "--waiting -1 must be at least 0"),
        ({"steps": 0}, "--steps 0"),
        ({"prompt_len": 0}, "--prompt-len 0"),
        ({"shared_prefix": -2}, "--shared-prefix -2"),
        ({"shared_prefix": 7}, "--shared-prefix 7 is longer than --prompt-len 6"),
    ],
)
def test_impossible_loads_are_refused(changes: dict[str, int], fault: str) -> None:
    numbers: dict[str, Any] = {"running": 5, "waiting": 3, "steps": 12, "prompt_len": 6, "shared_prefix": 2} | changes
    with pytest.raises(ConfigError, match=fault):
        Load(**numbers).check()


def test_prompts_that_never_fit_are_refused() -> None:
    rig = rig_for(LOAD)
    small = Rig.around(rig.plugin, rig.limits, 3, BLOCK_SIZE)
    with pytest.raises(ConfigError, match="8 requests of 6 prompt tokens can never run .* raise --blocks"):
        SteadyRun(small, LOAD).run()


class Leaks(FakeScheduler):
    """Keeps a block of every request that ends."""

    def _release(self, live: Any) -> None:
        if live.blocks:
            live.blocks.pop()
        super()._release(live)


class SkipsRows(FakeScheduler):
    """Leaves the last request out of every third step."""

    def _record(self, rows: list[Any]) -> SchedulerOutput:
        return super()._record(rows[:-1] if self.step_id % 3 == 2 else rows)

    def schedule(self) -> SchedulerOutput:
        before = {id(live): live.computed for live in self.running}
        step = super().schedule()
        for live in self.running:
            if live.slot not in step.slots.tolist():
                live.computed = before.get(id(live), 0)
        return step


class SwallowsOutputs(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        outputs = super().update(step, output)
        return outputs[1:] if step.step_id == 7 else outputs


class RepeatsOutputs(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        outputs = super().update(step, output)
        return [*outputs, *outputs]


class TellsTwoTokens(FakeScheduler):
    def _accept(self, live: Any, token: int) -> EngineOutput:
        output = super()._accept(live, token)
        return EngineOutput(output.request_id, [token, token], output.finish_reason)


class IgnoresStops(FakeScheduler):
    def _accept(self, live: Any, token: int) -> EngineOutput:
        return super()._accept(live, 0 if token == 2 else token)


class KeepsSlots(FakeScheduler):
    """Never tells workers of slots that are free, nor uses them again."""

    def _release(self, live: Any) -> None:
        super()._release(live)
        self.finished_slots.clear()


class ForgetsTheQueue(FakeScheduler):
    """Requests that wait vanish without an end when they are aborted."""

    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        super().finish(request_ids, reason, error)
        return []


class EndsTwice(FakeScheduler):
    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        return super().finish(request_ids, reason, error) * 2


class ComputesAgain(FakeScheduler):
    """Sends the last token of a request once more."""

    def schedule(self) -> SchedulerOutput:
        if self.step_id == 6:
            self.running[0].computed -= 1
        return super().schedule()


class SavesBlocks(FakeScheduler):
    """Hands out a block less than needed."""

    def _blocks_for_life(self, live: Any) -> int:
        return super()._blocks_for_life(live) // 4


class Inflates(FakeScheduler):
    """Says that it scheduled more tokens than its rows have."""

    def _record(self, rows: list[Any]) -> SchedulerOutput:
        step = super()._record(rows)
        return msgspec.structs.replace(step, num_tokens=step.num_tokens + 1)


class GivesAlienBlocks(FakeScheduler):
    def _admit(self) -> None:
        super()._admit()
        for live in self.running:
            live.blocks = [block + 1_000 for block in live.blocks if block < 1_000] or live.blocks


class ForgetsOneSample(FakeScheduler):
    """Says that no row samples, though all do."""

    def _record(self, rows: list[Any]) -> SchedulerOutput:
        step = super()._record(rows)
        return msgspec.structs.replace(step, samples=np.zeros(step.num_rows, dtype=np.bool_))


class NeverAdmitsTheLast(FakeScheduler):
    def _admit(self) -> None:
        if len(self.running) < 4:
            super()._admit()
            while len(self.running) > 4:
                late = self.running.pop()
                self.free_blocks.extend(reversed(late.blocks))
                self.free_slots.append(late.slot)
                self.waiting.appendleft(late)


@pytest.mark.parametrize(
    ("scheduler", "fault"),
    [
        (Leaks, "8|5 of .* blocks leaked"),
        (SkipsRows, "each step yields one token of each of the 5 running requests"),
        (SwallowsOutputs, "each step yields one token of each of the 5 running requests"),
        (RepeatsOutputs, "each step yields one token of each"),
        (TellsTwoTokens, "each step yields one token of each"),
        (IgnoresStops, "requests end with their stop token; r[0-4] ended for another reason"),
        (KeepsSlots, "workers are told of every slot that is free; 5 were never given back"),
        (ForgetsTheQueue, "every request ends; 3 never did, such as w0"),
        (EndsTwice, "a request ends once; w0 was heard of after its end"),
        (ComputesAgain, "a row goes on where it stood; step 6 skips or repeats"),
        (SavesBlocks, "every token has a block; a row runs past its blocks"),
        (Inflates, "num_tokens is the sum over the rows; 31 is not 30"),
        (GivesAlienBlocks, r"block ids are 1 to \d+; \d+ was handed out"),
        (ForgetsOneSample, "a row samples exactly at its last known token"),
        (NeverAdmitsTheLast, r"5 requests should run; after \d+ steps 4 running, \d waiting, \d+ of \d+ blocks free"),
    ],
)
def test_faulty_schedulers_are_found(scheduler: type[FakeScheduler], fault: str) -> None:
    with pytest.raises(SchedulerFault, match=fault):
        run(scheduler)


def test_a_scheduler_that_boasts_of_a_prefix_cache_is_found() -> None:
    """Full blocks have to be hashed: what a request wrote must be found again."""
    with pytest.raises(SchedulerFault, match="r0 left 12 or more tokens to be found by their hashes; 0 were"):
        run(FakeScheduler, {"caches_prefixes": True})


def test_lookup_needs_a_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="--lookup needs prefix caching, which scheduler:fake"):
        measure_lookup(make_rig(lookup_sizes(64, BLOCK_SIZE)), 64)
    with pytest.raises(SchedulerFault, match="all 60 tokens in full blocks are found; 0 were"):
        measure_lookup(make_rig(lookup_sizes(64, BLOCK_SIZE), FakeScheduler, {"caches_prefixes": True}), 64)
    with pytest.raises(ConfigError, match="--lookup 1 must be at least 2"):
        lookup_sizes(1, BLOCK_SIZE)
    with pytest.raises(ConfigError, match="--lookup needs a --block-size of 2 or more, not 1"):
        lookup_sizes(9, 1)


@pytest.mark.slow
def test_steps_and_outputs_travel_to_other_processes() -> None:
    rig = rig_for(LOAD)
    with Hops(rig.limits, num_blocks=rig.num_blocks, block_size=rig.block_size) as hops:
        figures = SteadyRun(rig, LOAD, hops=hops).run()
        children = hops._children
    assert figures.tokens == 60
    assert [child.poll() for child in children] == [0, 0], "both ended by themselves"


@pytest.mark.slow
def test_a_worker_process_that_dies_is_told() -> None:
    rig = rig_for(LOAD)
    with Hops(rig.limits, num_blocks=rig.num_blocks, block_size=rig.block_size) as hops:
        hops._children[0].kill()
        hops._children[0].wait(10)
        with pytest.raises(EngineDeadError, match="the benchmark's worker process has ended"):
            SteadyRun(rig, LOAD, hops=hops).run()
