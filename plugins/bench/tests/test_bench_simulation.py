"""Replays: times that can be worked out by hand, every way a request can go, and schedulers that break a rule."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import msgspec
import numpy as np
import pytest

from bench_support import make_rig
from hardpoint.errors import ConfigError, InvalidRequestError
from hardpoint.interfaces import EngineOutput, EngineRequest, FinishReason, RunnerOutput, SchedulerOutput
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint_bench.faults import SchedulerFault
from hardpoint_bench.generator import Mix
from hardpoint_bench.outcome import Outcome
from hardpoint_bench.requests import own_tokens
from hardpoint_bench.rig import Sizes
from hardpoint_bench.simulation import Simulation, StepCost
from hardpoint_bench.trace import TraceRequest

SIZES = Sizes(max_num_seqs=2, max_num_batched_tokens=8, max_model_len=64, num_blocks=33)
SECOND = StepCost(base_s=1.0)


def request(number: int, arrival: float, length: int = 4, output: int = 3, **settings: Any) -> TraceRequest:
    return TraceRequest(number, arrival, own_tokens(number, length), output, **settings)


def replay(
    requests: Iterable[TraceRequest],
    scheduler: type[FakeScheduler] = FakeScheduler,
    cost: StepCost = SECOND,
    sizes: Sizes = SIZES,
    **limits: Any,
) -> Outcome:
    known = list(requests)
    return Simulation(make_rig(sizes, scheduler, **limits), lambda: known, cost).run()


def test_one_request_takes_its_steps() -> None:
    """Prefill and first token in the first second, two more tokens in two more."""
    outcome = replay([request(0, 0.0)])
    assert (outcome.completed, outcome.tokens, outcome.simulated_s) == (1, 3, 3.0)
    assert outcome.ttft.largest == 1.0
    assert outcome.tpot.largest == 1.0
    assert outcome.latency.largest == 3.0
    assert outcome.queue.largest == 0.0
    assert (outcome.steps, outcome.rows) == (3, 3)


def test_who_comes_during_a_step_waits_for_its_end() -> None:
    outcome = replay([request(0, 0.0), request(1, 0.25)])
    assert outcome.queue.largest == 0.75
    assert outcome.ttft.largest == 1.75


def test_who_finds_no_slot_waits_for_one() -> None:
    """Two run; the third starts when both are through, after three steps."""
    outcome = replay([request(0, 0.0), request(1, 0.0), request(2, 0.0)])
    assert outcome.queue.largest == 3.0
    assert outcome.ttft.largest == 4.0
    assert outcome.timeline.peaks("waiting")[0] == 1.0
    assert max(outcome.timeline.peaks("running")) == 2.0


def test_the_clock_jumps_over_times_without_work() -> None:
    outcome = replay([request(0, 0.0), request(1, 100.0)])
    assert outcome.queue.largest == 0.0
    assert outcome.latency.largest == 3.0
    assert outcome.simulated_s == pytest.approx(103.0)
    assert outcome.steps == 6


def test_blocks_in_use_are_those_of_live_requests() -> None:
    """Seven tokens in blocks of four: two blocks each."""
    outcome = replay([request(0, 0.0), request(1, 0.0)])
    assert max(outcome.timeline.peaks("blocks_in_use")) == 4.0
    assert outcome.blocks_leaked == 0


def test_costs_count_prefill_tokens_and_decoding_rows() -> None:
    """Four prompt tokens, then two steps of one row."""
    cost = StepCost(base_s=1.0, prefill_token_s=0.1, decode_row_s=0.01)
    assert replay([request(0, 0.0)], cost=cost).simulated_s == pytest.approx(3 + 0.4 + 0.02)


def test_measured_steps_take_what_the_scheduler_takes() -> None:
    outcome = replay([request(0, 0.0)], cost=StepCost.parse("measured"))
    assert 0 < outcome.simulated_s < 1.0


def test_two_steps_under_way_hide_no_time_of_the_device() -> None:
    """Steps are planned ahead, but computed one after the other. The fake plans none ahead, so times stay the same."""

    class Waits(FakeScheduler):
        under_way = 0

        def has_work(self) -> bool:
            return self.under_way == 0 and super().has_work()

        def schedule(self) -> SchedulerOutput:
            self.under_way += 1
            return super().schedule()

        def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
            self.under_way -= 1
            return super().update(step, output)

    outcome = replay([request(0, 0.0), request(1, 0.0)], Waits, max_inflight_steps=2)
    assert outcome.latency.largest == 3.0


def test_tenants_and_priorities_have_figures_of_their_own() -> None:
    outcome = replay(
        [request(0, 0.0, tenant="a"), request(1, 0.0, tenant="b", priority=2), request(2, 0.0, tenant="a")]
    )
    report = outcome.report()
    assert {name: group["completed"] for name, group in report["tenants"].items()} == {"a": 2, "b": 1}
    assert report["tenants"]["a"]["ttft_ms"]["max"] == 4000.0
    assert {name: group["output_tokens"] for name, group in report["priorities"].items()} == {"0": 6, "2": 3}


def test_the_report_has_the_keys_of_the_steady_form_first() -> None:
    report = replay([request(0, 0.0)]).report()
    assert list(report)[:6] == [
        "step_us_median", "step_us_p99", "us_per_running_request", "prefix_hit_rate", "preemptions", "blocks_leaked",
    ]  # fmt: skip
    assert "tenants" not in report, "one tenant alone needs no figures of its own"
    assert msgspec.json.decode(msgspec.json.encode(report)) == report


def test_prompts_that_never_fit_are_counted() -> None:
    outcome = replay([request(0, 0.0, length=63, output=2), request(1, 0.0, length=200), request(2, 0.0)])
    assert (outcome.requests, outcome.refused, outcome.truncated, outcome.completed) == (3, 1, 1, 1)


def test_a_full_queue_rejects() -> None:
    outcome = replay([request(number, 0.0) for number in range(9)], max_waiting=1)
    assert (outcome.rejected, outcome.completed) == (6, 3)


def test_invalid_requests_are_refused() -> None:
    class Strict(FakeScheduler):
        def add(self, request: EngineRequest) -> EngineOutput | None:
            if request.request_id == "1":
                raise InvalidRequestError("not this one")
            return super().add(request)

    outcome = replay([request(0, 0.0), request(1, 0.0)], Strict)
    assert (outcome.refused, outcome.completed) == (1, 1)


def test_requests_that_end_otherwise_have_failed() -> None:
    class Fails(FakeScheduler):
        def _accept(self, live: Any, token: int) -> EngineOutput:
            output = super()._accept(live, token)
            if live.record.request_id == "1" and output.finish_reason is not None:
                return EngineOutput("1", [token], FinishReason.ERROR, error="no luck")
            return output

    outcome = replay([request(0, 0.0), request(1, 0.0)], Fails)
    assert (outcome.failed, outcome.completed) == (1, 1)
    assert outcome.report()["last_failure"] == "no luck"


class Breaks(FakeScheduler):
    """Has a bug, and so do the plugins it calls."""

    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        raise RuntimeError("boom")


def test_a_bug_of_the_scheduler_is_told_with_its_place() -> None:
    with pytest.raises(
        SchedulerFault, match=r"^scheduler:fake .* raised RuntimeError: boom \(.*:\d+, in update\)"
    ) as e:
        replay([request(0, 0.0)], Breaks)
    assert isinstance(e.value.__cause__, RuntimeError)


def test_a_bug_of_anybody_else_is_not_blamed_on_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(self: object, now: float, values: object) -> None:
        raise RuntimeError("not the scheduler")

    monkeypatch.setattr("hardpoint_bench.tallies.Timeline.add", broken)
    with pytest.raises(RuntimeError, match="not the scheduler"):
        replay([request(0, 0.0)])


class Leaks(FakeScheduler):
    def _release(self, live: Any) -> None:
        live.blocks.pop()
        super()._release(live)


class Sticks(FakeScheduler):
    """Has work for ever and schedules nothing."""

    def schedule(self) -> SchedulerOutput:
        self.step_id += 1
        return self._record([])


class Loses(FakeScheduler):
    """A request vanishes between two steps."""

    def schedule(self) -> SchedulerOutput:
        if self.step_id == 1:
            self._release(self.running[0])
        return super().schedule()


class Invents(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        return [*super().update(step, output), EngineOutput("stranger", [1])]


class Swallows(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        outputs = super().update(step, output)
        return [msgspec.structs.replace(o, new_token_ids=[]) if step.step_id == 1 else o for o in outputs]


class Babbles(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        return [msgspec.structs.replace(o, new_token_ids=o.new_token_ids * 2) for o in super().update(step, output)]


class KeepsSlots(FakeScheduler):
    def _release(self, live: Any) -> None:
        super()._release(live)
        self.finished_slots.clear()


class Overdraws(FakeScheduler):
    """Pays no heed to the budget of a step."""

    def schedule(self) -> SchedulerOutput:
        self.limits = msgspec.structs.replace(self.limits, max_num_batched_tokens=1_000)
        return super().schedule()


class StepsBack(FakeScheduler):
    def schedule(self) -> SchedulerOutput:
        if self.step_id == 2:
            self.step_id = 0
        return super().schedule()


@pytest.mark.parametrize(
    ("scheduler", "fault"),
    [
        (Leaks, "every block is free again once everybody has ended; 3 of 32 leaked"),
        (Sticks, "the scheduler is stuck: it has work but schedules nothing"),
        (Loses, "every request ends; 1 never did, such as 0"),
        (Invents, "an output came for request stranger, which is not live"),
        (Swallows, "9 tokens were sampled; 7 were told"),
        (Babbles, "request 0 asked for 3 tokens; it got 6"),
        (KeepsSlots, "a slot has one owner; slot 1 went to 2 while in use"),
        (Overdraws, r"at most max_num_batched_tokens \(8\) tokens; 12 came"),
        (StepsBack, "step ids must grow; 0 follows 1"),
    ],
)
def test_faulty_schedulers_are_found(scheduler: type[FakeScheduler], fault: str) -> None:
    with pytest.raises(SchedulerFault, match=fault):
        replay([request(number, 0.0, length=6 if scheduler is Overdraws else 4) for number in range(3)], scheduler)


@pytest.mark.parametrize(
    "text", ["", "1", "1,2", "1,2,3,4", "a,b,c", "0,0,0", "-1,2,3", "inf,0,0", "nan,1,1", "Measured"]
)
def test_step_costs_that_make_no_sense_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="--step-cost .* must be BASE,PREFILL,DECODE in microseconds"):
        StepCost.parse(text)


def test_step_costs_are_in_microseconds() -> None:
    assert StepCost.parse("5000, 30,100.5") == StepCost(0.005, 30e-6, 100.5e-6)


def test_memory_does_not_grow_with_the_trace() -> None:
    """Histograms have a bounded number of buckets, groups a bounded number of names."""

    def kept(count: int) -> int:
        mix = Mix(count, rate=50.0, prompt_len=4, output_len=2, length_spread=0.5, tenants=40)
        outcome = Simulation(make_rig(SIZES), mix, StepCost(base_s=0.001)).run()
        assert outcome.completed == count
        groups = [*outcome.tenants.by_name.values(), *outcome.priorities.by_name.values()]
        assert len(groups) <= 18
        histograms = [outcome.ttft, outcome.queue, outcome.latency, *(group.ttft for group in groups)]
        return max(len(histogram._counts) for histogram in histograms)

    assert kept(1_000) < 700


def test_requests_that_keep_one_another_from_going_on_are_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A replay ends, whatever the scheduler does; here the patience is shorter than an honest prefill."""
    monkeypatch.setattr("hardpoint_bench.simulation._MAX_BARREN_STEPS", 5)
    with pytest.raises(SchedulerFault, match="some request gets on; nobody got a token in 5 steps"):
        replay([request(0, 0.0, length=60)])


def test_the_worker_checks_new_rows() -> None:
    class WrongSlot(FakeScheduler):
        def _new_row(self, live: Any) -> Any:
            return msgspec.structs.replace(super()._new_row(live), slot=7)

    with pytest.raises(SchedulerFault, match=r"slots are 0 to max_num_seqs - 1 \(1\); found 7"):
        replay([request(0, 0.0)], WrongSlot)


def test_rows_of_former_owners_are_found() -> None:
    class Stale(FakeScheduler):
        def _record(self, rows: list[Any]) -> SchedulerOutput:
            step = super()._record(rows)
            return msgspec.structs.replace(step, generations=step.generations + np.int32(step.step_id == 1))

    with pytest.raises(SchedulerFault, match="rows belong to the owners of their slots; step 1 has rows of others"):
        replay([request(0, 0.0)], Stale)
