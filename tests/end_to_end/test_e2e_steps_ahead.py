"""The engine side with several steps under way: core, real scheduler, and a worker that answers a little later."""

from __future__ import annotations

import time
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test

from hardpoint.engine.core import EngineCore
from hardpoint.errors import WorkerError
from hardpoint.interfaces import EngineOutput, FinishReason, PauseMode, RunnerOutput, SchedulerOutput
from hardpoint.interfaces.step import Deferred
from hardpoint.testing import FakeExecutor, FakeWorker
from sched_support import BLOCK, expected, kv_config, make_scheduler, request

STOP = 41


class Lagging(FakeExecutor):
    """Steps run on a thread, in order; ``delay_s`` is what one takes at least."""

    def __init__(self, worker: FakeWorker, delay_s: float = 0.0) -> None:
        super().__init__(worker)
        self.delay_s = delay_s
        self.failing_step = -1
        self._thread = ThreadPoolExecutor(1)

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        def run() -> RunnerOutput | Deferred:
            time.sleep(self.delay_s)
            if step.step_id == self.failing_step:
                raise WorkerError("boom", rank=0)
            return super(Lagging, self).execute(step).result()

        return self._thread.submit(run)

    def shutdown(self, timeout_s: float = 10.0) -> None:
        self._thread.shutdown()
        super().shutdown(timeout_s)


def build(depth: int, num_blocks: int = 64, delay_s: float = 0.0, **limits: Any) -> EngineCore:
    scheduler = make_scheduler(num_blocks, max_inflight_steps=depth, **limits)
    worker = FakeWorker(block_size=BLOCK)
    worker.initialize_kv_cache(kv_config(num_blocks))
    return EngineCore(scheduler, Lagging(worker, delay_s), max_inflight_steps=depth, clock=lambda: 0.0)


@pytest.fixture
def engine(request: pytest.FixtureRequest) -> Iterator[Any]:
    made: list[EngineCore] = []

    def make(*args: Any, **options: Any) -> EngineCore:
        made.append(build(*args, **options))
        return made[-1]

    yield make
    for core in made:
        core.executor.shutdown()


def step(core: EngineCore) -> list[EngineOutput]:
    return [output for frame in core.step().values() for output in frame.outputs]


