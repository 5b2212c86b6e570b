"""Schedulers over groups of several kinds: the tokens a request has alone, whatever the other groups give up."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from hardpoint.interfaces import (
    Feature,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MambaCacheMode,
    RequestView,
    SchedulerExtension,
    spec_to_wire,
)
from hardpoint.testing import FakeWorker
from hardpoint.testing.fake_worker import ScriptedDrafter
from hardpoint.testing.scheduler_loop import SchedulerLoop
from hardpoint_scheduling.schedulers.request import LiveRequest
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from kv_support import chunked, cross, encoder_only, full, latent, state, window
from sched_support import BLOCK, Loop, answer, expected, limits, make_scheduler, request

KINDS: dict[str, KVCacheSpec] = {
    "window": window(6),
    "short window": window(2, 8),
    "chunks": chunked(8),
    "latent": latent(8),
    "running state": state(MambaCacheMode.NONE),
    "state per block": state(MambaCacheMode.ALL, 8),
    "aligned state": state(MambaCacheMode.ALIGN, 8),
    "encoder only": encoder_only(),
}


def hybrid_loop(num_blocks: int, *others: KVCacheSpec, **limits: Any) -> Loop:
    """The fake worker reads the first group, which keeps every token."""
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate((full(), *others)))
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())
    worker = FakeWorker(block_size=BLOCK)
    worker.initialize_kv_cache(config)
    return Loop(make_scheduler(kv_cache=config, **limits), worker)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("num_blocks", [pytest.param(60, marks=pytest.mark.slow), 22])
def test_tokens_do_not_depend_on_other_groups(kind: str, num_blocks: int) -> None:
    """I3.8, R3.92: sharing, eviction and preemption in two groups at once."""
    # With layers that see what comes behind, all that a request has is computed in one step.
    loop = hybrid_loop(num_blocks, KINDS[kind], max_num_batched_tokens=40 if kind == "encoder only" else 12)
    prompts = {f"r{i}": [*range(3, 3 + 3 * i), 60 + i % 2] for i in range(8)}
    for name, prompt in prompts.items():
        loop.scheduler.add(request(name, prompt, max_tokens=12))
    loop.run()
    for name, prompt in prompts.items():
        assert loop.tokens(name) == expected(prompt, 12)
    stats = loop.scheduler.stats()
    assert stats.num_free_blocks == stats.num_total_blocks
    assert stats.num_preemptions > 0 or num_blocks == 60 or kind != "latent"


@pytest.mark.parametrize("kind", ["window", "chunks", "latent", "state per block", "aligned state"])
def test_a_later_request_finds_what_an_earlier_one_left_in_every_group(kind: str) -> None:
    """R3.92, R1.33: chunks end where states can be found, so that the second request skips whole blocks of both."""
    loop = hybrid_loop(80, KINDS[kind], max_num_batched_tokens=64)
    prompt = [*range(3, 33)]
    for name in ("first", "second"):
        loop.scheduler.add(request(name, prompt, max_tokens=3))
        loop.run()
        assert loop.tokens(name) == expected(prompt, 3)
    assert loop.scheduler.stats().prefix_cache_hits >= 24


@pytest.mark.parametrize("kind", ["running state", "aligned state"])
@pytest.mark.parametrize("is_on", [True, False])
def test_what_rules_prefixes_out_is_said_at_the_start(kind: str, is_on: bool, caplog: pytest.LogCaptureFixture) -> None:
    """R1.33: a running state is that of the last token, so nothing is found although the operator asked for it."""
    with caplog.at_level("INFO", "hardpoint.plugin"):
        hybrid_loop(80, KINDS[kind], prefix_caching=is_on)
    is_ruled_out = is_on and kind == "running state"
    assert any("every prompt will be computed" in message for message in caplog.messages) == is_ruled_out


def test_states_are_shared_from_the_next_step_on_only() -> None:
    """A state is complete after its step, keys and values are there for every row of it."""
    for kind, shared in (("latent", 24), ("aligned state", 0)):
        loop = hybrid_loop(80, KINDS[kind], max_num_batched_tokens=64)
        for name in ("first", "second"):
            loop.scheduler.add(request(name, range(3, 33), max_tokens=3))
        loop.run()
        assert loop.scheduler.stats().prefix_cache_hits == shared


def test_windows_let_a_sequence_outgrow_the_pool() -> None:
    """R1.34, R3.77: 60 tokens in windowed layers alone, in a pool for 16 of them and one step's."""
    config = KVCacheConfig(num_blocks=9, groups=(KVCacheGroup(("layers.0",), spec_to_wire(window(8))),), tensors=())
    scheduler = make_scheduler(kv_cache=config, max_num_batched_tokens=16)
    assert scheduler._state.kv.largest_sequence == 64
    worker = FakeWorker(block_size=BLOCK)
    worker.initialize_kv_cache(config)
    scheduler.add(request("a", range(3, 43), max_tokens=20))
    steps = 0
    while scheduler.has_work() and steps < 100:
        step = scheduler.schedule()
        tables = scheduler._state.kv.block_ids("a")[0] if scheduler._state.running.requests else ()
        assert sum(map(bool, tables)) <= 7
        scheduler.update(step, answer(step))
        scheduler.check_integrity()
        steps += 1
    assert not scheduler.has_work()


