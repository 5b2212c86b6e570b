"""The installed worker passes the suite of its kind behind a wrapper, and each faulty wrapper fails its rule."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.interfaces.kv_cache import KVCacheConfig, LayerSpec
from hardpoint.interfaces.plugin import declaration_of
from hardpoint.interfaces.request import SamplingParams
from hardpoint.interfaces.step import Deferred, GrammarMask, NewRow, RowFailure, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.worker import PendingOutput, Worker, WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch import TinyModel, WorkerSuite, installed_factory, make_tiny_model

Answer = RunnerOutput | Deferred | PendingOutput


FOLDER = TemporaryDirectory(ignore_cleanup_errors=True)


@cache
def checkpoint() -> TinyModel:
    return make_tiny_model("LlamaForCausalLM", Path(FOLDER.name) / "model")


class Wrapped(Worker):
    """The installed torch worker; mutants override a method."""

    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        factory = installed_factory("worker", "torch")
        declared = declaration_of(factory)
        assert declared is not None
        self.inner: Worker = factory(ctx, declared.options(**options))

    def init_device(self) -> None:
        self.inner.init_device()

    def load_model(self) -> None:
        self.inner.load_model()

    def kv_cache_specs(self) -> list[LayerSpec]:
        return self.inner.kv_cache_specs()

    def kv_cache_budget(self) -> int:
        return self.inner.kv_cache_budget()

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        self.inner.initialize_kv_cache(config)

    def warm_up(self) -> None:
        self.inner.warm_up()

    def execute(self, step: SchedulerOutput) -> Answer:
        return self.inner.execute(step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        return self.inner.sample(step_id, grammar)

    def supported_tasks(self) -> list[str]:
        return self.inner.supported_tasks()

    def check_health(self) -> None:
        self.inner.check_health()

    def shutdown(self) -> None:
        self.inner.shutdown()


class WrappedSuite(WorkerSuite):
    worker_class: ClassVar[type[Wrapped]] = Wrapped

    def create_worker(self, ctx: WorkerContext, options: Mapping[str, Any]) -> Worker:
        return self.worker_class(ctx, options)

    @classmethod
    def create_checkpoint(cls, folder: Path) -> TinyModel:
        return checkpoint()


def test_the_wrapper_by_itself_changes_nothing() -> None:
    outcome = run_suite(WrappedSuite)
    assert outcome.failed == {}
    assert len(outcome.passed) > 25


class Later(Wrapped):
    """Sound: results stay on the device until they are asked for."""

    def execute(self, step: SchedulerOutput) -> Answer:
        answer = super().execute(step)

        class Pending(PendingOutput):
            def result(self) -> RunnerOutput:
                assert isinstance(answer, RunnerOutput)
                return answer

        return answer if isinstance(answer, Deferred) else Pending()


class RaisesFromTheInside(Wrapped):
    def load_model(self) -> None:
        try:
            super().load_model()
        except RuntimeError:
            raise AttributeError("'NoneType' object has no attribute 'device'") from None


def without(ctx: WorkerContext, **changes: Any) -> WorkerContext:
    assert ctx.config is not None
    return replace(ctx, config=msgspec.structs.replace(ctx.config, **changes))


class PassesOverTheCompiler(Wrapped):
    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        super().__init__(without(ctx, compiler=None), options)


class PassesOverTheBackend(Wrapped):
    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        super().__init__(without(ctx, attention_backend=None), options)


class PassesOverQuantization(Wrapped):
    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        super().__init__(without(ctx, quantization=None), options)


class PassesOverProcessors(Wrapped):
    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, {})


class ForgetsALayer(Wrapped):
    def kv_cache_specs(self) -> list[LayerSpec]:
        return super().kv_cache_specs()[:-1]


class PassesOverTheBudget(Wrapped):
    def kv_cache_budget(self) -> int:
        return max(super().kv_cache_budget(), 1 << 20)


class MakesTheCacheTwice(Wrapped):
    made = False

    def initialize_kv_cache(self, config: KVCacheConfig) -> None:
        if not self.made:
            super().initialize_kv_cache(config)
        self.made = True


class EndsOnce(Wrapped):
    ended = False

    def shutdown(self) -> None:
        if self.ended:
            raise ValueError("already ended")
        self.ended = True
        super().shutdown()


class IsAlwaysWell(Wrapped):
    def check_health(self) -> None:
        pass


class Changes(Wrapped):
    """Sees each step before, and each result after the sound worker."""

    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        return step

    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return output

    def execute(self, step: SchedulerOutput) -> Answer:
        answer = super().execute(self.before(step))
        return self.after(step, answer) if isinstance(answer, RunnerOutput) else answer


def shifted(output: RunnerOutput) -> RunnerOutput:
    return msgspec.structs.replace(output, token_ids=(output.token_ids + 1) % 150)


class ConfusedByNeighbors(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        mixed = step.num_rows > 1 and len(set(step.num_scheduled_tokens.tolist())) > 1
        return shifted(output) if mixed else output


class ConfusedByChunks(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        later = (step.num_computed_tokens > 0) & (step.num_scheduled_tokens > 1)
        return shifted(output) if later.any() else output


class OffByOne(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return shifted(output)


class SortsItsRows(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return msgspec.structs.replace(output, slots=np.sort(output.slots))


class SamplesPartialPrompts(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        return msgspec.structs.replace(step, samples=np.ones_like(step.samples))


class OtherGeneration(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return msgspec.structs.replace(output, generations=output.generations * 0)


class WideTokens(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return msgspec.structs.replace(output, token_ids=output.token_ids.astype(np.int64))


def with_rows(step: SchedulerOutput, **changes: Any) -> SchedulerOutput:
    rows = tuple(msgspec.structs.replace(row, **changes) for row in step.new_rows)
    return msgspec.structs.replace(step, new_rows=rows)


class ForgetsDraws(Changes):
    """A resumed request is a new one to its random generator."""

    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        rows = tuple(
            msgspec.structs.replace(row, num_prompt_tokens=len(row.token_ids)) if row.resumed else row
            for row in step.new_rows
        )
        return msgspec.structs.replace(step, new_rows=rows)


class DrawsBySlot(Changes):
    """The seed of a request counts for less than the number of rows."""

    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        def reseeded(row: NewRow) -> NewRow:
            if row.sampling.seed is None:
                return row
            return msgspec.structs.replace(row, sampling=msgspec.structs.replace(row.sampling, seed=step.num_rows))

        return msgspec.structs.replace(step, new_rows=tuple(reseeded(row) for row in step.new_rows))


class KeepsParameters(Changes):
    """A slot's next request is sampled like the one before it."""

    def __init__(self, ctx: WorkerContext, options: Mapping[str, Any]) -> None:
        super().__init__(ctx, options)
        self.sampling: dict[int, SamplingParams] = {}

    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        rows = tuple(
            msgspec.structs.replace(row, sampling=self.sampling.setdefault(row.slot, row.sampling))
            for row in step.new_rows
        )
        return msgspec.structs.replace(step, new_rows=rows)


