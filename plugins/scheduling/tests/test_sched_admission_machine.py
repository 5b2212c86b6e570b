"""Admission as a state machine: gates, loads from elsewhere, media and policies, with several steps under way.

Steps are executed only when their results are taken, and loads write when they end, so a block that is reused too early
shows in the tokens.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import pytest
from hypothesis import HealthCheck, settings
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
    ENCODER_INPUTS,
    EncoderInputs,
    EngineOutput,
    ExternalMatch,
    Feature,
    FinishReason,
    LoadResult,
    PauseMode,
    RequestView,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
    SchedulingPolicy,
    WaitReason,
)
from hardpoint.testing import FakeWorker
from hardpoint_scheduling.schedulers.factories import build_scheduler
from hardpoint_scheduling.schedulers.policies.fair_share import FairShareOptions, FairSharePolicy
from hardpoint_scheduling.schedulers.policies.fcfs import FcfsPolicy
from hardpoint_scheduling.schedulers.policies.priority import PriorityPolicy
from sched_support import BLOCK, expected, kv_config, make_scheduler, prompt_families, request

POLICIES: list[Callable[[], SchedulingPolicy]] = [
    FcfsPolicy,
    PriorityPolicy,
    lambda: FairSharePolicy(FairShareOptions(weights={"t0": 3.0})),
]
CONFIGS = st.fixed_dictionaries(
    {
        "num_blocks": st.integers(8, 20),
        "max_num_seqs": st.integers(1, 4),
        "max_num_batched_tokens": st.integers(3, 24),
        "prefix_caching": st.booleans(),
        "full_sequence_must_fit": st.booleans(),
        "watermark": st.sampled_from([0.0, 0.2]),
        "long_prefill_threshold": st.sampled_from([0, 3]),
        "adaptive_prefill_threshold": st.booleans(),
        "prefill_interval": st.sampled_from([1, 3]),
        "max_inflight_steps": st.integers(1, 3),
        "max_model_len": st.just(28),
        "encoder_budget": st.sampled_from([0, 3, 8]),
    }
)
PROMPTS = prompt_families(16)


class Gates(SchedulerExtension):
    """Holds back whom the machine says, for changing reasons."""

    name = "gates"

    def __init__(self) -> None:
        self.closed: set[str] = set()

    def is_blocked(self, request: RequestView) -> bool:
        return request.request_id in self.closed


class Store(SchedulerExtension):
    """Has the KV of some prompts; a transfer writes the blocks when the machine lets it end."""

    name = "store"

    def __init__(self, worker: FakeWorker) -> None:
        self.worker = worker
        self.has: dict[str, int] = {}
        self.local: dict[str, int] = {}
        self.loads: dict[str, tuple[RequestView, list[int], int, int]] = {}
        self.results: list[LoadResult] = []

    def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
        self.local[request.request_id] = num_local_tokens
        more = min(self.has.get(request.request_id, 0), request.num_prompt_tokens) - num_local_tokens
        return ExternalMatch(max(more, 0), asynchronous=True)

    def after_allocation(self, request: RequestView, block_ids: Sequence[Sequence[int]], num_external: int) -> None:
        if num_external:
            name = request.request_id
            assert name not in self.loads, "a second load of the same request"
            self.loads[name] = request, list(block_ids[0]), self.local[name], num_external

    def finish(self, name: str, num_tokens: int, error: str | None) -> None:
        view, blocks, local, num_external = self.loads.pop(name)
        num_tokens = min(num_tokens, num_external)
        for position in range(local, local + num_tokens):
            self.worker.kv[blocks[position // BLOCK], position % BLOCK] = view.record.prompt_token_ids[position]
        self.results.append(LoadResult(name, num_tokens, error))

    def take_loaded(self) -> Iterable[LoadResult]:
        taken, self.results = self.results, []
        return taken


class AdmissionMachine(RuleBasedStateMachine):
    @initialize(config=CONFIGS, policy=st.sampled_from(POLICIES), reason=st.sampled_from(list(WaitReason)))
    def start(self, config: dict[str, Any], policy: Callable[[], SchedulingPolicy], reason: WaitReason) -> None:
        self.config = {**config, "encoder_cache_size": config["encoder_budget"]}
        self.worker = FakeWorker(block_size=BLOCK)
        self.worker.initialize_kv_cache(kv_config(config["num_blocks"]))
        self.gates, self.store = Gates(), Store(self.worker)
        self.gates.wait_reason = reason
        self.scheduler = make_scheduler(
            create=lambda ctx, options: build_scheduler(ctx, policy(), options, lambda: 0.0),
            extensions=(self.gates, self.store),
            **self.config,
        )
        self.under_way: deque[SchedulerOutput] = deque()
        self.prompts: dict[str, list[int]] = {}
        self.wanted: dict[str, int] = {}
        self.tokens: dict[str, list[int]] = {}
        self.ends: dict[str, EngineOutput] = {}
        self.outputs_kept: set[str] = set()
        self.names: dict[tuple[int, int], str] = {}

    @rule(
        prompt=PROMPTS,
        max_tokens=st.integers(1, 6),
        priority=st.integers(0, 2),
        remote=st.sampled_from([0, 0, 5, 40]),
        blocked=st.booleans(),
        media=st.lists(st.integers(0, 2), max_size=3),
    )
    def add(
        self, prompt: list[int], max_tokens: int, priority: int, remote: int, blocked: bool, media: list[int]
    ) -> None:
        name = f"r{len(self.prompts)}"
        self.prompts[name], self.wanted[name], self.tokens[name] = prompt, max_tokens, []
        self.store.has[name] = remote
        if blocked:
            self.gates.closed.add(name)
        features = tuple(
            Feature(modality="image", content_hash=f"c{content}", offset=5 * i, length=3)
            for i, content in enumerate(media)
            if 5 * i + 3 <= len(prompt)
        )
        made = request(
            name,
            prompt,
            max_tokens,
            priority=priority,
            tenant=f"t{priority}",
            features=features,
            arrival_time=len(name),
        )
        refused = self.scheduler.add(made)
        assert (refused is not None) == (len(prompt) >= 28 or len(prompt) > (self.config["num_blocks"] - 1) * BLOCK)

    @precondition(lambda self: len(self.under_way) < self.config["max_inflight_steps"])
    @rule()
    def schedule(self) -> None:
        step = self.scheduler.schedule()
        assert step.num_tokens <= self.config["max_num_batched_tokens"]
        assert step.num_rows <= self.config["max_num_seqs"]
        self.check_encoder(step)
        if step.must_execute:
            self.under_way.append(step)
        else:
            self.collect(self.scheduler.take_outputs())

    @precondition(lambda self: self.under_way)
    @rule()
    def update(self) -> None:
        step = self.under_way.popleft()
        output = self.worker.execute(step)
        assert isinstance(output, RunnerOutput)
        self.collect(self.scheduler.update(step, output))

    @precondition(lambda self: self.prompts)
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(sorted(self.prompts)))
        self.collect(self.scheduler.finish([name], FinishReason.ABORT))

    @precondition(lambda self: self.gates.closed)
    @rule(data=st.data())
    def open(self, data: st.DataObject) -> None:
        self.gates.closed.discard(data.draw(st.sampled_from(sorted(self.gates.closed))))

    @precondition(lambda self: self.store.loads)
    @rule(data=st.data(), num_tokens=st.sampled_from([0, 3, 40, 40]), fails=st.sampled_from([False, False, True]))
    def end_load(self, data: st.DataObject, num_tokens: int, fails: bool) -> None:
        name = data.draw(st.sampled_from(sorted(self.store.loads)))
        self.store.finish(name, num_tokens, "lost" if fails else None)

    @precondition(lambda self: self.scheduler._state.running.requests)
    @rule(data=st.data())
    def preempt(self, data: st.DataObject) -> None:
        victim = data.draw(st.sampled_from(self.scheduler._state.running.requests))
        if self.scheduler._lifecycle.can_preempt(victim):
            self.scheduler._lifecycle.preempt(victim)

    @rule(mode=st.sampled_from([PauseMode.NONE, PauseMode.NONE, *PauseMode]))
    def pause(self, mode: PauseMode) -> None:
        self.scheduler.set_pause(mode)

    @rule(running=st.booleans())
    def reset(self, running: bool) -> None:
        self.scheduler.reset_prefix_cache(running)

    @invariant()
    def state_is_sound(self) -> None:
        """I3.1, I3.4, I3.5."""
        self.scheduler.check_integrity()
        undelivered = {output.request_id for output in self.scheduler._state.ended}
        assert set(self.scheduler.live_request_ids()) == (
            set(self.prompts) - set(self.ends) - undelivered - self.refused()
        )
        encoder = self.scheduler._state.encoder
        if encoder is not None:
            encoder.cache.check_integrity()

    def refused(self) -> set[str]:
        room = (self.config["num_blocks"] - 1) * BLOCK
        return {name for name, prompt in self.prompts.items() if len(prompt) >= 28 or len(prompt) > room}

    def check_encoder(self, step: SchedulerOutput) -> None:
        """R3.46: each item's output is there, or encoded, in every step that computes one of its positions."""
        if not self.config["encoder_budget"]:
            return
        inputs = step.extensions.get(ENCODER_INPUTS, EncoderInputs(step.slots[:0], step.slots[:0]))
        self.outputs_kept -= set(inputs.freed)
        rows = [self.scheduler._state.table.owner[slot] for slot in step.slots.tolist()]
        spent = 0
        for row, place in zip(inputs.rows.tolist(), inputs.features.tolist(), strict=True):
            live = rows[row]
            assert live is not None
            feature = live.record.features[place]
            assert feature.content_hash not in self.outputs_kept, "an output is encoded again while it is there"
            self.outputs_kept.add(feature.content_hash)
            spent += feature.length
        assert spent <= self.config["encoder_budget"]
        assert 3 * len(self.outputs_kept) <= self.config["encoder_cache_size"]
        starts, counts = step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()
        for live, start, count in zip(rows, starts, counts, strict=True):
            for feature in live.record.features if live is not None else ():
                if feature.offset < start + count and feature.offset + feature.length > start:
                    assert feature.content_hash in self.outputs_kept, "positions are computed without their output"

    def collect(self, outputs: list[EngineOutput]) -> None:
        for output in outputs:
            assert output.request_id not in self.ends, "an output after the terminal one"
            self.tokens[output.request_id].extend(output.new_token_ids)
            if output.finish_reason is not None:
                self.ends[output.request_id] = output

    def teardown(self) -> None:
        """I3.5, I3.8: whoever is not aborted ends, with the tokens it would have alone; nothing is left behind."""
        if not hasattr(self, "scheduler"):
            return
        self.scheduler.set_pause(PauseMode.NONE)
        self.gates.closed.clear()
        for _ in range(3_000):
            if not self.scheduler.has_work() and not self.under_way and not self.store.loads:
                break
            for name in list(self.store.loads):
                self.store.finish(name, 40, None)
            while len(self.under_way) < self.config["max_inflight_steps"]:
                before = len(self.under_way)
                self.schedule()
                if len(self.under_way) == before:
                    break
            if self.under_way:
                self.update()
            self.state_is_sound()
        self.scheduler.schedule()
        assert set(self.ends) | self.refused() == set(self.prompts), "a request never ended"
        room = min(28, (self.config["num_blocks"] - 1) * BLOCK + 1)
        for name, end in self.ends.items():
            prompt, got = self.prompts[name], self.tokens[name]
            count = min(self.wanted[name], room - len(prompt))
            assert got == expected(prompt, len(got))
            if end.finish_reason not in (FinishReason.ABORT, FinishReason.ERROR):
                assert len(got) == count
        stats = self.scheduler.stats()
        assert (stats.num_free_blocks, stats.num_running, stats.num_waiting) == (stats.num_total_blocks, 0, 0)
        assert self.scheduler.reset_prefix_cache()


AdmissionMachine.TestCase.settings = settings(
    max_examples=12, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
)
TestAdmissionMachine = AdmissionMachine.TestCase


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_admission_for_long() -> None:
    """I3.1, I3.4, I3.5, I3.7, I3.8, P3.4."""
    run_state_machine_as_test(
        AdmissionMachine,
        settings=settings(
            max_examples=4_000, stateful_step_count=30, deadline=None, suppress_health_check=list(HealthCheck)
        ),
    )
