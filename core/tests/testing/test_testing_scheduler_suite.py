"""The scheduler kit accepts the smallest correct scheduler and rejects each of its mutants."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, ClassVar

import msgspec
import pytest

from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    RunnerOutput,
    Scheduler,
    SchedulerContext,
    SchedulerOutput,
)
from hardpoint.testing import FakeScheduler
from hardpoint.testing.scheduler_loop import BLOCK_SIZE
from hardpoint.testing.scheduler_suite import SchedulerSuite
from hardpoint.testing.suite_runner import run_suite


def make_suite(kind: type[FakeScheduler]) -> type[SchedulerSuite]:
    class Suite(SchedulerSuite):
        row_failures: ClassVar[bool] = False
        log_probabilities: ClassVar[bool] = False
        pools: ClassVar[bool] = True

        def create_scheduler(self, ctx: SchedulerContext) -> Scheduler:
            return kind(ctx.limits, num_blocks=ctx.kv_cache.num_blocks, block_size=BLOCK_SIZE)

    return Suite


class TestFakeScheduler(make_suite(FakeScheduler)):  # type: ignore[misc]
    """Itself a fake for tests, and held to the same rules."""


class LeaksBlocks(FakeScheduler):
    def _release(self, live: Any) -> None:
        live.blocks = live.blocks[:-1]
        super()._release(live)

    def check_integrity(self) -> None:
        """Sees nothing."""


class SharesBlocks(FakeScheduler):
    """Hands out a block twice and hides it."""

    def _admit(self) -> None:
        super()._admit()
        if len(self.running) > 1:
            self.running[-1].blocks[0] = self.running[0].blocks[0]

    def check_integrity(self) -> None:
        """Sees nothing."""


class OverBudget(FakeScheduler):
    def schedule(self) -> SchedulerOutput:
        limits = self.limits
        self.limits = msgspec.structs.replace(limits, max_num_batched_tokens=limits.max_num_batched_tokens + 1)
        try:
            return super().schedule()
        finally:
            self.limits = limits


class OldGeneration(FakeScheduler):
    def _admit(self) -> None:
        super()._admit()
        for live in self.running:
            live.generation = 1


class KeepsSlots(FakeScheduler):
    """Forgets to tell workers that a slot is free."""

    def _release(self, live: Any) -> None:
        super()._release(live)
        self.finished_slots.clear()


class EndsTwice(FakeScheduler):
    def update(self, step: SchedulerOutput, output: RunnerOutput) -> list[EngineOutput]:
        outputs = super().update(step, output)
        return [*outputs, *(one for one in outputs if one.finish_reason is not None)]


class SilentAbort(FakeScheduler):
    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        super().finish(request_ids, reason, error)
        return []


class LosesTheReason(FakeScheduler):
    def finish(self, request_ids: Iterable[str], reason: FinishReason, error: str | None = None) -> list[EngineOutput]:
        return super().finish(request_ids, FinishReason.ABORT)


class QueuesWithoutEnd(FakeScheduler):
    def add(self, request: EngineRequest) -> EngineOutput | None:
        self.limits = msgspec.structs.replace(self.limits, max_waiting=None)
        return super().add(request)


class NeverPauses(FakeScheduler):
    def set_pause(self, mode: Any) -> None:
        """Ignored."""


class OneTokenMore(FakeScheduler):
    def add(self, request: EngineRequest) -> EngineOutput | None:
        refused = super().add(request)
        if refused is None:
            self.waiting[-1].limit += 1
        return refused


class TakesTheSameTwice(FakeScheduler):
    def add(self, request: EngineRequest) -> EngineOutput | None:
        if request.request_id in self.live_request_ids():
            return None
        return super().add(request)


class SamplesWhatIsPooled(FakeScheduler):
    def schedule(self) -> SchedulerOutput:
        step = super().schedule()
        return msgspec.structs.replace(step, samples=step.samples | True)


MUTANTS = {
    SamplesWhatIsPooled: "test_a_pooled_prompt_ends_with_its_result",
    LeaksBlocks: "test_tokens_equal_those_of_the_request_alone",
    SharesBlocks: "test_tokens_equal_those_of_the_request_alone",
    OverBudget: "test_a_prompt_over_the_budget_is_computed_in_chunks",
    OldGeneration: "test_tokens_equal_those_of_the_request_alone",
    KeepsSlots: "test_tokens_equal_those_of_the_request_alone",
    EndsTwice: "test_reasons_to_end",
    SilentAbort: "test_finishing_from_outside",
    LosesTheReason: "test_finishing_from_outside",
    QueuesWithoutEnd: "test_a_full_queue_refuses",
    NeverPauses: "test_pausing",
    OneTokenMore: "test_reasons_to_end",
    TakesTheSameTwice: "test_a_live_id_is_refused_and_an_ended_one_is_free",
}


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[FakeScheduler]) -> None:
    assert MUTANTS[mutant] in run_suite(make_suite(mutant)).failed


DECLARED = {
    "preempts": "test_preemption_changes_no_token",
    "caches_prefixes": "test_prefixes_are_shared",
    "deadlines": "test_a_passed_deadline_aborts",
    "unchunked": "test_without_chunking_a_prompt_is_computed_at_once",
    "row_failures": "test_a_failed_row_ends_its_request_only",
    "log_probabilities": "test_log_probabilities_reach_the_request",
    "kv_events": "test_events_tell_which_prefixes_are_cached",
}


@pytest.mark.parametrize("capability", DECLARED)
def test_a_capability_that_is_only_declared_fails(capability: str) -> None:
    """L12.20."""
    suite = make_suite(FakeScheduler)
    setattr(suite, capability, True)
    assert DECLARED[capability] in run_suite(suite, only=DECLARED[capability]).failed


def test_what_is_not_declared_is_skipped_with_the_reason() -> None:
    outcome = run_suite(make_suite(FakeScheduler))
    assert not outcome.failed
    assert "declares no preemption" in outcome.skipped["test_preemption_changes_no_token"]


def test_a_class_without_tests_is_an_error() -> None:
    class Nothing:
        pass

    with pytest.raises(ValueError, match="Nothing has no tests"):
        run_suite(Nothing)