class AttendsBeforeAllIsWritten(Changes):
    """Computes a step's rows one after the other, the last one first."""

    def execute(self, step: SchedulerOutput) -> Answer:
        shared = [set(row.block_ids[0].tolist()) for row in step.new_rows]
        if len(shared) > 1 and set.intersection(*shared):
            rows = tuple(
                msgspec.structs.replace(row, block_ids=tuple(ids[::-1].copy() for ids in row.block_ids))
                if row is step.new_rows[-1]
                else row
                for row in step.new_rows
            )
            step = msgspec.structs.replace(step, new_rows=rows)
        return super().execute(step)


class NeverDefers(Wrapped):
    def execute(self, step: SchedulerOutput) -> Answer:
        return super().execute(msgspec.structs.replace(step, defers_sampling=False))


class OverwritesWhatWaits(Wrapped):
    waiting: SchedulerOutput | None = None

    def execute(self, step: SchedulerOutput) -> Answer:
        if self.waiting is not None:
            return Deferred(step.step_id)
        answer = super().execute(step)
        self.waiting = step if isinstance(answer, Deferred) else None
        return answer

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        output = super().sample(step_id, grammar)
        self.waiting = None
        return output


class SamplesWhateverWaits(OverwritesWhatWaits):
    def execute(self, step: SchedulerOutput) -> Answer:
        if self.waiting is not None:
            raise RuntimeError("a step waits")
        return super().execute(step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        return super().sample(step_id if self.waiting is None else self.waiting.step_id, grammar)


class NoGrammar(Wrapped):
    def sample(self, step_id: int, grammar: GrammarMask | None) -> RunnerOutput | PendingOutput:
        return super().sample(step_id, None)


class ServesAnything(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        return with_rows(step, task="generate", adapter=None)


class OneFailsAll(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        if not output.failures:
            return output
        pairs = zip(step.slots.tolist(), step.generations.tolist(), strict=True)
        everybody = tuple(RowFailure(slot, generation, "something broke") for slot, generation in pairs)
        return msgspec.structs.replace(
            output, failures=everybody, num_sampled=output.num_sampled * 0, token_ids=output.token_ids[:0]
        )


class GuessesAfterNaN(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        tokens = np.zeros(int(step.samples.sum()), dtype=np.int32)
        if not output.failures:
            return output
        return msgspec.structs.replace(output, failures=(), num_sampled=step.samples.astype(np.int32), token_ids=tokens)


class NoLogprobs(Changes):
    def after(self, step: SchedulerOutput, output: RunnerOutput) -> RunnerOutput:
        return msgspec.structs.replace(output, logprobs=None)


class PromptLogprobsAgain(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        rows = tuple(
            msgspec.structs.replace(row, sampling=msgspec.structs.replace(row.sampling, prompt_logprobs=None))
            for row in step.new_rows
        )
        return msgspec.structs.replace(step, new_rows=rows)


class NoEmbeddings(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        return with_rows(step, prompt_embeds=None)


class PoolsItsOwnWay(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        return with_rows(step, pooling=None)


class LearnsNothing(Changes):
    def before(self, step: SchedulerOutput) -> SchedulerOutput:
        known = step.known_tokens
        return (
            step
            if known is None
            else msgspec.structs.replace(step, known_tokens=msgspec.structs.replace(known, ids=known.ids * 0))
        )


class TakesAnyStep(Changes):
    def execute(self, step: SchedulerOutput) -> Answer:
        try:
            return super().execute(step)
        except RuntimeError:
            return RunnerOutput(
                step_id=step.step_id,
                slots=step.slots,
                generations=step.generations,
                num_sampled=step.samples.astype(np.int32),
                token_ids=np.zeros(int(step.samples.sum()), dtype=np.int32),
            )


FAULTS: dict[type[Wrapped], str] = {
    RaisesFromTheInside: "test_calls_out_of_order_are_refused",
    PassesOverTheCompiler: "test_what_it_was_asked_for_is_never_ignored",
    PassesOverTheBackend: "test_the_chosen_attention_backend_is_used",
    PassesOverQuantization: "test_the_chosen_quantization_is_used",
    PassesOverProcessors: "test_logits_processors_are_applied",
    ForgetsALayer: "test_layers_report_their_cache",
    PassesOverTheBudget: "test_the_budget_of_the_cache",
    MakesTheCacheTwice: "test_the_cache_is_made_once",
    EndsOnce: "test_health_and_the_end",
    IsAlwaysWell: "test_health_and_the_end",
    ConfusedByNeighbors: "test_neighbors_change_nothing",
    ConfusedByChunks: "test_chunks_change_nothing",
    OffByOne: "test_greedy_tokens_equal_the_oracles",
    SortsItsRows: "test_neighbors_change_nothing",
    SamplesPartialPrompts: "test_chunks_change_nothing",
    OtherGeneration: "test_greedy_tokens_equal_the_oracles",
    WideTokens: "test_greedy_tokens_equal_the_oracles",
    ForgetsDraws: "test_preempted_requests_go_on_where_they_were",
    DrawsBySlot: "test_random_tokens_belong_to_their_request",
    KeepsParameters: "test_slots_and_blocks_can_be_used_again",
    AttendsBeforeAllIsWritten: "test_rows_may_share_blocks_of_the_same_step",
    NeverDefers: "test_a_deferred_step_waits_for_its_sampling",
    OverwritesWhatWaits: "test_a_deferred_step_waits_for_its_sampling",
    SamplesWhateverWaits: "test_a_deferred_step_waits_for_its_sampling",
    NoGrammar: "test_a_grammar_is_obeyed",
    ServesAnything: "test_what_it_cannot_serve_ends_alone",
    OneFailsAll: "test_broken_numbers_end_one_request_alone",
    GuessesAfterNaN: "test_broken_numbers_end_one_request_alone",
    NoLogprobs: "test_log_probabilities",
    PromptLogprobsAgain: "test_prompt_log_probabilities",
    NoEmbeddings: "test_prompt_embeddings",
    PoolsItsOwnWay: "test_pooled_prompts",
    LearnsNothing: "test_tokens_sampled_elsewhere_are_learned",
    TakesAnyStep: "test_impossible_steps_are_refused",
}


def suite_of(worker: type[Wrapped]) -> type[WorkerSuite]:
    class Mutated(WrappedSuite):
        worker_class: ClassVar[type[Wrapped]] = worker

    return Mutated


def test_results_may_come_later() -> None:
    outcome = run_suite(suite_of(Later), only="neighbors or shared or deferred or broken")
    assert outcome.failed.keys() <= {"test_results_survive_the_wire"}
    assert len(outcome.passed) >= 3


@pytest.mark.slow
@pytest.mark.parametrize("mutant", FAULTS, ids=lambda mutant: mutant.__name__)
def test_a_faulty_worker_fails(mutant: type[Wrapped]) -> None:
    """L12.20."""
    rule = FAULTS[mutant]
    assert rule in run_suite(suite_of(mutant), only=rule, first_failure=True).failed


def test_what_is_switched_off_is_skipped() -> None:
    """L12.20."""

    class Small(WrappedSuite):
        logits_processors_option: ClassVar[str | None] = None
        computes_logprobs: ClassVar[bool] = False
        computes_prompt_logprobs: ClassVar[bool] = False
        applies_grammar: ClassVar[bool] = False
        takes_prompt_embeddings: ClassVar[bool] = False
        uses_attention_backends: ClassVar[bool] = False
        uses_quantization: ClassVar[bool] = False

    outcome = run_suite(Small, only="processor or prob or grammar or embeddings or chosen")
    assert outcome.failed == {}
    assert len(outcome.skipped) == 10
    assert all("declares" in reason for reason in outcome.skipped.values())


def test_a_worker_without_the_option_is_told_how_to_say_so() -> None:
    class Other(WorkerSuite):
        plugin: ClassVar[str | None] = "torch"
        logits_processors_option: ClassVar[str | None] = "filters"

        @classmethod
        def create_checkpoint(cls, folder: Path) -> TinyModel:
            return checkpoint()

    rule = "test_logits_processors_are_applied"
    assert "set logits_processors_option" in run_suite(Other, only=rule).failed[rule]
