"""The scheduler as a state machine over the fake worker, whose tokens are a function of the KV it reads (I3.1-I3.8)."""

from __future__ import annotations

from collections import deque
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from hardpoint.interfaces import (
    EngineOutput,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    PauseMode,
    RequestView,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
    spec_to_wire,
)
from hardpoint.testing import FakeWorker
from hardpoint.testing.fake_worker import ScriptedDrafter
from hardpoint_scheduling.schedulers.factories import create_fcfs, create_priority
from hardpoint_scheduling.schedulers.integrity import check_state
from kv_support import window
from sched_support import BLOCK, expected, make_loop, make_scheduler, prompt_families, request, spec

CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(3, 24),
        "max_num_seqs": st.integers(1, 5),
        "max_num_batched_tokens": st.integers(1, 24),
        "prefix_caching": st.booleans(),
        "full_sequence_must_fit": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.2]),
        "long_prefill_threshold": st.sampled_from([0, 3]),
        "max_model_len": st.just(64),
        "max_inflight_steps": st.integers(1, 4),
        "create": st.sampled_from([create_fcfs, create_priority]),
    }
)
# Beside the group that the worker reads: blocks of another size, and a window that gives blocks up on the way.
GROUPS: st.SearchStrategy[tuple[KVCacheSpec, ...]] = st.sampled_from([(), (spec(2 * BLOCK),), (window(6),)])
# How many of up to three guesses are right, by the length of the sequence; nothing: no drafts.
DRAFTS: st.SearchStrategy[list[int]] = st.one_of(st.just([]), st.lists(st.integers(0, 3), min_size=1, max_size=5))
PROMPTS = prompt_families(24)


class Speculator(SchedulerExtension):
    """Says that the worker has three guesses after each sample, whoever sees them."""

    name = "speculator"
    drafts_on_worker = True

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return 3


class Store(SchedulerExtension):
    """A connector that asks for nothing: blocks of ended requests still wait for the steps that write them (R3.85)."""

    name = "store"

    def may_free(self, request: RequestView) -> bool:
        return True


