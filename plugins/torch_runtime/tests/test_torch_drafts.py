"""Drafts on the real worker under a real scheduler: whatever was guessed, and however far steps run ahead, tokens are
those of a run without guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces import SchedulerContext, SchedulerExtension, SchedulerLimits
from hardpoint.interfaces.kv_cache import KVCacheConfig, KVCacheGroup
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.interfaces.request import EngineRequest
from hardpoint.interfaces.step import NewRow
from hardpoint_testing_torch import FakeStreams, PromisingExecutor, installed_factory
from hardpoint_torch_runtime.runner.assembly import RunnerParts
from hardpoint_torch_runtime.worker import TorchWorker, TorchWorkerOptions

VOCAB = 37
K = 3
PROMPTS = ([11, 12, 13, 14, 15], [5], [7, 8, 9, 10, 7, 8, 9, 10, 3], [30, 2, 4])
SAMPLINGS: Mapping[str, Sequence[Mapping[str, Any]]] = {
    "greedy": [{}] * 4,
    "seeded": [{"temperature": 1.3, "seed": i, "top_p": 0.9} for i in range(4)],
    "history": [
        {"repetition_penalty": 1.6, "frequency_penalty": 0.4},
        {"temperature": 1.1, "seed": 3, "presence_penalty": 0.9},
        {"bad_words_token_ids": ((9,), (3, 4), (10, 7)), "min_tokens": 6},
        {"temperature": 0.8, "seed": 9, "logit_bias": {4: 2.0}, "logprobs": 2},
    ],
}


@dataclass
class ScriptedProposer:
    """Guesses what a run without guesses gave, spoilt behind as many places as ``pattern`` says for the length."""

    script: Mapping[str, Sequence[int]]
    pattern: Sequence[int]
    num_drafts: int = K
    rows: dict[int, tuple[str, int]] = field(default_factory=dict)

    def enter(self, row: NewRow) -> None:
        self.rows[row.slot] = (row.request_id, len(row.token_ids) - row.num_prompt_tokens)

    def release(self, slots: np.ndarray) -> None:
        for slot in slots.tolist():
            self.rows.pop(slot, None)

    def propose(self, slots: np.ndarray, tokens: torch.Tensor, counts: torch.Tensor) -> torch.Tensor:
        del tokens
        guesses = torch.full((len(slots), self.num_drafts), -1, dtype=torch.int64)
        for index, (slot, count) in enumerate(zip(slots.tolist(), counts.tolist(), strict=True)):
            name, known = self.rows[slot]
            known += count
            self.rows[slot] = (name, known)
            right = self.pattern[known % len(self.pattern)]
            following = list(self.script[name][known : known + self.num_drafts])
            for place, token in enumerate(following):
                guesses[index, place] = token if place < right else (token + 1) % VOCAB
        return guesses


class Worker(TorchWorker):
    """The installed worker with a part or two more."""

    parts: RunnerParts = RunnerParts()

    def runner_parts(self) -> RunnerParts:
        own = super().runner_parts()
        processors = self.parts.processors or own.processors
        return replace(own, proposer=self.parts.proposer, streams=self.parts.streams, processors=processors)


class Speculator(SchedulerExtension):
    name = "speculator"
    drafts_on_worker = True

    def num_lookahead_tokens(self, request: Any) -> int:
        del request
        return K


class CountsTokens(LogitsProcessor):
    """Favors a token that depends on all that came before, so that it must hear of each in time."""

    def __init__(self) -> None:
        self.sums: dict[int, int] = {}

    def add(self, row: NewRow) -> bool:
        self.sums[row.slot] = int(row.token_ids[row.num_prompt_tokens :].sum())
        return True

    def remove(self, slot: int) -> None:
        self.sums.pop(slot, None)

    def observe(self, slots: np.ndarray, token_ids: np.ndarray) -> None:
        for slot, token in zip(slots.tolist(), token_ids.tolist(), strict=True):
            self.sums[slot] += token

    def apply(self, logits: torch.Tensor, slots: np.ndarray) -> torch.Tensor:
        for index, slot in enumerate(slots.tolist()):
            logits[index, (7 * self.sums[slot]) % VOCAB] += 9.0
        return logits


@dataclass
class Run:
    """``tokens`` by request; how many ``steps`` it took."""

    tokens: dict[str, list[int]]
    logprobs: dict[str, list[Any]]
    steps: int


def scheduler(world: Any, worker: TorchWorker, depth: int, *, drafts: bool, max_tokens: int) -> Any:
    specs = worker.kv_cache_specs()
    group = KVCacheGroup(tuple(spec.layer_name for spec in specs), specs[0].spec)
    factory = installed_factory("scheduler", "fcfs")
    context = SchedulerContext(
        name="fcfs",
        api_version=1,
        roles=frozenset({ProcessRole.ENGINE}),
        limits=SchedulerLimits(
            max_num_seqs=world.max_seqs,
            max_num_batched_tokens=max_tokens,
            max_model_len=world.max_len,
            max_inflight_steps=depth,
        ),
        kv_cache=KVCacheConfig(num_blocks=world.num_blocks, groups=(group,), tensors=()),
        extensions=(Speculator(),) if drafts else (),
    )
    return factory(context, factory.__hardpoint_plugin__.options())


def run(
    world: Any,
    requests: Sequence[EngineRequest],
    parts: RunnerParts,
    depth: int = 1,
    *,
    drafts_unseen: bool = False,
    max_tokens: int = 32,
) -> Run:
    worker = start(world, parts)
    planner = scheduler(world, worker, depth, drafts=drafts_unseen, max_tokens=max_tokens)
    pipeline = StepPipeline(planner, PromisingExecutor(worker), max_inflight_steps=depth)
    result = Run({r.request_id: [] for r in requests}, {r.request_id: [] for r in requests}, 0)
    for record in requests:
        assert planner.add(record) is None
    while pipeline.has_work():
        for output in pipeline.advance():
            assert output.error is None
            result.tokens[output.request_id] += output.new_token_ids
            result.logprobs[output.request_id] += output.logprobs or []
        planner.check_integrity()
    result.steps = pipeline.num_steps_updated
    return result


def start(world: Any, parts: RunnerParts) -> Worker:
    """Every byte of the cache is no number before the first token."""
    worker = Worker(world.context(), TorchWorkerOptions())
    worker.parts = parts
    world.boot(worker)
    for view in worker.runner.kv.views.values():
        view.fill_(float("nan"))
    return worker


def requests_of(world: Any, samplings: Sequence[Mapping[str, Any]], count: int = 12) -> list[EngineRequest]:
    return [
        world.engine_request(f"r{i}", prompt, max_tokens=count, ignore_eos=True, **sampling)
        for i, (prompt, sampling) in enumerate(zip(PROMPTS, samplings, strict=True))
    ]


PATTERNS = [(3,), (0,), (1, 3, 0, 2, 2), (2, 0)]


@pytest.mark.slow
@pytest.mark.parametrize("name", SAMPLINGS)
def test_any_acceptance_at_any_depth_gives_the_tokens_of_a_run_without_drafts(world: Any, name: str) -> None:
    """R4.37, R4.38: synchronous and asynchronous, drafts told to the scheduler or kept on the worker."""
    requests = requests_of(world, SAMPLINGS[name])
    plain = run(world, requests, RunnerParts())
    for pattern in PATTERNS:
        for depth, is_async in ((1, False), (2, False), (1, True), (2, True), (3, True)):
            streams = FakeStreams() if is_async else None
            parts = RunnerParts(proposer=ScriptedProposer(plain.tokens, pattern), streams=streams)
            ahead = run(world, requests, parts, depth, drafts_unseen=depth > 1)
            assert ahead.tokens == plain.tokens, (pattern, depth, is_async)
            if pattern == (3,) and depth == 1:
                assert ahead.steps < plain.steps / 2
