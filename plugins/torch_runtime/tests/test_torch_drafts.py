"""Drafts on the real worker under a real scheduler: whatever was guessed, and however far steps run ahead, tokens are
those of a run without guesses."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces import SchedulerContext, SchedulerExtension, SchedulerLimits
from hardpoint.interfaces.kv_cache import KVCacheConfig, KVCacheGroup
from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.interfaces.request import EngineRequest
from hardpoint.interfaces.step import GrammarMask, NewRow, RunnerOutput, SchedulerOutput, TokenUpdate
from hardpoint_testing_torch import FakeStreams, PromisingExecutor, installed_factory
from hardpoint_torch_runtime.runner.assembly import RunnerParts
from hardpoint_torch_runtime.runner.draft_verification import DraftLayout, verify
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
            logits[index, (7 * self.sums[slot]) % VOCAB] += 60.0
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


def ahead_of(world: Any, plain: Run, requests: Sequence[EngineRequest], depth: int, *, is_async: bool) -> Run:
    proposer = ScriptedProposer(plain.tokens, (3, 3, 0, 3, 2))
    parts = RunnerParts(proposer=proposer, streams=FakeStreams() if is_async else None)
    return run(world, requests, parts, depth, drafts_unseen=depth > 1)


@pytest.mark.parametrize("name", ["greedy", "history"])
def test_drafts_that_only_the_worker_knows_change_no_token(world: Any, name: str) -> None:
    """R4.37, R4.38, P4.8: two steps under way; penalties, excluded words and draws by seed see the tokens they would
    see without drafts, and log-probabilities come for exactly the tokens told. Waiting or not, as many are right."""
    requests = requests_of(world, SAMPLINGS[name], 14)
    plain = run(world, requests, RunnerParts())
    runs = [ahead_of(world, plain, requests, 2, is_async=is_async) for is_async in (False, True)]
    assert runs[0].steps == runs[1].steps < plain.steps
    for ahead in runs:
        assert ahead.tokens == plain.tokens
        for request, entries in plain.logprobs.items():
            found = ahead.logprobs[request]
            assert [entry.token_ids for entry in found] == [entry.token_ids for entry in entries]
            np.testing.assert_allclose(
                [entry.logprobs for entry in found], [entry.logprobs for entry in entries], rtol=1e-4, atol=1e-5
            )


@pytest.mark.parametrize(("depth", "is_async"), [(1, False), (2, False), (2, True)])
def test_processors_hear_of_each_draft_before_the_next_place(world: Any, depth: int, is_async: bool) -> None:
    """R4.38: their state cannot be rolled back, so places are drawn one after the other."""
    requests = requests_of(world, SAMPLINGS["greedy"], 6)
    plain = run(world, requests, RunnerParts(processors=(CountsTokens(),)))
    assert plain.tokens != run(world, requests, RunnerParts()).tokens
    parts = RunnerParts(
        proposer=ScriptedProposer(plain.tokens, (1, 3, 0, 2)),
        streams=FakeStreams() if is_async else None,
        processors=(CountsTokens(),),
    )
    assert run(world, requests, parts, depth, drafts_unseen=depth > 1).tokens == plain.tokens


@pytest.mark.parametrize("kernel_block", [None, 2])
def test_refused_drafts_leave_no_trace_in_other_layouts(
    world: Any, loop_backend: Any, kernel_block: int | None
) -> None:
    """R4.37, R4.50: rows are moved back on the device, with rows reordered and blocks split for kernels."""
    world.backend = loop_backend(reorder_threshold=2, kernel_block=kernel_block)
    requests = requests_of(world, SAMPLINGS["greedy"], 7)
    plain = run(world, requests, RunnerParts(), max_tokens=7)
    parts = RunnerParts(proposer=ScriptedProposer(plain.tokens, (0, 2, 1)), streams=FakeStreams())
    assert run(world, requests, parts, 2, drafts_unseen=True, max_tokens=9).tokens == plain.tokens


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(12))
def test_random_requests_short_of_blocks_keep_their_tokens(world: Any, seed: int) -> None:
    """I4.1, I4.2, I4.4, R4.38, P4.1: preempted and resumed, admitted late, chunked; any acceptance, any depth."""
    random = np.random.default_rng(seed)
    pool = [entry for entries in SAMPLINGS.values() for entry in entries]
    requests = [
        world.engine_request(
            f"r{i}",
            random.integers(0, VOCAB, int(random.integers(1, 14))).tolist(),
            max_tokens=int(random.integers(1, 14)),
            ignore_eos=True,
            **pool[int(random.integers(len(pool)))],
        )
        for i in range(9)
    ]
    plain = run(world, requests, RunnerParts())
    world.num_blocks = 16
    for depth, is_async in ((1, False), (2, False), (1, True), (2, True), (3, True)):
        proposer = ScriptedProposer(plain.tokens, tuple(random.integers(0, K + 1, 5).tolist()))
        parts = RunnerParts(proposer=proposer, streams=FakeStreams() if is_async else None)
        most = int(random.integers(K + 2, 24))
        ahead = run(world, requests, parts, depth, drafts_unseen=depth > 1, max_tokens=most)
        assert ahead.tokens == plain.tokens, (depth, is_async)


# Single steps


def int32(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def drafted(make_step: Any, *rows: tuple[int, int, Sequence[int]], step_id: int = 1, **fields: Any) -> SchedulerOutput:
    """A step of rows (slot, first token, drafts), each with one known token before its drafts."""
    step: SchedulerOutput = make_step(
        step_id,
        [(slot, 1, first, 1 + len(drafts), True) for slot, first, drafts in rows],
        drafts=TokenUpdate(int32(*(len(d) for *_, d in rows)), int32(*(i for *_, d in rows for i in d))),
        **fields,
    )
    return step


def answered(worker: Worker, step: SchedulerOutput, mask: GrammarMask | None = None) -> RunnerOutput:
    answer = worker.execute(step)
    if step.defers_sampling:
        answer = worker.sample(step.step_id, mask)
    return answer.result() if not isinstance(answer, RunnerOutput) else answer  # type: ignore[union-attr]


@pytest.fixture(params=[False, True], ids=["waits", "promises"])
def worker(world: Any, request: pytest.FixtureRequest) -> Worker:
    return start(world, RunnerParts(streams=FakeStreams() if request.param else None))


def prefill(worker: Worker, make_step: Any, make_row: Any, **sampling: Any) -> list[int]:
    """Rows 0 and 1, each with a prompt of three tokens; returns their first samples."""
    rows = [make_row(0, [5, 6, 7], [1, 2, 3], **sampling), make_row(1, [8, 9, 3], [4, 5, 6])]
    step = make_step(0, [(0, 1, 0, 3, True), (1, 1, 0, 3, True)], new_rows=rows)
    return answered(worker, step).token_ids.tolist()


def bits(*tokens: int) -> np.ndarray:
    words = np.zeros((len(tokens), 2), dtype=np.uint32)
    for row, token in enumerate(tokens):
        words[row, token // 32] = 1 << (token % 32)
    return words.view(np.int32)


def test_a_grammar_has_a_mask_for_each_place(worker: Worker, make_step: Any, make_row: Any) -> None:
    """R4.38: consecutive masks, one per draft and one for the token after them; rows without masks are free."""
    prefill(worker, make_step, make_row)
    step = drafted(make_step, (1, 3, [1]), (0, 3, [17, 18]), defers_sampling=True)
    output = answered(worker, step, GrammarMask(int32(1, 1, 1), bits(17, 18, 19)))
    assert output.num_sampled.tolist()[1] == 3
    assert output.token_ids.tolist()[-3:] == [17, 18, 19]


def test_a_mask_may_refuse_a_draft(worker: Worker, make_step: Any, make_row: Any) -> None:
    prefill(worker, make_step, make_row)
    step = drafted(make_step, (0, 3, [17, 18]), (1, 3, []), defers_sampling=True)
    output = answered(worker, step, GrammarMask(int32(0, 0, 0, 1), bits(17, 20, 19, 33)))
    assert output.num_sampled.tolist() == [2, 1]
    assert output.token_ids.tolist() == [17, 20, 33]


def test_masks_that_do_not_match_the_places_are_refused(worker: Worker, make_step: Any, make_row: Any) -> None:
    prefill(worker, make_step, make_row)
    step = drafted(make_step, (0, 3, [17, 18]), defers_sampling=True)
    with pytest.raises(RuntimeError, match="row 0 of the step has 2 grammar masks for its 3 places"):
        answered(worker, step, GrammarMask(int32(0, 0), bits(17, 20)))


def test_missing_drafts_are_wrong(worker: Worker, make_step: Any, make_row: Any) -> None:
    """R4.37: of guesses that the worker is said to have made, but has not, none is right."""
    first = prefill(worker, make_step, make_row)
    output = answered(worker, drafted(make_step, (0, 3, [-1, -1]), (1, 3, [])))
    assert output.num_sampled.tolist() == [1, 1]
    again = answered(worker, drafted(make_step, (0, 4, [-1]), (1, 4, []), step_id=2))
    assert again.num_sampled.tolist() == [1, 1]
    slots = worker.runner.state.slots
    worker.runner.state.settle()
    assert (slots.num_tokens[:2].tolist(), slots.num_refused[:2].tolist()) == ([6, 6], [3, 0])
    assert slots.token_ids[0, 3:6].tolist() == [first[0], int(output.token_ids[0]), int(again.token_ids[0])]


def test_a_row_fails_where_it_counts(worker: Worker, make_step: Any, make_row: Any) -> None:
    """Class 32: values that are no numbers behind a refused draft do no harm, those before an accepted one do."""
    first = prefill(worker, make_step, make_row)
    model: Any = worker.loaded.model
    logits = model.logits

    def spoilt(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden).clone()
        found[[1, 3]] = float("nan")
        found[2] = 0.0
        found[2, 21] = 1.0
        return found

    model.logits = spoilt
    output = answered(worker, drafted(make_step, (0, 3, [first[0] + 1]), (1, 3, [21, 4])))
    assert output.num_sampled.tolist() == [1, 0]
    assert [(failure.slot, failure.generation) for failure in output.failures] == [(1, 1)]


def test_drafts_keep_within_the_room_of_a_slot(world: Any, worker: Worker, make_step: Any, make_row: Any) -> None:
    blocks = range(1, 14)
    prompt = [3] * 30
    answered(worker, make_step(0, [(0, 1, 0, 30, True)], new_rows=[make_row(0, prompt, blocks)]))
    with pytest.raises(RuntimeError, match="would hold 51 tokens, but has room for 49"):
        worker.execute(drafted(make_step, (0, 30, [1] * 20)))


@settings(max_examples=40, deadline=None)
@given(rows=st.lists(st.lists(st.tuples(st.integers(0, 2), st.integers(-1, 2)), max_size=4), min_size=1, max_size=5))
def test_verifying_counts_leading_equal_drafts(rows: list[list[tuple[int, int]]]) -> None:
    """R4.38: against plain lists, for rows with any number of drafts."""
    layout = DraftLayout.of(int32(*(len(row) for row in rows)))
    sampled = [[token for token, _ in row] + [7] for row in rows]
    drafts = [draft for row in rows for _, draft in row]
    verified = verify(
        torch.tensor([token for row in sampled for token in row]), torch.tensor(drafts, dtype=torch.int64), layout
    )
    for index, row in enumerate(rows):
        accepted = next((place for place, (token, draft) in enumerate(row) if token != draft), len(row))
        assert int(verified.counts[index]) == accepted + 1
        assert verified.tokens[index, : accepted + 1].tolist() == sampled[index][: accepted + 1]
        assert int(verified.newest[index]) == sampled[index][accepted]
        assert int(verified.refused[index]) == len(row) - accepted
