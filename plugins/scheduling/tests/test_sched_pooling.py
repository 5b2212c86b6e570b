"""Requests of tasks that pool: scheduled like prompts, ended by their result, never sampled from."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec
import numpy as np
import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import (
    EncoderOnlyAttentionSpec,
    EngineRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    PoolingParams,
    RunnerOutput,
    SchedulerOutput,
    spec_to_wire,
)
from hardpoint.testing.fake_worker import fake_pooled
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import answer, expected, make_loop, make_scheduler, request

PROMPT = list(range(3, 33))


def embedding(name: str, prompt: Sequence[int], pooling: str | None = None, **fields: Any) -> EngineRequest:
    return request(name, prompt, None, task="embed", pooling=PoolingParams(pooling=pooling), **fields)


def pooled_by(step: SchedulerOutput, *rows: int) -> RunnerOutput:
    return answer(step, pooled={row: np.full(2, 7.0, dtype=np.float32) for row in rows})


def assert_empty(scheduler: BatchScheduler) -> None:
    scheduler.check_integrity()
    stats = scheduler.stats()
    assert (stats.num_running, stats.num_waiting) == (0, 0)
    assert stats.num_free_blocks == stats.num_total_blocks
    assert not list(scheduler.live_request_ids())


def test_chunks_yield_no_sample_and_the_last_one_the_result() -> None:
    loop = make_loop(max_num_batched_tokens=16)
    loop.scheduler.add(embedding("e", PROMPT))
    (end,) = loop.run()["e"]
    steps = [step for step in loop.steps if step.num_tokens]
    assert [step.num_tokens for step in steps] == [16, 14]
    assert not any(step.samples.any() for step in steps)
    assert (steps[0].new_rows[0].task, steps[0].new_rows[0].pooling) == ("embed", PoolingParams())
    assert (end.finish_reason, end.new_token_ids, end.num_cached_tokens) == (FinishReason.STOP, [], 0)
    assert end.first_scheduled_time is not None
    assert end.pooled is not None
    np.testing.assert_array_equal(end.pooled, fake_pooled(PROMPT, first=3))
    assert_empty(loop.scheduler)


@pytest.mark.parametrize("seed", range(6))
def test_results_are_those_of_the_prompt_alone(seed: int) -> None:
    """I3.8: whatever the pool, the budget, the neighbors that generate, and who was preempted on the way."""
    rng = np.random.default_rng(seed)
    loop = make_loop(
        int(rng.integers(18, 26)), max_num_batched_tokens=int(rng.integers(6, 20)), prefix_caching=bool(seed % 2)
    )
    prompts: dict[str, list[int]] = {}
    for index in range(10):
        name, length = f"r{index}", int(rng.integers(1, 40))
        prompts[name] = [3 + int(token) for token in rng.integers(0, 4, length)]
        made = request(name, prompts[name], 8) if index % 2 else embedding(name, prompts[name])
        loop.scheduler.add(made)
        loop.run_some(int(rng.integers(0, 3)))
    outputs = loop.run()
    for index, (name, prompt) in enumerate(prompts.items()):
        tokens = [token for output in outputs[name] for token in output.new_token_ids]
        assert tokens == (expected(prompt, 8) if index % 2 else [])
        if not index % 2:
            (end,) = outputs[name]
            assert end.pooled is not None
            np.testing.assert_array_equal(end.pooled, fake_pooled(prompt, first=3))
    assert_empty(loop.scheduler)


def test_while_the_result_is_under_way_nothing_is_scheduled_for_it() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64, max_inflight_steps=2)
    scheduler.add(embedding("e", PROMPT))
    first = scheduler.schedule()
    assert (first.num_tokens, scheduler.schedule().num_tokens) == (30, 0)
    (end,) = scheduler.update(first, pooled_by(first, 0))
    assert end.finish_reason is FinishReason.STOP
    assert_empty(scheduler)


@pytest.mark.parametrize("when", ["waiting", "between chunks", "under way"])
def test_an_aborted_one_leaves_nothing(when: str) -> None:
    scheduler = make_scheduler(max_num_batched_tokens=16, max_inflight_steps=2)
    scheduler.add(embedding("e", PROMPT))
    under_way = []
    if when != "waiting":
        under_way.append(scheduler.schedule())
    if when == "under way":
        under_way.append(scheduler.schedule())
    (end,) = scheduler.finish(["e"], FinishReason.ABORT)
    assert (end.finish_reason, end.pooled) == (FinishReason.ABORT, None)
    for step in under_way:
        assert (
            scheduler.update(step, pooled_by(step, *([0] if step is under_way[-1] and when == "under way" else [])))
            == []
        )
    assert_empty(scheduler)


def preempted(drop: bool) -> tuple[BatchScheduler, SchedulerOutput]:
    """A request that was preempted after its last chunk was scheduled."""
    scheduler = make_scheduler(max_num_batched_tokens=64, max_inflight_steps=2)
    scheduler.add(embedding("e", PROMPT))
    step = scheduler.schedule()
    state = scheduler._state
    scheduler._lifecycle.preempt(state.live["e"], drop_stale=drop)
    return scheduler, step


def test_a_result_that_comes_after_a_preemption_is_delivered() -> None:
    """R3.79."""
    scheduler, step = preempted(drop=False)
    (end,) = scheduler.update(step, pooled_by(step, 0))
    assert (end.request_id, end.finish_reason) == ("e", FinishReason.STOP)
    assert_empty(scheduler)


def test_a_result_to_be_dropped_is_computed_anew() -> None:
    """R3.80."""
    scheduler, step = preempted(drop=True)
    assert scheduler.update(step, pooled_by(step, 0)) == []
    again = scheduler.schedule()
    assert again.new_rows[0].resumed
    (end,) = scheduler.update(again, pooled_by(again, 0))
    assert end.finish_reason is FinishReason.STOP
    assert_empty(scheduler)


def test_a_result_that_is_missing_or_unwanted_is_an_error() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(embedding("e", PROMPT))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="slot 0: no pooled result, although its prompt is computed"):
        scheduler.update(step, answer(step))
    scheduler = make_scheduler(max_num_batched_tokens=64)
    scheduler.add(request("g", PROMPT))
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match="slot 0: a pooled result that nobody wants"):
        scheduler.update(step, pooled_by(step, 0))


@pytest.mark.parametrize(("pooling", "cached"), [(None, 0), ("mean", 0), ("cls", 0), ("token_embed", 0), ("last", 28)])
def test_only_what_needs_the_last_token_alone_starts_behind_a_cached_prefix(pooling: str | None, cached: int) -> None:
    """R1.11: the states of all other positions are not kept."""
    loop = make_loop(max_num_batched_tokens=64)
    loop.scheduler.add(request("g", PROMPT, 2))
    loop.run()
    loop.scheduler.add(embedding("e", PROMPT, pooling))
    (end,) = loop.run()["e"]
    assert end.num_cached_tokens == cached
    assert end.pooled is not None
    np.testing.assert_array_equal(end.pooled, fake_pooled(PROMPT, first=3))


def test_what_is_pooled_fills_the_prefix_cache_for_others() -> None:
    loop = make_loop(max_num_batched_tokens=64)
    loop.scheduler.add(embedding("e", PROMPT))
    loop.run()
    loop.scheduler.add(request("g", PROMPT, 3))
    outputs = loop.run()["g"]
    assert outputs[0].num_cached_tokens == 28
    assert [token for output in outputs for token in output.new_token_ids] == expected(PROMPT, 3)


def test_a_prompt_may_fill_the_context() -> None:
    loop = make_loop(max_model_len=30)
    loop.scheduler.add(embedding("e", PROMPT))
    (end,) = loop.run()["e"]
    assert end.pooled is not None
    refused = loop.scheduler.add(embedding("f", [*PROMPT, 3]))
    assert refused is not None
    assert refused.finish_reason is FinishReason.LENGTH


# Models whose tokens see those behind them.


def encoder_scheduler(**changes: Any) -> BatchScheduler:
    spec = EncoderOnlyAttentionSpec(block_size=4, num_kv_heads=1, head_size=1, dtype="int8")
    group = KVCacheGroup(("layers.0",), spec_to_wire(spec))
    return make_scheduler(kv_cache=KVCacheConfig(num_blocks=2, groups=(group,), tensors=()), **changes)


def test_an_encoder_computes_whole_prompts_whatever_the_settings() -> None:
    """R4.52: also where prompts of decoders would be cut; what does not fit a step waits for the next one."""
    scheduler = encoder_scheduler(max_num_batched_tokens=40, long_prefill_threshold=5)
    for name in "abc":
        scheduler.add(embedding(name, PROMPT[:18]))
    shapes = []
    while scheduler.has_work():
        step = scheduler.schedule()
        if step.num_tokens:
            shapes.append(step.num_scheduled_tokens.tolist())
        scheduler.update(step, pooled_by(step, *range(step.num_rows)))
    assert shapes == [[18, 18], [18]]
    assert_empty(scheduler)


def test_an_encoder_reuses_no_prefix() -> None:
    scheduler = encoder_scheduler(max_num_batched_tokens=40)
    for name in "ab":
        scheduler.add(embedding(name, PROMPT, "last"))
        step = scheduler.schedule()
        assert step.num_computed_tokens.tolist() == [0]
        scheduler.update(step, pooled_by(step, 0))
    assert scheduler.stats().prefix_cache_hits == 0


def test_a_prompt_that_fits_no_step_of_an_encoder_is_refused() -> None:
    scheduler = encoder_scheduler(max_num_batched_tokens=16)
    with pytest.raises(InvalidRequestError, match="30 tokens.*one step; --max-num-batched-tokens allows 16") as caught:
        scheduler.add(embedding("e", PROMPT))
    assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
    assert_empty(scheduler)


def test_the_record_of_a_row_is_that_of_its_request() -> None:
    """Workers see what was asked for."""
    scheduler = make_scheduler()
    wanted = PoolingParams(pooling="mean", normalize=False, dimensions=3)
    scheduler.add(msgspec.structs.replace(embedding("e", PROMPT), pooling=wanted))
    (row,) = scheduler.schedule().new_rows
    assert (row.request_id, row.pooling) == ("e", wanted)
