"""A scheduler driven over the fake worker, with every rule of its records checked in every step."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    RunnerOutput,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    SchedulerLimits,
    SchedulerOutput,
    spec_to_wire,
)
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_executor import FakeExecutor
from hardpoint.testing.fake_worker import FakeWorker, next_token

__all__ = ["BLOCK_SIZE", "SchedulerLoop", "make_request", "scheduler_context", "solo_tokens"]

BLOCK_SIZE = 4


def scheduler_context(limits: SchedulerLimits, num_blocks: int) -> SchedulerContext:
    """The context of a scheduler over one group of ``num_blocks`` blocks (the null block included)."""
    spec = FullAttentionSpec(block_size=BLOCK_SIZE, num_kv_heads=1, head_size=1, dtype="int8")
    group = KVCacheGroup(("layers.0",), spec_to_wire(spec))
    return SchedulerContext(
        name="under-test",
        api_version=1,
        roles=frozenset({ProcessRole.ENGINE}),
        limits=limits,
        kv_cache=KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=()),
    )


def make_request(
    request_id: str,
    prompt: Iterable[int],
    max_tokens: int | None = 5,
    *,
    eos_token_ids: tuple[int, ...] = (),
    deadline: float | None = None,
    stop_token_ids: tuple[int, ...] = (),
    ignore_eos: bool = False,
    min_tokens: int = 0,
) -> EngineRequest:
    """A greedy request."""
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=np.fromiter(prompt, dtype=np.int32),
        sampling=SamplingParams(
            max_tokens=max_tokens,
            temperature=0.0,
            stop_token_ids=stop_token_ids,
            ignore_eos=ignore_eos,
            min_tokens=min_tokens,
        ),
        eos_token_ids=eos_token_ids,
        deadline=deadline,
    )


def solo_tokens(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model answers to ``prompt`` when nobody else is there."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 97, 3))
    return tokens[len(prompt) :]


class StepRules:
    """Holds each step against the limits and against the steps before it; a broken rule is an ``AssertionError``."""

    def __init__(self, limits: SchedulerLimits, num_blocks: int) -> None:
        self.limits = limits
        self.num_blocks = num_blocks
        self.held: dict[int, int] = {}
        self.generations: dict[int, int] = {}
        self.steps: list[SchedulerOutput] = []

    def check(self, step: SchedulerOutput) -> None:
        self.steps.append(step)
        assert step.num_tokens <= self.limits.max_num_batched_tokens, "more tokens than the budget of a step"
        active = self.limits.max_num_active_seqs or self.limits.max_num_seqs
        assert step.num_rows <= min(active, self.limits.max_num_seqs), "more rows than sequences are allowed"
        for name in ("slots", "generations", "num_computed_tokens", "num_scheduled_tokens", "samples"):
            assert len(getattr(step, name)) == step.num_rows, f"{name} has another length than slots"
        for slot in [*step.finished_slots.tolist(), *step.preempted_slots.tolist()]:
            assert slot in self.held, f"slot {slot} is given back, but nobody holds it"
            del self.held[slot]
        scheduled = set(step.slots.tolist())
        for row in step.new_rows:
            assert 0 <= row.slot < self.limits.max_num_seqs, f"slot {row.slot} is outside 0..max_num_seqs"
            assert row.slot in scheduled, f"slot {row.slot} is handed out without being scheduled"
            assert row.slot not in self.held, f"slot {row.slot} is handed out while it is held"
            assert row.generation > self.generations.get(row.slot, -1), "a slot's generation must grow with each owner"
            self.generations[row.slot] = self.held[row.slot] = row.generation
            self._check_blocks(row.block_ids[0].tolist())
        self._check_blocks(step.new_blocks[0].ids.tolist())
        for slot, generation in zip(step.slots.tolist(), step.generations.tolist(), strict=True):
            assert self.held.get(slot) == generation, f"slot {slot} is scheduled under generation {generation}"

    def _check_blocks(self, ids: Sequence[int]) -> None:
        assert all(0 < block < self.num_blocks for block in ids), "a block id outside 1..num_blocks"


class SchedulerLoop:
    """``scheduler`` under the engine's own step loop. ``outputs`` by request; ``ends`` holds the terminal ones."""

    def __init__(
        self,
        scheduler: Scheduler,
        limits: SchedulerLimits,
        num_blocks: int,
        max_inflight_steps: int = 1,
        worker: FakeWorker | None = None,
    ) -> None:
        self.scheduler = scheduler
        self.rules = StepRules(limits, num_blocks)
        self.worker = FakeWorker(block_size=BLOCK_SIZE) if worker is None else worker
        self.worker.kv = np.full((num_blocks, BLOCK_SIZE), -7, dtype=np.int32)
        executor = FakeExecutor(self.worker, before_step=self.rules.check)
        self.pipeline = StepPipeline(scheduler, executor, max_inflight_steps=max_inflight_steps)
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}

    def add(self, request: EngineRequest) -> EngineOutput | None:
        output = self.scheduler.add(request)
        self.tokens[request.request_id] = []
        self.ends.pop(request.request_id, None)
        self.collect([] if output is None else [output])
        return output

    def finish(
        self, *request_ids: str, reason: FinishReason = FinishReason.ABORT, error: str | None = None
    ) -> list[EngineOutput]:
        outputs = self.scheduler.finish(request_ids, reason, error)
        self.collect(outputs)
        return outputs

    def advance(self) -> None:
        """One turn of the loop, and the scheduler's own integrity check."""
        self.collect(self.pipeline.advance())
        self.scheduler.check_integrity()

    def schedule(self) -> tuple[SchedulerOutput, RunnerOutput]:
        """A step that is computed but not yet updated: hand both to ``scheduler.update``."""
        step = self.scheduler.schedule()
        self.rules.check(step)
        output = self.worker.execute(step)
        assert isinstance(output, RunnerOutput)
        return step, output

    def run(self, most: int = 2_000) -> None:
        """Until nothing is left to do; ``AssertionError`` when that takes more than ``most`` turns."""
        for _ in range(most):
            if not self.pipeline.has_work():
                return
            self.advance()
        raise AssertionError(f"the scheduler still has work after {most} turns: {self.scheduler.stats()}")

    def collect(self, outputs: Iterable[EngineOutput]) -> None:
        for output in outputs:
            name = output.request_id
            assert name in self.tokens, f"an output for {name}, which was never added"
            assert name not in self.ends, f"an output of {name} after its terminal one"
            self.tokens[name].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[name] = output

    def check_empty(self) -> None:
        """Nothing lives, no block and no slot is held, and the worker was told so."""
        stats = self.scheduler.stats()
        assert not list(self.scheduler.live_request_ids()), "requests live on"
        assert stats.num_free_blocks == stats.num_total_blocks, "blocks leaked"
        assert (stats.num_running, stats.num_waiting) == (0, 0)
        assert not self.rules.held, "slots were never given back"
        assert not self.worker.slots, "the worker still holds requests"
        assert self.scheduler.reset_prefix_cache(), "the prefix cache cannot be reset although nothing runs"
        self.scheduler.check_integrity()
