"""Builders shared by the scheduling tests: real parts and the core's fakes, no mocks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from hypothesis import strategies as st

from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    RunnerOutput,
    SamplingParams,
    Scheduler,
    SchedulerContext,
    SchedulerExtension,
    SchedulerLimits,
    SchedulerOutput,
    spec_to_wire,
)
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.testing import FakeWorker, next_token
from hardpoint_scheduling.schedulers.factories import BatchOptions, create_fcfs
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler

BLOCK = 4


def spec(block_size: int = BLOCK, **fields: Any) -> FullAttentionSpec:
    return FullAttentionSpec(**{"block_size": block_size, "num_kv_heads": 1, "head_size": 1, "dtype": "int8", **fields})


def kv_config(num_blocks: int, *block_sizes: int) -> KVCacheConfig:
    groups = tuple(
        KVCacheGroup((f"layers.{i}",), spec_to_wire(spec(size))) for i, size in enumerate(block_sizes or (BLOCK,))
    )
    return KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())


def limits(**changes: Any) -> SchedulerLimits:
    return SchedulerLimits(**{"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64, **changes})


def make_scheduler(
    num_blocks: int = 64,
    *,
    create: Callable[..., Scheduler] = create_fcfs,
    kv_cache: KVCacheConfig | None = None,
    extensions: tuple[SchedulerExtension, ...] = (),
    clock: Any = None,
    options: BatchOptions | None = None,
    **changes: Any,
) -> BatchScheduler:
    context = SchedulerContext(
        name="fcfs",
        api_version=1,
        roles=frozenset({ProcessRole.ENGINE}),
        limits=limits(**changes),
        kv_cache=kv_cache if kv_cache is not None else kv_config(num_blocks),
        extensions=extensions,
    )
    scheduler = create(context, options or BatchOptions(), **({} if clock is None else {"clock": clock}))
    assert isinstance(scheduler, BatchScheduler)
    return scheduler


def request(request_id: str, prompt: Sequence[int], max_tokens: int | None = 5, **fields: Any) -> EngineRequest:
    sampling = {"max_tokens": max_tokens, "temperature": 0.0, **fields.pop("sampling", {})}
    return EngineRequest(
        request_id=request_id,
        prompt_token_ids=np.asarray(prompt, dtype=np.int32),
        sampling=SamplingParams(**sampling),
        **fields,
    )


def expected(prompt: Sequence[int], count: int) -> list[int]:
    """What the fake model says after ``prompt`` when it is alone."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 97, 3))
    return tokens[len(prompt) :]


def answer(step: SchedulerOutput, tokens: Sequence[int] | int = 50, **fields: Any) -> RunnerOutput:
    """A worker's output with scripted tokens for the rows that sample."""
    sampled = int(step.samples.sum())
    ids = [tokens] * sampled if isinstance(tokens, int) else list(tokens)
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=step.samples.astype(np.int32),
        token_ids=np.asarray(ids, dtype=np.int32),
        **fields,
    )


@dataclass
class Loop:
    """A scheduler and a fake worker, stepped one by one with the integrity check after each."""

    scheduler: BatchScheduler
    worker: FakeWorker
    outputs: dict[str, list[EngineOutput]] = field(default_factory=dict)
    steps: list[SchedulerOutput] = field(default_factory=list)

    def step(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        self.steps.append(step)
        if step.is_empty and not len(step.finished_slots) and not len(step.preempted_slots):
            self.collect(self.scheduler.take_outputs())
        else:
            output = self.worker.execute(step)
            assert isinstance(output, RunnerOutput)
            self.collect(self.scheduler.update(step, output))
        self.scheduler.check_integrity()
        return step

    def run(self, most: int = 5_000) -> dict[str, list[EngineOutput]]:
        for _ in range(most):
            if not self.scheduler.has_work():
                return self.outputs
            self.step()
        raise RuntimeError(f"the loop did not end within {most} steps")

    def run_some(self, steps: int) -> None:
        for _ in range(steps):
            self.step()

    def collect(self, outputs: Sequence[EngineOutput]) -> None:
        for output in outputs:
            self.outputs.setdefault(output.request_id, []).append(output)

    def tokens(self, request_id: str) -> list[int]:
        return [token for output in self.outputs.get(request_id, []) for token in output.new_token_ids]

    def ends(self, request_id: str) -> list[EngineOutput]:
        return [output for output in self.outputs.get(request_id, []) if output.finish_reason is not None]


def make_loop(num_blocks: int = 64, **fields: Any) -> Loop:
    scheduler = make_scheduler(num_blocks, **fields)
    worker = FakeWorker(block_size=BLOCK)
    worker.initialize_kv_cache(kv_config(num_blocks))
    return Loop(scheduler, worker)


def prompt_families(longest: int) -> st.SearchStrategy[list[int]]:
    """Prompts of few families with common prefixes, so that requests share, diverge inside a block and evict one
    another; ``longest`` is the most that two have in common."""
    return st.builds(
        lambda family, length, tail: [3 + (family * 31 + i) % 90 for i in range(length)] + tail,
        st.integers(0, 1),
        st.integers(0, longest),
        st.lists(st.integers(3, 6), min_size=1, max_size=3),
    )
