"""The whole step loop over a fake worker: contracts of the step records, not of any real scheduler."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    PauseMode,
    SamplingParams,
    SchedulerLimits,
)
from hardpoint.testing import FakeExecutor, FakeScheduler, FakeWorker, next_token

BLOCK_SIZE = 4


def build(
    *, max_num_seqs: int = 4, budget: int = 16, num_blocks: int = 64, deferred: bool = False
) -> tuple[StepPipeline, FakeScheduler, FakeWorker]:
    limits = SchedulerLimits(max_num_seqs=max_num_seqs, max_num_batched_tokens=budget, max_model_len=64)
    scheduler = FakeScheduler(limits, num_blocks=num_blocks, block_size=BLOCK_SIZE)
    worker = FakeWorker(block_size=BLOCK_SIZE, deferred=deferred)
    executor = FakeExecutor(worker)
    layers = executor.kv_cache_specs()
    group = KVCacheGroup(tuple(layer.layer_name for layer in layers), layers[0].spec)
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=num_blocks, groups=(group,), tensors=()))
    return StepPipeline(scheduler, executor), scheduler, worker


def request(request_id: str, prompt: list[int], max_tokens: int = 5, **sampling: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0, **sampling)  # type: ignore[arg-type]
    return EngineRequest(request_id=request_id, prompt_token_ids=np.asarray(prompt, dtype=np.int32), sampling=params)


def run(pipeline: StepPipeline) -> dict[str, list[EngineOutput]]:
    outputs: dict[str, list[EngineOutput]] = {}
    for _ in range(10_000):
        if not pipeline.has_work():
            return outputs
        for output in pipeline.advance():
            outputs.setdefault(output.request_id, []).append(output)
    raise RuntimeError("the loop did not come to an end")


def expected(prompt: list[int], count: int) -> list[int]:
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(next_token(tokens, 97, 3))
    return tokens[len(prompt) :]


def tokens_of(outputs: list[EngineOutput]) -> list[int]:
    return [token for output in outputs for token in output.new_token_ids]


@pytest.mark.parametrize("deferred", [False, True])
def test_batched_requests_get_the_tokens_they_have_alone(deferred: bool) -> None:
    pipeline, scheduler, worker = build(deferred=deferred)
    prompts = {f"r{i}": list(range(3, 6 + 5 * i)) for i in range(7)}
    for name, prompt in prompts.items():
        assert scheduler.add(request(name, prompt)) is None
    outputs = run(pipeline)
    for name, prompt in prompts.items():
        assert tokens_of(outputs[name]) == expected(prompt, 5)
        assert [o.finish_reason for o in outputs[name]][-1] is FinishReason.LENGTH
        assert sum(o.finish_reason is not None for o in outputs[name]) == 1
    assert not worker.slots
    scheduler.check_integrity()


def test_long_prompts_are_computed_in_chunks_without_sampling_early() -> None:
    pipeline, scheduler, worker = build(budget=8)
    prompt = list(range(3, 40))
    scheduler.add(request("r", prompt, max_tokens=2))
    outputs = run(pipeline)
    assert tokens_of(outputs["r"]) == expected(prompt, 2)
    assert [step.samples.tolist() for step in worker.steps[:5]] == [[False]] * 4 + [[True]]


def test_a_slot_is_reused_with_a_new_generation_in_the_step_that_frees_it() -> None:
    pipeline, scheduler, worker = build(max_num_seqs=1)
    for i in range(3):
        scheduler.add(request(f"r{i}", [5, 6, 7 + i], max_tokens=2))
    outputs = run(pipeline)
    assert {name: tokens_of(o) for name, o in outputs.items()} == {
        f"r{i}": expected([5, 6, 7 + i], 2) for i in range(3)
    }
    generations = [row.generation for step in worker.steps for row in step.new_rows]
    assert generations == [1, 2, 3]


def test_finishing_from_outside_frees_blocks_and_tells_the_worker() -> None:
    pipeline, scheduler, worker = build()
    scheduler.add(request("gone", [4, 5], max_tokens=50))
    scheduler.add(request("stays", [4, 5], max_tokens=5))
    pipeline.advance()
    ended = scheduler.finish(["gone", "unknown"], FinishReason.ABORT)
    assert [(o.request_id, o.finish_reason) for o in ended] == [("gone", FinishReason.ABORT)]
    run(pipeline)
    assert not worker.slots
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_total_blocks


def test_pausing_everything_schedules_nothing_and_resuming_continues() -> None:
    pipeline, scheduler, _ = build()
    scheduler.add(request("r", [4, 5]))
    scheduler.set_pause(PauseMode.ALL)
    assert pipeline.advance() == []
    scheduler.set_pause(PauseMode.NONE)
    assert tokens_of(run(pipeline)["r"]) == expected([4, 5], 5)


def test_a_prompt_that_can_never_fit_ends_at_once_with_length() -> None:
    _, scheduler, _ = build(num_blocks=4)
    output = scheduler.add(request("big", list(range(3, 33))))
    assert output is not None
    assert output.finish_reason is FinishReason.LENGTH


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.integers(1, 12)), min_size=1, max_size=12),
    st.integers(1, 5),
    st.integers(5, 40),
)
def test_any_mix_of_requests_equals_solo_runs(shapes: list[tuple[int, int]], seqs: int, budget: int) -> None:
    pipeline, scheduler, _ = build(max_num_seqs=seqs, budget=budget)
    wanted = {}
    for i, (length, count) in enumerate(shapes):
        prompt = [3 + (i * 7 + j) % 90 for j in range(length)]
        wanted[f"r{i}"] = expected(prompt, count)
        scheduler.add(request(f"r{i}", prompt, max_tokens=count))
    outputs = run(pipeline)
    assert {name: tokens_of(o) for name, o in outputs.items()} == wanted
    scheduler.check_integrity()