class SchedulerMachine(RuleBasedStateMachine):
    """Random adds, aborts, pauses, resets and steps; several steps may be under way while other things happen."""

    @initialize(config=CONFIGS, others=GROUPS, right=DRAFTS, on_worker=st.booleans(), store=st.booleans())
    def start(
        self, config: dict[str, Any], others: tuple[KVCacheSpec, ...], right: list[int], on_worker: bool, store: bool
    ) -> None:
        self.config = config
        specs = (spec(), *others)
        kv_cache = KVCacheConfig(
            num_blocks=config["num_blocks"] + 8 * len(others),
            groups=tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(of_group)) for i, of_group in enumerate(specs)),
            tensors=(),
        )
        extensions = (*((Speculator(),) if right and on_worker else ()), *((Store(),) if store else ()))
        self.scheduler = make_scheduler(**config, extensions=extensions, kv_cache=kv_cache)
        drafter = ScriptedDrafter(3, right) if right else None
        self.worker = FakeWorker(block_size=BLOCK, drafter=drafter, keeps_drafts=on_worker)
        self.worker.initialize_kv_cache(kv_cache)
        self.under_way: deque[tuple[SchedulerOutput, RunnerOutput]] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}

    @rule(prompt=PROMPTS, max_tokens=st.integers(1, 10), priority=st.integers(0, 2))
    def add(self, prompt: list[int], max_tokens: int, priority: int) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.tokens[name] = prompt, []
        refused = self.scheduler.add(request(name, prompt, max_tokens, priority=priority))
        capacity = self.scheduler._state.kv.largest_sequence
        assert (refused is not None) == (len(prompt) > min(capacity, 63))
        if refused is not None:
            self.collect([refused])

    @precondition(lambda self: self.under_way)
    @rule()
    def update(self) -> None:
        step, output = self.under_way.popleft()
        self.collect(self.scheduler.update(step, output))

    @precondition(lambda self: len(self.under_way) < self.config["max_inflight_steps"])
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        self.check_step(step)
        output = self.worker.execute(step)
        assert isinstance(output, RunnerOutput)
        self.under_way.append((step, output))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        names = data.draw(st.lists(st.sampled_from(sorted(self.prompts)), min_size=1, max_size=3))
        live = set(self.scheduler.live_request_ids())
        ended = self.scheduler.finish(names, FinishReason.ABORT)
        assert {output.request_id for output in ended} == set(names) & live
        self.collect(ended)

    @precondition(lambda self: self.scheduler._state.running.requests)
    @rule(data=st.data(), drop=st.booleans())
    def preempt(self, data: st.DataObject, drop: bool) -> None:
        """R3.78-R3.80, whoever it is and whatever is in flight, if its blocks can be had now (R3.49)."""
        victim = data.draw(st.sampled_from(self.scheduler._state.running.requests))
        if self.scheduler._lifecycle.can_preempt(victim):
            self.scheduler._lifecycle.preempt(victim, drop_stale=drop)

    @rule(mode=st.sampled_from([PauseMode.NONE, PauseMode.NONE, *PauseMode]))
    def pause(self, mode: PauseMode) -> None:
        self.scheduler.set_pause(mode)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        """R3.22."""
        done = self.scheduler.reset_prefix_cache(running)
        assert done or not running or self.scheduler._state.fences.enabled
        if done:
            assert self.scheduler._state.kv.pool.num_cached == 0

    @invariant()
    def state_is_sound(self) -> None:
        self.scheduler.check_integrity()
        assert set(self.scheduler.live_request_ids()) == set(self.prompts) - set(self.ends)

    @invariant()
    def shared_blocks_hold_the_same_prefix(self) -> None:
        """I3.2: a block of two requests holds tokens that both know, and the same ones."""
        owners: dict[int, list[int]] = {}
        for live in self.scheduler._state.running.requests:
            for position, block in enumerate(self.scheduler._state.kv.block_ids(live.request_id)[0]):
                prefix = list(live.token_ids[: (position + 1) * BLOCK])
                assert owners.setdefault(block, prefix) == prefix
                if self.scheduler._state.kv.pool.references(block) > 1:
                    assert len(prefix) == (position + 1) * BLOCK

    def check_step(self, step: SchedulerOutput) -> None:
        """I3.4."""
        assert step.num_tokens <= self.config["max_num_batched_tokens"]
        assert step.num_rows <= self.config["max_num_seqs"]
        if step.num_rows:
            assert int(step.num_scheduled_tokens.min()) > 0

    def collect(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the terminal one"
            self.tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def teardown(self) -> None:
        """I3.5, I3.6, I3.8."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.set_pause(PauseMode.NONE)
        for _ in range(5_000):
            if not self.scheduler.has_work():
                break
            while len(self.under_way) < self.config["max_inflight_steps"]:
                self.schedule()
            self.update()
            self.scheduler.check_integrity()
        while self.under_way:
            self.update()
        self.schedule()
        assert set(self.ends) == set(self.prompts), "a request never ended"
        for name, prompt in self.prompts.items():
            assert self.tokens[name] == expected(prompt, len(self.tokens[name]))
        stats = self.scheduler.stats()
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_total_blocks, 0, 0)
        assert not self.worker.slots
        assert self.scheduler.reset_prefix_cache()
        self.scheduler.check_integrity()


TestSchedulerMachine = SchedulerMachine.TestCase
TestSchedulerMachine.settings = settings(max_examples=30, stateful_step_count=30, deadline=None)


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_ten_thousand_sequences() -> None:
    """I3.1-I3.8."""
    run_state_machine_as_test(
        SchedulerMachine,
        settings=settings(
            max_examples=10_000, stateful_step_count=24, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )


@settings(max_examples=60, deadline=None)
@given(
    CONFIGS, st.lists(st.tuples(PROMPTS, st.integers(1, 12), st.integers(0, 6)), min_size=1, max_size=8), st.booleans()
)
def test_tokens_do_not_depend_on_budgets_caching_or_neighbors(
    config: dict[str, Any], shapes: list[tuple[list[int], int, int]], chunked: bool
) -> None:
    """I3.8: any chunking, pool size, sharing and order of arrival give the tokens a request has alone."""
    if not chunked:
        config = {**config, "chunked_prefill": False, "max_num_batched_tokens": 64}
    loop = make_loop(**config)
    capacity = min(64, (config["num_blocks"] - 1) * BLOCK + 1)
    wanted = {}
    for i, (prompt, count, delay) in enumerate(shapes):
        for _ in range(delay):
            loop.step()
        if loop.scheduler.add(request(f"r{i}", prompt, count)) is None:
            wanted[f"r{i}"] = expected(prompt, min(count, capacity - len(prompt)))
    loop.run()
    assert {name: loop.tokens(name) for name in wanted} == wanted
    assert all(len(loop.ends(name)) == 1 for name in wanted)
    assert loop.scheduler.stats().num_free_blocks == config["num_blocks"] - 1


def test_forced_preemption_in_every_step_changes_no_token() -> None:
    """I3.8, R3.78."""
    for caching in (True, False):
        loop = make_loop(num_blocks=40, prefix_caching=caching, max_num_batched_tokens=64)
        prompts = {f"r{i}": [*range(3, 3 + 3 * i), 60 + i] for i in range(4)}
        for name, prompt in prompts.items():
            loop.scheduler.add(request(name, prompt, max_tokens=6))
        for _ in range(300):
            loop.step()
            running = loop.scheduler._state.running.requests
            if len(running) > 1:
                loop.scheduler._lifecycle.preempt(running[-1])
                loop.scheduler.check_integrity()
        assert not loop.scheduler.has_work()
        assert loop.scheduler.stats().num_preemptions > 4
        for name, prompt in prompts.items():
            assert loop.tokens(name) == expected(prompt, 6)


def test_a_thousand_requests_leave_nothing_behind() -> None:
    loop = make_loop(num_blocks=30, max_num_seqs=8, max_num_batched_tokens=32)
    for i in range(1_000):
        loop.scheduler.add(request(f"r{i}", [*range(3, 3 + i % 11), 3 + i % 7], max_tokens=1 + i % 5))
    loop.run(most=20_000)
    assert all(len(loop.ends(f"r{i}")) == 1 for i in range(1_000))
    assert loop.scheduler.stats().num_free_blocks == 29
    assert not loop.worker.slots


def test_integrity_finds_what_is_broken() -> None:
    def broken() -> Any:
        loop = make_loop()
        loop.scheduler.add(request("a", range(3, 13)))
        loop.scheduler.add(request("w", range(3, 13)))
        loop.step()
        return loop.scheduler._state

    state = broken()
    state.table.num_tokens[0] += 1
    with pytest.raises(RuntimeError, match="tokens counted"):
        check_state(state)
    state = broken()
    state.table.capacity[0] += 4
    with pytest.raises(RuntimeError, match="does not match its blocks"):
        check_state(state)
    state = broken()
    del state.live["a"]
    with pytest.raises(RuntimeError, match="differ"):
        check_state(state)
    state = broken()
    state.kv.free("a")
    with pytest.raises(RuntimeError, match="capacity|held"):
        check_state(state)
    state = broken()
    state.kv.pool.allocate(1)
    with pytest.raises(RuntimeError, match="1 references, but 0 tables"):
        check_state(state)
    state = broken()
    state.fences.defer("w")
    with pytest.raises(RuntimeError, match="held by|wait for a step"):
        check_state(state)