def test_encoder_outputs_have_blocks_of_their_own() -> None:
    """R1.34, R3.70: 7 and 17 tokens of an encoder in blocks of 4; more than the model takes is refused at once."""
    loop = hybrid_loop(40, cross(20), max_num_batched_tokens=64)
    for name, length in (("a", 7), ("b", 17), ("c", 21)):
        feature = Feature(modality="audio", content_hash=name, offset=1, length=length)
        refused = loop.scheduler.add(request(name, range(3, 33), max_tokens=4, features=(feature,)))
        assert (refused is not None) == (name == "c")
    assert refused is not None
    assert refused.error == "21 encoder tokens were given, the model takes at most 20"
    loop.step()
    kv = loop.scheduler._state.kv
    assert [len(kv.block_ids(name)[1]) for name in "ab"] == [2, 5]
    loop.run()
    for name in "ab":
        assert loop.tokens(name) == expected(range(3, 33), 4)
    assert loop.scheduler.stats().num_free_blocks == 39


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize(("depth", "checkpoints"), [(1, 0), (2, 0), (3, 0), (3, 1)])
@pytest.mark.parametrize(("size", "budget"), [(1, 2), (4, 7)])
def test_steps_in_flight_never_outgrow_a_pool_for_one_sequence(
    size: int, budget: int, depth: int, checkpoints: int, caching: bool
) -> None:
    """R1.33, R1.35, R3.50: a request that outgrows the pool only because of its own steps in flight waits for them."""
    specs = (full(), state(MambaCacheMode.ALIGN, size, checkpoints=checkpoints))
    num_blocks = 1 + sum(spec.max_blocks(12, budget * depth) for spec in specs)
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate(specs))
    shape: dict[str, Any] = {"max_inflight_steps": depth, "max_num_batched_tokens": budget, "max_model_len": 12}
    scheduler = make_scheduler(
        kv_cache=KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=()), prefix_caching=caching, **shape
    )
    loop = SchedulerLoop(scheduler, limits(**shape), num_blocks, depth, FakeWorker(block_size=BLOCK))
    loop.add(request("alone", range(3, 10), max_tokens=5))
    finish_within(loop, 60)
    assert loop.tokens["alone"] == expected(range(3, 10), 5)
    assert scheduler.stats().num_preemptions == 0
    for i in range(2):
        loop.add(request(f"r{i}", range(30 + 20 * i, 37 + 20 * i), max_tokens=5))
    finish_within(loop, 150)
    assert [loop.tokens[f"r{i}"] for i in range(2)] == [expected(range(30 + 20 * i, 37 + 20 * i), 5) for i in range(2)]
    assert scheduler.stats().num_free_blocks == num_blocks - 1


def finish_within(loop: SchedulerLoop, most: int) -> None:
    for _ in range(most):
        if not loop.pipeline.has_work():
            return
        loop.advance()
    raise AssertionError(f"not done after {most} steps")


def test_a_request_that_waits_for_its_own_steps_keeps_its_blocks_to_itself() -> None:
    """R3.50, R3.77: nobody is admitted to the blocks it is about to give up and take."""
    config = KVCacheConfig(
        num_blocks=4, groups=(KVCacheGroup(("layers.0",), spec_to_wire(state(MambaCacheMode.ALIGN, 1))),), tensors=()
    )
    scheduler = make_scheduler(kv_cache=config, max_inflight_steps=3, max_num_batched_tokens=1, prefix_caching=False)
    scheduler.add(request("a", range(3, 10)))
    steps = [scheduler.schedule() for _ in range(3)]
    assert [step.num_tokens for step in steps] == [1, 1, 1]
    scheduler.add(request("b", [4]))
    waits = scheduler.schedule()
    assert waits.is_empty
    assert not len(waits.preempted_slots)
    for step in steps[:2]:
        scheduler.update(step, answer(step))
    assert scheduler.schedule().num_computed_tokens.tolist() == [3]
    scheduler.check_integrity()


class Speculator(SchedulerExtension):
    """Says that the worker has three guesses after each sample."""

    name = "speculator"
    drafts_on_worker = True

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return 3