def run(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(5_000):
        if not core.has_work():
            return outputs
        outputs += step(core)
    raise RuntimeError("the core never became idle")


def tokens_of(outputs: list[EngineOutput], name: str) -> list[int]:
    return [token for output in outputs if output.request_id == name for token in output.new_token_ids]


def until_the_end_of(core: EngineCore, name: str) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    while not any(output.request_id == name and output.finish_reason for output in outputs):
        outputs += step(core)
    return outputs


@pytest.mark.parametrize("depth", [1, 2, 3])
def test_a_stop_token_ends_a_request_whose_next_step_is_under_way(engine: Any, depth: int) -> None:
    """R3.96: the surplus output is dropped, whatever it says."""
    core = engine(depth, delay_s=0.002)
    prompt = list(range(5, 16))
    stop = expected(prompt, 4)[3]
    core.add(request("r", prompt, 20, sampling={"stop_token_ids": (stop,)}))
    outputs = run(core)
    assert tokens_of(outputs, "r") == expected(prompt, 4)
    assert [output.finish_reason for output in outputs][-1] is FinishReason.STOP
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks


def test_a_step_that_nobody_waits_for_does_not_keep_the_prefix_cache(engine: Any) -> None:
    """R3.22: blocks of a request that ended are in use until the step planned meanwhile is through."""
    core = engine(2, delay_s=0.01)
    prompt = list(range(5, 16))
    core.add(request("r", prompt, 20, sampling={"stop_token_ids": (expected(prompt, 3)[2],)}))
    until_the_end_of(core, "r")
    assert core.has_work(), "a surplus step is under way"
    assert core.utility("reset_prefix_cache")
    core.add(request("again", prompt, 2))
    outputs = run(core)
    assert tokens_of(outputs, "again") == expected(prompt, 2)
    assert outputs[0].num_cached_tokens == 0


def test_the_prefix_cache_of_a_busy_engine_is_not_waited_for(engine: Any) -> None:
    core = engine(2)
    core.add(request("r", list(range(5, 16)), 20))
    step(core)
    assert not core.utility("reset_prefix_cache")
    assert tokens_of(run(core), "r") != []


def test_planning_goes_on_while_a_step_is_computed(engine: Any) -> None:
    """The second step is submitted before the first one's output is there."""
    core = engine(2, delay_s=0.05)
    core.add(request("r", [5, 6, 7], 4))
    begun = time.monotonic()
    core._pipeline._submit()
    assert time.monotonic() - begun < 0.04
    assert len(core._pipeline.inflight) == 2
    assert not core._pipeline.inflight[0].future.done()
    assert tokens_of(run(core), "r") == expected([5, 6, 7], 4)


@pytest.mark.parametrize("at", [0, 1, 2])
def test_a_step_that_fails_later_ends_everybody_once(engine: Any, at: int) -> None:
    """Class 32: also those whose next step had been submitted already."""
    core = engine(2, delay_s=0.005)
    core.executor.failing_step = at
    for name in ("a", "b", "c"):
        core.add(request(name, [5, 6, 7], 9))
    outputs = run(core)
    ends = [(output.request_id, output.finish_reason) for output in outputs if output.finish_reason is not None]
    assert sorted(ends) == [(name, FinishReason.ERROR) for name in ("a", "b", "c")]
    assert core.dead_reason == "WorkerError: boom"


class BusyEngine(RuleBasedStateMachine):
    """A pool for two or three sequences, up to three steps under way, and whatever clients and operators may do."""

    depth = 3

    def __init__(self) -> None:
        super().__init__()
        self.core = build(self.depth, 14, max_num_batched_tokens=9, prefix_caching=True)
        self.wanted: dict[str, list[int]] = {}
        self.aborted: set[str] = set()
        self.seen: list[EngineOutput] = []

    @rule(length=st.integers(1, 20), max_tokens=st.integers(1, 12), stops=st.booleans())
    def add(self, length: int, max_tokens: int, stops: bool) -> None:
        name = f"r{len(self.wanted)}"
        prompt = [3 + (7 * (length % 3) + index) % 90 for index in range(length)]
        tokens = expected(prompt, max_tokens)
        stop = tokens[len(tokens) // 2] if stops else STOP + 1_000
        self.wanted[name] = tokens[: tokens.index(stop) + 1] if stop in tokens else tokens
        self.core.add(request(name, prompt, max_tokens, sampling={"stop_token_ids": (stop,)}))

    @precondition(lambda self: self.wanted)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.wanted)), max_size=2))
        self.aborted |= {*names}
        self.core.abort(names)

    @rule(steps=st.integers(1, 5))
    def step(self, steps: int) -> None:
        self.seen += [output for _ in range(steps) for output in step(self.core)]

    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.core.utility("set_pause", [mode])

    @rule()
    def reset(self) -> None:
        self.core.utility("reset_prefix_cache")

    @invariant()
    def nobody_fails(self) -> None:
        assert self.core.dead_reason is None

    def teardown(self) -> None:
        self.core.utility("set_pause", ["none"])
        self.seen += [*run(self.core), *step(self.core)]
        self.core.executor.shutdown()
        for name, tokens in self.wanted.items():
            ends = [one for one in self.seen if one.request_id == name and one.finish_reason is not None]
            assert len(ends) == 1, name
            found = tokens_of(self.seen, name)
            assert found == tokens or (name in self.aborted and found == tokens[: len(found)])
        stats = self.core.scheduler.stats()
        assert stats.num_free_blocks == stats.num_total_blocks


TestBusyEngine = BusyEngine.TestCase
TestBusyEngine.settings = settings(max_examples=25, stateful_step_count=25, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_busy_engine_at_length() -> None:
    """I3.1, I3.5, I3.8: nobody is lost, every token is right, and every block comes back."""
    run_state_machine_as_test(BusyEngine, settings=settings(max_examples=2_000, stateful_step_count=30, deadline=None))
