"""Several steps under way: nothing ends twice and nothing is lost, whatever fails, is aborted or shut down between."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from hardpoint.engine.core import EngineCore
from hardpoint.errors import EngineDeadError, WorkerError
from hardpoint.interfaces import (
    EngineOutput,
    EngineRequest,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    PauseMode,
    SamplingParams,
    SchedulerLimits,
    SchedulerOutput,
)
from hardpoint.testing import FakeExecutor, FakeScheduler, FakeWorker, next_token


class Trouble:
    """Raises inside step number ``at``; counts the steps that were submitted."""

    def __init__(self) -> None:
        self.at = -1
        self.error: Exception = WorkerError("gone", rank=0)
        self.num_submitted = 0

    def __call__(self, step: SchedulerOutput) -> None:
        self.num_submitted += 1
        if step.step_id == self.at:
            raise self.error


def build(depth: int, trouble: Trouble | None = None, **limits: Any) -> EngineCore:
    sizes: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}
    scheduler = FakeScheduler(SchedulerLimits(**{**sizes, **limits}), num_blocks=64, block_size=4)
    executor = FakeExecutor(FakeWorker(block_size=4), trouble)
    layers = executor.kv_cache_specs()
    group = KVCacheGroup(tuple(layer.layer_name for layer in layers), layers[0].spec)
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=64, groups=(group,), tensors=()))
    return EngineCore(scheduler, executor, max_inflight_steps=depth, clock=lambda: 0.0)


def request(name: str, length: int = 5, max_tokens: int = 6) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    return EngineRequest(request_id=name, prompt_token_ids=prompt(name, length), sampling=params)


def prompt(name: str, length: int) -> np.ndarray:
    return np.asarray([3 + (len(name) * 7 + i) % 90 for i in range(length)], dtype=np.int32)


def step(core: EngineCore) -> list[EngineOutput]:
    return [output for frame in core.step().values() for output in frame.outputs]


def run(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(2_000):
        if not core.has_work():
            return outputs
        outputs += step(core)
    raise RuntimeError("the core never became idle")


def ends(outputs: list[EngineOutput]) -> dict[str, list[FinishReason]]:
    found: dict[str, list[FinishReason]] = {}
    for output in outputs:
        if output.finish_reason is not None:
            found.setdefault(output.request_id, []).append(output.finish_reason)
    return found


def tokens_of(outputs: list[EngineOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.new_token_ids]


def expected(name: str, length: int, count: int) -> list[int]:
    tokens = prompt(name, length).tolist()
    for _ in range(count):
        tokens.append(next_token(tokens, 97, 3))
    return tokens[length:]


def test_as_many_steps_are_under_way_as_allowed() -> None:
    for depth in (1, 2, 3):
        trouble = Trouble()
        core = build(depth, trouble, max_num_batched_tokens=5)
        core.add(request("long", length=40))
        core.step()
        assert trouble.num_submitted == depth
        assert core.num_steps == 1
        assert tokens_of(run(core), "long") == expected("long", 40, 6)


@settings(max_examples=40, deadline=None)
@given(
    st.lists(st.tuples(st.integers(1, 30), st.integers(1, 9)), min_size=1, max_size=9),
    st.integers(2, 4),
    st.integers(4, 24),
)
def test_tokens_do_not_depend_on_the_depth(shapes: list[tuple[int, int]], depth: int, budget: int) -> None:
    """I3.8."""
    core = build(depth, max_num_batched_tokens=budget)
    for index, (length, count) in enumerate(shapes):
        core.add(request("r" * (index + 1), length, count))
    outputs = run(core)
    for index, (length, count) in enumerate(shapes):
        name = "r" * (index + 1)
        assert tokens_of(outputs, name) == expected(name, length, count)
    assert all(len(reasons) == 1 for reasons in ends(outputs).values())


@pytest.mark.parametrize("error", [WorkerError("gone", rank=0), EngineDeadError("gone"), ValueError("gone")])
@pytest.mark.parametrize("at", [0, 1, 2, 3])
def test_a_failing_step_ends_everything_once_whichever_of_those_under_way_it_is(error: Exception, at: int) -> None:
    trouble = Trouble()
    trouble.at, trouble.error = at, error
    core = build(2, trouble)
    names = [f"r{i}" for i in range(7)]
    for name in names:
        core.add(request(name))
    outputs = run(core)
    assert ends(outputs) == {name: [FinishReason.ERROR] for name in names}
    assert type(error).__name__ in (core.dead_reason or "")
    assert not core.has_work()
    core.shutdown()


@pytest.mark.parametrize("num_steps", [0, 1, 2])
def test_a_worker_that_dies_with_steps_under_way_ends_everything_once(num_steps: int) -> None:
    core = build(2, max_num_batched_tokens=5)
    for name in ("a", "b"):
        core.add(request(name, length=30))
    outputs = [output for _ in range(num_steps) for output in step(core)]
    assert isinstance(core.executor, FakeExecutor)
    core.executor.kill("worker 0 got SIGKILL")
    outputs += run(core)
    assert ends(outputs) == {"a": [FinishReason.ERROR], "b": [FinishReason.ERROR]}
    assert core.dead_reason == "EngineDeadError: worker 0 got SIGKILL"


def test_draining_waits_for_every_step_under_way() -> None:
    core = build(2, max_num_batched_tokens=5)
    core.add(request("old", length=30))
    core.step()
    core.begin_drain()
    core.add(request("new"))
    outputs = run(core)
    assert ends(outputs) == {"old": [FinishReason.LENGTH], "new": [FinishReason.ERROR]}
    assert tokens_of(outputs, "old") == expected("old", 30, 6)
    core.scheduler.check_integrity()


def test_shutting_down_with_steps_under_way_tells_everyone() -> None:
    core = build(2, max_num_batched_tokens=5)
    for name in ("a", "b", "c"):
        core.add(request(name, length=30))
    core.step()
    core.shutdown()
    outputs = [output for frame in core.take_frames().values() for output in frame.outputs]
    assert ends(outputs) == {name: [FinishReason.ABORT] for name in ("a", "b", "c")}
    assert isinstance(core.executor, FakeExecutor)
    assert core.executor.is_shut_down


class StepsAhead(RuleBasedStateMachine):
    """Requests come, are aborted and paused while up to three steps are under way; the engine may die at any step."""

    def __init__(self) -> None:
        super().__init__()
        self.trouble = Trouble()
        self.core = build(3, self.trouble, max_num_batched_tokens=6, max_waiting=6)
        self.names: list[str] = []
        self.seen: list[EngineOutput] = []

    @rule(length=st.integers(1, 30), max_tokens=st.integers(1, 8))
    def add(self, length: int, max_tokens: int) -> None:
        self.names.append("n" * (len(self.names) + 1))
        self.core.add(request(self.names[-1], length, max_tokens))

    @rule(which=st.integers(0, 30))
    def abort(self, which: int) -> None:
        self.core.abort(self.names[which : which + 2])

    @rule(steps=st.integers(1, 3))
    def step(self, steps: int) -> None:
        self.seen += [output for _ in range(steps) for output in step(self.core)]

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        if self.core.dead_reason is None:
            self.core.utility("set_pause", [mode])

    @rule(unlucky=st.integers(0, 11))
    def break_a_later_step(self, unlucky: int) -> None:
        if unlucky == 0:
            assert isinstance(self.core.scheduler, FakeScheduler)
            self.trouble.at = self.core.scheduler.step_id + 1

    @invariant()
    def nothing_ends_twice(self) -> None:
        assert all(len(reasons) == 1 for reasons in ends(self.seen).values())

    def teardown(self) -> None:
        if self.core.dead_reason is None:
            self.core.utility("set_pause", ["none"])
        self.seen += [*run(self.core), *step(self.core)]
        assert ends(self.seen).keys() == set(self.names)
        if self.core.dead_reason is None:
            stats = self.core.scheduler.stats()
            assert stats.num_free_blocks == stats.num_total_blocks


TestStepsAhead = StepsAhead.TestCase
TestStepsAhead.settings = settings(max_examples=30, stateful_step_count=25, deadline=None)
