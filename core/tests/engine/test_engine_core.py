"""The engine core: one terminal output per request, whatever fails, and balanced books when idle."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from hardpoint.engine.core import ERROR_CODE, EngineCore
from hardpoint.errors import ConfigError, EngineDeadError, InvalidRequestError, WorkerError
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
from hardpoint.interfaces.step import SchedulerOutput
from hardpoint.testing import FakeExecutor, FakeScheduler, FakeWorker

LIMITS: dict[str, Any] = {"max_num_seqs": 4, "max_num_batched_tokens": 16, "max_model_len": 64}


class Recorder:
    """A hook runner that remembers its calls; ``failing`` names a hook that raises."""

    def __init__(self, failing: str = "") -> None:
        self.calls: list[str] = []
        self.failing = failing

    def call(self, hook: str, **arguments: object) -> None:
        self.calls.append(hook)
        if hook == self.failing:
            raise RuntimeError(f"{hook} failed")


class Fault:
    """Raises inside step number ``at``."""

    def __init__(self, at: int, error: Exception) -> None:
        self.at = at
        self.error = error

    def __call__(self, step: SchedulerOutput) -> None:
        if step.step_id == self.at:
            raise self.error


def build(
    *, fault: Fault | None = None, hooks: Recorder | None = None, clock: list[float] | None = None, **limits: int
) -> EngineCore:
    scheduler_limits = SchedulerLimits(**{**LIMITS, **limits})
    scheduler = FakeScheduler(scheduler_limits, num_blocks=64, block_size=4)
    executor = FakeExecutor(FakeWorker(block_size=4), fault)
    layers = executor.kv_cache_specs()
    group = KVCacheGroup(tuple(layer.layer_name for layer in layers), layers[0].spec)
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=64, groups=(group,), tensors=()))
    moments = clock or [0.0]
    return EngineCore(scheduler, executor, hook=(hooks or Recorder()).call, clock=lambda: moments[0])


def request(name: str, *, length: int = 5, max_tokens: int = 4, **fields: object) -> EngineRequest:
    params = SamplingParams(max_tokens=max_tokens, temperature=0.0)
    ids = np.arange(3, 3 + length, dtype=np.int32)
    return EngineRequest(request_id=name, prompt_token_ids=ids, sampling=params, **fields)  # type: ignore[arg-type]


def outputs_of(core: EngineCore, steps: int = 1) -> list[EngineOutput]:
    return [output for _ in range(steps) for frame in core.step().values() for output in frame.outputs]


def run(core: EngineCore) -> list[EngineOutput]:
    outputs: list[EngineOutput] = []
    for _ in range(1000):
        if not core.has_work():
            return outputs
        outputs.extend(outputs_of(core))
    raise RuntimeError("the core never became idle")


def ends(outputs: Iterable[EngineOutput]) -> dict[str, list[FinishReason]]:
    found: dict[str, list[FinishReason]] = {}
    for output in outputs:
        if output.finish_reason is not None:
            found.setdefault(output.request_id, []).append(output.finish_reason)
    return found


def test_each_client_gets_one_frame_per_step() -> None:
    core = build()
    core.add(request("a"))
    core.add(request("b", client_index=1))
    core.add(request("c", client_index=1))
    frames = core.step()
    assert {client: [o.request_id for o in frame.outputs] for client, frame in frames.items()} == {
        0: ["a"],
        1: ["b", "c"],
    }
    assert frames[0].stats is not None
    assert frames[0].stats.num_running == 3
    assert ends(run(core)) == {name: [FinishReason.LENGTH] for name in "abc"}
    assert core.num_live == 0


def test_statistics_of_steps_without_outputs_are_told_once() -> None:
    core = build(max_num_batched_tokens=4)
    first = core.untold_stats()
    assert first is not None
    assert (first.outputs, first.stats) == ([], core.scheduler.stats())
    assert core.untold_stats() is None
    core.add(request("a", length=20))
    assert core.step() == {}, "a part of a prompt has no output"
    during = core.untold_stats()
    assert during is not None
    assert during.stats is not None
    assert during.stats.num_running == 1
    run(core)
    core.untold_stats()
    assert core.untold_stats() is None


def test_hooks_see_every_request_come_and_go_once() -> None:
    hooks = Recorder()
    core = build(hooks=hooks)
    core.add(request("a"))
    core.add(request("b"))
    core.abort(["b"])
    run(core)
    assert hooks.calls.count("request_added") == 2
    assert hooks.calls.count("request_finished") == 2
    assert "step_finished" in hooks.calls


@pytest.mark.parametrize("steps", [0, 1, 2, 50])
def test_aborting_in_any_state_gives_exactly_one_end(steps: int) -> None:
    """Waiting, prefilling, decoding and ended."""
    core = build(max_num_batched_tokens=4)
    core.add(request("a", length=6))
    before = outputs_of(core, steps)
    core.abort(["a"])
    core.abort(["a", "unknown"])
    after = run(core)
    reason = FinishReason.LENGTH if steps == 50 else FinishReason.ABORT
    assert ends([*before, *after]) == {"a": [reason]}
    stats = core.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks


def test_a_request_that_can_never_run_ends_at_once() -> None:
    core = build()
    core.add(request("big", length=63, max_tokens=60))
    core.add(request("fits"))
    assert ends(run(core)) == {"fits": [FinishReason.LENGTH], "big": [FinishReason.LENGTH]}


def test_a_full_queue_and_a_refusing_scheduler_end_only_the_new_request() -> None:
    core = build(max_num_seqs=1, max_waiting=0)
    core.add(request("a"))
    core.add(request("b"))
    (refusal,) = [o for o in outputs_of(core) if o.request_id == "b"]
    assert (refusal.finish_reason, refusal.extensions) == (FinishReason.ERROR, {ERROR_CODE: "OverloadedError"})
    assert ends(run(core)) == {"a": [FinishReason.LENGTH]}

    class Picky(FakeScheduler):
        def add(self, request: EngineRequest) -> EngineOutput | None:
            raise InvalidRequestError("not this one")

    core.scheduler = Picky(SchedulerLimits(**LIMITS), num_blocks=4, block_size=4)
    core.add(request("c"))
    (refusal,) = outputs_of(core)
    assert (refusal.error, refusal.extensions) == ("not this one", {ERROR_CODE: "InvalidRequestError"})
    assert core.dead_reason is None


def test_a_second_request_of_a_live_name_changes_nothing() -> None:
    core = build()
    core.add(request("a"))
    core.add(request("a"))
    assert ends(run(core)) == {"a": [FinishReason.LENGTH]}


def test_draining_refuses_the_new_and_finishes_the_old() -> None:
    core = build()
    core.add(request("old"))
    core.begin_drain()
    core.add(request("new"))
    outputs = run(core)
    assert ends(outputs) == {"old": [FinishReason.LENGTH], "new": [FinishReason.ERROR]}
    assert [o.extensions for o in outputs if o.request_id == "new"] == [{ERROR_CODE: "EngineNotReadyError"}]


@pytest.mark.parametrize(
    "error", [WorkerError("gone", rank=0), EngineDeadError("gone"), ValueError("gone"), KeyError("gone")]
)
def test_a_failing_step_ends_everything_once(error: Exception) -> None:
    hooks = Recorder()
    core = build(fault=Fault(2, error), hooks=hooks)
    for i in range(7):
        core.add(request(f"r{i}"))
    outputs = run(core)
    core.add(request("late"))
    outputs += run(core)
    assert ends(outputs) == {name: [FinishReason.ERROR] for name in (*(f"r{i}" for i in range(7)), "late")}
    assert type(error).__name__ in (core.dead_reason or "")
    assert not any("gone" in (output.error or "") for output in outputs)
    assert hooks.calls.count("request_finished") == 8
    core.abort(["r0"])
    assert run(core) == []
    with pytest.raises(EngineDeadError):
        core.utility("stats")


def test_a_worker_that_dies_while_idle_is_noticed() -> None:
    core = build()
    woken: list[bool] = []
    core.wake = lambda: woken.append(True)
    assert isinstance(core.executor, FakeExecutor)
    core.executor.kill("worker 0 got SIGKILL")
    assert woken == [True]
    assert core.has_work()
    core.step()
    assert core.dead_reason == "EngineDeadError: worker 0 got SIGKILL"


@pytest.mark.parametrize("hook", ["request_added", "request_finished", "step_finished"])
def test_a_strict_hook_that_raises_ends_the_engine_but_loses_no_end(hook: str) -> None:
    core = build(hooks=Recorder(failing=hook))
    for name in "abc":
        core.add(request(name))
    assert {name: len(reasons) for name, reasons in ends(run(core)).items()} == dict.fromkeys("abc", 1)
    assert f"{hook} failed" in (core.dead_reason or "")


def test_a_request_the_scheduler_lost_still_ends() -> None:
    class Forgetful(FakeScheduler):
        def update(self, step: SchedulerOutput, output: object) -> list[EngineOutput]:
            outputs = super().update(step, output)  # type: ignore[arg-type]
            return [one for one in outputs if one.finish_reason is None]

    core = build()
    forgetful = Forgetful(SchedulerLimits(**LIMITS), num_blocks=64, block_size=4)
    core = EngineCore(forgetful, core.executor)
    core.add(request("a"))
    assert ends([*run(core), *outputs_of(core)]) == {"a": [FinishReason.ERROR]}
    assert core.dead_reason is None


def test_a_lost_request_ends_while_others_run() -> None:
    """Within a second of the loop, not only once the engine is idle; the others go on unharmed."""
    clock = [0.0]
    core = build(clock=clock)
    core.add(request("long", max_tokens=40))
    core.add(request("lost", max_tokens=40))
    core.step()
    core.scheduler.finish(["lost"], FinishReason.ABORT)
    assert ends(outputs_of(core, 3)) == {}
    clock[0] = 1.0
    assert ends(outputs_of(core)) == {"lost": [FinishReason.ERROR]}
    assert core.num_live == 1
    assert ends(run(core)) == {"long": [FinishReason.LENGTH]}
    assert core.dead_reason is None


def test_looking_for_lost_requests_costs_no_step_anything() -> None:
    class Counting(FakeScheduler):
        looks = 0

        def live_request_ids(self) -> Iterable[str]:
            self.looks += 1
            return super().live_request_ids()

    clock = [100.0]
    scheduler = Counting(SchedulerLimits(**LIMITS), num_blocks=64, block_size=4)
    core = EngineCore(scheduler, build().executor, clock=lambda: clock[0])
    core.add(request("a", max_tokens=40))
    scheduler.looks = 0
    for _ in range(30):
        core.step()
    assert scheduler.looks == 1


@pytest.mark.parametrize("where", ["add", "schedule", "update", "stats", "hook"])
def test_a_call_for_the_end_of_the_process_ends_the_engine_and_says_whose(where: str) -> None:
    def leave(*args: object, **arguments: object) -> Any:
        raise SystemExit(0)

    core = build()
    core.add(request("a"))
    core.step()
    if where == "hook":
        core._run_hook = leave
    else:
        setattr(core.scheduler, where, leave)
    core.add(request("b"))
    assert {name: len(reasons) for name, reasons in ends(run(core)).items()} == {"a": 1, "b": 1}
    assert core.dead_reason is not None
    assert core.dead_reason.startswith("SystemExit: 0, called for by ")
    assert core.dead_reason.endswith("<locals>.leave")
    assert "test_engine_core" in core.dead_reason


def test_unbalanced_books_end_the_engine() -> None:
    core = build()
    core.add(request("a"))
    assert isinstance(core.scheduler, FakeScheduler)
    core.scheduler.free_blocks.pop()
    run(core)
    core.step()
    assert "do not add up" in (core.dead_reason or "")


def test_deadlines_pass_while_waiting_running_or_paused() -> None:
    clock = [0.0]
    core = build(clock=clock, max_num_seqs=1)
    core.add(request("running", max_tokens=50, deadline=10.0))
    core.add(request("waiting", deadline=5.0))
    outputs_of(core)
    assert core.next_deadline() == 5.0
    clock[0] = 5.0
    outputs = outputs_of(core)
    clock[0] = 11.0
    core.utility("set_pause", ["all"])
    outputs += outputs_of(core)
    assert ends(outputs) == {"waiting": [FinishReason.ABORT], "running": [FinishReason.ABORT]}
    assert core.next_deadline() is None


def test_deadlines_of_ended_requests_do_not_pile_up() -> None:
    core = build()
    for number in range(300):
        core.add(request(f"r{number}", max_tokens=1, deadline=1e9))
        run(core)
    assert core.num_live == 0
    assert len(core._deadlines) < 100
    core.add(request("live", deadline=5.0))
    assert core.next_deadline() == 5.0


def test_pausing_keeps_requests_without_calling_them_lost() -> None:
    core = build()
    core.add(request("a"))
    outputs_of(core)
    core.utility("set_pause", [PauseMode.ALL])
    assert outputs_of(core, 3) == []
    assert not core.has_work()
    core.utility("set_pause", ["none"])
    assert ends(run(core)) == {"a": [FinishReason.LENGTH]}


def test_utilities_are_a_closed_list() -> None:
    core = build()
    assert core.utility("reset_prefix_cache") is True
    assert core.utility("check_health") is None
    assert core.utility("stats").num_running == 0
    for name in ("shutdown", "__class__", "add", ""):
        with pytest.raises(ConfigError, match="does not exist"):
            core.utility(name)


def test_shutting_down_tells_everyone() -> None:
    core = build()
    core.add(request("a", max_tokens=50))
    before = outputs_of(core, 2)
    core.shutdown()
    frames = core.take_frames()
    assert ends([*before, *frames[0].outputs]) == {"a": [FinishReason.ABORT]}
    assert isinstance(core.executor, FakeExecutor)
    assert core.executor.is_shut_down


class CoreMachine(RuleBasedStateMachine):
    """Adds, aborts, steps, pauses and at most one fault in any order: each request ends at most once, and in the end
    exactly once, with all blocks free."""

    def __init__(self) -> None:
        super().__init__()
        self.fault = Fault(-1, WorkerError("boom", rank=0))
        self.core = build(fault=self.fault, max_waiting=6)
        self.names: list[str] = []
        self.seen: list[EngineOutput] = []

    @rule(length=st.integers(1, 30), max_tokens=st.integers(1, 12))
    def add(self, length: int, max_tokens: int) -> None:
        self.names.append(f"r{len(self.names)}")
        self.core.add(request(self.names[-1], length=length, max_tokens=max_tokens))

    @precondition(lambda self: self.names)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        self.core.abort(data.draw(st.lists(st.sampled_from(self.names), max_size=3)))

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        self.seen += outputs_of(self.core, steps)

    @precondition(lambda self: self.core.dead_reason is None)
    @rule(mode=st.sampled_from(PauseMode))
    def pause(self, mode: PauseMode) -> None:
        self.core.utility("set_pause", [mode])

    @precondition(lambda self: self.fault.at < 0 and len(self.names) > 6)
    @rule()
    def break_next_step(self) -> None:
        assert isinstance(self.core.scheduler, FakeScheduler)
        self.fault.at = self.core.scheduler.step_id

    @invariant()
    def no_request_ends_twice(self) -> None:
        assert all(len(reasons) == 1 for reasons in ends(self.seen).values())

    def teardown(self) -> None:
        if self.core.dead_reason is None:
            self.core.utility("set_pause", ["none"])
        self.seen += [*run(self.core), *outputs_of(self.core)]
        assert ends(self.seen).keys() == set(self.names)
        assert all(len(reasons) == 1 for reasons in ends(self.seen).values())
        stats = self.core.scheduler.stats()
        assert self.core.dead_reason is not None or stats.num_free_blocks == stats.num_total_blocks


TestCoreMachine = CoreMachine.TestCase
TestCoreMachine.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