@pytest.mark.parametrize("on_worker", [False, True])
@pytest.mark.parametrize("depth", [1, 2])
@pytest.mark.parametrize("mode", [MambaCacheMode.ALIGN, pytest.param(MambaCacheMode.ALL, marks=pytest.mark.slow)])
def test_states_after_guesses_have_their_positions(mode: MambaCacheMode, depth: int, on_worker: bool) -> None:
    """R1.33, R3.52, I3.8: three guesses per step, none to all of them right, blocks of 8 tokens."""
    groups = tuple(
        KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate((full(), state(mode, 8, drafts=3)))
    )
    config = KVCacheConfig(num_blocks=50, groups=groups, tensors=())
    extensions = (Speculator(),) if on_worker else ()
    scheduler = make_scheduler(kv_cache=config, max_inflight_steps=depth, extensions=extensions)
    worker = FakeWorker(block_size=BLOCK, drafter=ScriptedDrafter(3, (3, 1, 0, 2)), keeps_drafts=on_worker)
    loop = SchedulerLoop(scheduler, limits(max_inflight_steps=depth), 50, depth, worker)
    prompts = {f"r{i}": [*range(3, 10 + 5 * i), 60 + i % 2] for i in range(5)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt, max_tokens=25))
    for _ in range(400):
        if not loop.pipeline.has_work():
            break
        loop.advance()
        for live in scheduler._state.running.requests:
            check_states(scheduler, live, depth)
    for name, prompt in prompts.items():
        assert loop.tokens[name] == expected(prompt, 25)
    assert scheduler.stats().num_free_blocks == 49


def check_states(scheduler: BatchScheduler, live: LiveRequest, depth: int) -> None:
    """The next token's state, that it starts from, and those of the guesses behind it have blocks."""
    table = scheduler._state.kv.block_ids(live.request_id)[1]
    if depth > 1 or not live.num_computed_tokens:
        return
    start = (live.num_computed_tokens - 1) // 8
    assert table[start], f"{live.request_id} starts from a state that is gone"
    assert all(table[start:]), f"{live.request_id} has gaps behind its state"


SPECS = st.one_of(
    st.builds(window, st.integers(1, 20), st.sampled_from([4, 8])),
    st.builds(lambda n, size: chunked(n * size, size), st.integers(1, 3), st.sampled_from([4, 8])),
    st.builds(state, st.sampled_from(MambaCacheMode), st.just(8), st.just(3), st.integers(0, 1)),
    st.builds(latent, st.sampled_from([4, 8])),
)
SHAPES = st.lists(
    st.tuples(st.integers(0, 1), st.integers(1, 30), st.integers(1, 14), st.integers(0, 4)), min_size=1, max_size=8
)


@pytest.mark.slow
@pytest.mark.timeout(900)
@settings(max_examples=400, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    others=st.lists(SPECS, min_size=1, max_size=3),
    extra=st.integers(0, 30),
    depth=st.integers(1, 3),
    budget=st.integers(1, 20),
    shapes=SHAPES,
    right=st.sampled_from([(), (3, 1, 0, 2)]),
    on_worker=st.booleans(),
    whole=st.booleans(),
)
def test_any_groups_any_budget_any_depth(
    others: list[KVCacheSpec],
    extra: int,
    depth: int,
    budget: int,
    shapes: list[tuple[int, int, int, int]],
    right: tuple[int, ...],
    on_worker: bool,
    whole: bool,
) -> None:
    """I3.8, I3.5, R1.35: from pools for one sequence on, all requests end with the tokens they get alone."""
    specs = (full(), *others)
    depths: dict[str, Any] = {"max_inflight_steps": depth, "max_num_batched_tokens": budget, "max_model_len": 48}
    depths["full_sequence_must_fit"] = whole
    extensions = (Speculator(),) if right and on_worker else ()
    in_flight = min((depth + len(extensions)) * budget, 48)
    num_blocks = 1 + extra + sum(spec.max_blocks(48, in_flight) for spec in specs)
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate(specs))
    config = KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=())
    scheduler = make_scheduler(kv_cache=config, extensions=extensions, **depths)
    drafter = ScriptedDrafter(3, right) if right else None
    worker = FakeWorker(block_size=BLOCK, drafter=drafter, keeps_drafts=on_worker and drafter is not None)
    loop = SchedulerLoop(scheduler, limits(**depths), num_blocks, depth, worker)
    wanted = {}
    for i, (family, length, count, delay) in enumerate(shapes):
        for _ in range(delay):
            loop.advance()
        prompt = [3 + (family * 31 + j) % 90 for j in range(length)]
        if loop.add(request(f"r{i}", prompt, count)) is None:
            wanted[f"r{i}"] = expected(prompt, count)
    for _ in range(3_000):
        if not loop.pipeline.has_work():
            break
        loop.advance()
    assert {name: loop.tokens[name] for name in wanted} == wanted
    assert scheduler.stats().num_free_blocks == num_blocks - 1
