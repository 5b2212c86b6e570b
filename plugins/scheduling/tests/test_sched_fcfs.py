"""FCFS scheduler step by step: budgets, admission, preemption, prefix cache (spec 03)."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import ConfigError, OverloadedError, PluginNotFoundError
from hardpoint.interfaces import EngineOutput, FinishReason, PauseMode, SchedulerContext
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint_scheduling.schedulers.factories import BatchOptions, create_fcfs
from sched_support import BLOCK, answer, expected, kv_config, limits, make_loop, make_scheduler, request

PROMPT = list(range(3, 13))


def finish_reasons(outputs: list[EngineOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


# Budgets and thresholds


def test_prefill_and_decode_share_one_budget_running_first() -> None:
    """R3.30, R3.31, R3.40, I3.4."""
    loop = make_loop(max_num_batched_tokens=12)
    loop.scheduler.add(request("a", PROMPT))
    loop.step()
    loop.scheduler.add(request("b", [50, *PROMPT, *PROMPT]))
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [1, 11]
    assert step.samples.tolist() == [True, False]
    step = loop.step()
    assert step.num_scheduled_tokens.tolist() == [1, 10]
    assert step.samples.tolist() == [True, True]
    assert not step.new_rows


def test_the_budget_cuts_running_rows_from_the_tail() -> None:
    """R3.45: in order, nobody is skipped for a later one."""
    scheduler = make_scheduler(max_num_batched_tokens=16)
    for i in range(4):
        scheduler.add(request(f"r{i}", [40 + i, 5]))
    first = scheduler.schedule()
    assert first.num_scheduled_tokens.tolist() == [2, 2, 2, 2]
    scheduler.update(first, answer(first))
    scheduler._state.limits = limits(max_num_batched_tokens=2)
    step = scheduler.schedule()
    assert step.slots.tolist() == first.slots.tolist()[:2]
    scheduler.update(step, answer(step))
    scheduler.check_integrity()


def test_a_long_prefill_is_capped_only_while_others_wait_or_run() -> None:
    """R3.32, P3.9."""
    loop = make_loop(max_num_batched_tokens=40, long_prefill_threshold=6)
    loop.scheduler.add(request("long", range(3, 33)))
    assert loop.step().num_tokens == 30
    loop.scheduler.add(request("next", range(40, 70)))
    assert loop.step().num_scheduled_tokens.tolist() == [1, 6]


def test_without_chunking_a_prompt_waits_for_a_whole_budget() -> None:
    """R3.66."""
    loop = make_loop(chunked_prefill=False, max_num_batched_tokens=64)
    loop.scheduler.add(request("a", range(3, 43)))
    loop.scheduler.add(request("b", range(43, 83)))
    assert loop.step().num_scheduled_tokens.tolist() == [40]
    assert loop.step().num_scheduled_tokens.tolist() == [1, 40]


def test_the_active_cap_is_below_the_slot_cap() -> None:
    """R3.3, R3.61."""
    loop = make_loop(max_num_active_seqs=2)
    for i in range(4):
        loop.scheduler.add(request(f"r{i}", [5, 6, i]))
    assert loop.step().num_rows == 2
    assert loop.scheduler.stats().num_waiting == 2


# Adding


def test_what_can_never_run_ends_at_once() -> None:
    """R1.5: a prompt over the limit reports the length reason."""
    scheduler = make_scheduler(num_blocks=5, max_model_len=30)
    for prompt, max_tokens, reason in (
        (range(30), 5, FinishReason.LENGTH),
        (range(17), 5, FinishReason.LENGTH),
        ([], 5, FinishReason.ERROR),
        ([4], 0, FinishReason.LENGTH),
    ):
        output = scheduler.add(request("r", list(prompt), max_tokens))
        assert output is not None
        assert output.finish_reason is reason
        assert not scheduler.has_work()
    assert scheduler.add(request("r", range(16))) is None


def test_a_full_queue_and_a_live_id_are_refused() -> None:
    scheduler = make_scheduler(max_waiting=1, max_num_seqs=1)
    assert scheduler.add(request("a", [4])) is None
    with pytest.raises(ValueError, match="a is already live"):
        scheduler.add(request("a", [4]))
    assert scheduler.add(request("b", [4])) is None, "the free slot takes one of the two, so one waits"
    with pytest.raises(OverloadedError, match="--max-waiting allows 1"):
        scheduler.add(request("c", [4]))
    scheduler.schedule()
    with pytest.raises(OverloadedError, match="--max-waiting allows 1"):
        scheduler.add(request("c", [4]))
    assert sorted(scheduler.live_request_ids()) == ["a", "b"]


# Preemption


def test_the_last_running_request_makes_room_and_comes_back_first() -> None:
    """R3.48, R3.60, R3.78: outputs are kept, the slot is reported, nobody is admitted in that step."""
    loop = make_loop(num_blocks=8, max_num_batched_tokens=64, prefix_caching=False)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 11), max_tokens=8))
    loop.scheduler.add(request("c", range(70, 75), max_tokens=2))
    while not len(loop.step().preempted_slots):
        pass
    step = loop.steps[-1]
    assert step.preempted_slots.tolist() == [1]
    assert not step.new_rows
    assert 1 not in step.slots.tolist()
    assert loop.scheduler.stats().num_preemptions == 1
    assert loop.scheduler.stats().num_waiting == 2
    loop.run()
    resumed = [row for s in loop.steps for row in s.new_rows if row.resumed]
    assert [row.request_id for row in resumed] == ["b"]
    assert resumed[0].num_prompt_tokens == 11
    assert len(resumed[0].token_ids) > 11
    for name, prompt in (("a", range(3, 14)), ("b", range(40, 51))):
        assert loop.tokens(name) == expected(list(prompt), 8)
    assert loop.tokens("c") == expected(list(range(70, 75)), 2)


def test_room_made_for_a_running_request_is_not_given_away_in_the_same_step() -> None:
    """R3.60: a first chunk of the victim itself would fit at once, and would be thrown out again right after."""
    loop = make_loop(num_blocks=7, max_num_batched_tokens=BLOCK, prefix_caching=False)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 11), max_tokens=6))
    while not len(loop.step().preempted_slots):
        pass
    step = loop.steps[-1]
    assert loop.scheduler.stats().num_free_blocks >= 1
    assert step.num_tokens < BLOCK
    assert not step.new_rows


def test_the_request_that_needs_room_can_be_the_victim_itself() -> None:
    """R3.50."""
    loop = make_loop(num_blocks=7, max_num_batched_tokens=64, prefix_caching=False)
    loop.scheduler.add(request("a", range(3, 14), max_tokens=9))
    loop.scheduler.add(request("b", range(40, 51), max_tokens=3))
    loop.run()
    assert loop.scheduler.stats().num_preemptions >= 1
    assert loop.tokens("a") == expected(list(range(3, 14)), 9)
    assert loop.tokens("b") == expected(list(range(40, 51)), 3)


def test_a_resumed_request_adopts_what_is_left_of_its_blocks() -> None:
    """R3.66, R3.78: recompute is softened by prefix hits, and counts no second time in the statistics (R3.93)."""
    loop = make_loop(num_blocks=8, max_num_batched_tokens=64)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 11), max_tokens=8))
    loop.run()
    (resumed,) = [
        int(s.num_computed_tokens[s.slots.tolist().index(row.slot)])
        for s in loop.steps
        for row in s.new_rows
        if row.resumed
    ]
    assert resumed >= BLOCK
    stats = loop.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (22, 0)
    assert loop.outputs["b"][-1].num_cached_tokens == 0


# Admission gates


def test_the_watermark_holds_only_while_somebody_runs() -> None:
    """R3.74."""
    loop = make_loop(num_blocks=8, watermark=0.4, max_num_batched_tokens=64, prefix_caching=False)
    loop.scheduler.add(request("a", range(3, 27)))
    assert loop.step().num_rows == 1
    loop.scheduler.finish(["a"], FinishReason.ABORT)
    loop.scheduler.add(request("b", range(3, 15)))
    loop.scheduler.add(request("c", [4, 5, 6]))
    loop.scheduler.add(request("d", [4, 5, 6, 7, 8]))
    assert [row.request_id for row in loop.step().new_rows] == ["b", "c"]


def test_a_whole_sequence_can_be_required_to_fit() -> None:
    """R3.73, P3.6."""
    for must_fit, rows in ((False, 2), (True, 1)):
        loop = make_loop(num_blocks=9, full_sequence_must_fit=must_fit, max_num_batched_tokens=20, prefix_caching=False)
        loop.scheduler.add(request("a", range(3, 19)))
        loop.scheduler.add(request("b", range(40, 60)))
        assert loop.step().num_rows == rows
        loop.run()
        assert loop.tokens("b") == expected(list(range(40, 60)), 5)


def test_nothing_is_preempted_for_those_who_wait() -> None:
    """R3.67."""
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64, prefix_caching=False)
    loop.scheduler.add(request("a", range(3, 17), max_tokens=3))
    loop.step()
    loop.scheduler.add(request("b", range(3, 17), max_tokens=3))
    assert loop.step().num_rows == 1
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 0


# Prefix cache


def test_later_requests_share_full_blocks_and_say_so() -> None:
    """R3.91, R3.93."""
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT, max_tokens=1))
    loop.run()
    loop.scheduler.add(request("b", PROMPT, max_tokens=2))
    step = loop.step()
    assert step.num_computed_tokens.tolist() == [8]
    loop.run()
    assert loop.tokens("b") == expected(PROMPT, 2)
    assert [o.num_cached_tokens for o in loop.outputs["b"]] == [8, 8]
    stats = loop.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (20, 8)


def test_requests_of_one_step_share_what_the_first_computes() -> None:
    loop = make_loop(max_num_batched_tokens=64)
    prompts = {f"r{i}": [*PROMPT, 60 + i] for i in range(4)}
    for name, prompt in prompts.items():
        loop.scheduler.add(request(name, prompt))
    assert loop.step().num_scheduled_tokens.tolist() == [11, 3, 3, 3]
    loop.run()
    for name, prompt in prompts.items():
        assert loop.tokens(name) == expected(prompt, 5)


def test_outputs_are_shared_too() -> None:
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT, max_tokens=8))
    loop.run()
    follow_up = [*PROMPT, *loop.tokens("a"), 5]
    loop.scheduler.add(request("b", follow_up, max_tokens=1))
    assert loop.step().num_computed_tokens.tolist() == [16]
    assert loop.tokens("b") == expected(follow_up, 1)


def test_salts_and_switched_off_caching_share_nothing() -> None:
    for fields, salts in (({}, ("x", "y")), ({"prefix_caching": False}, (None, None))):
        loop = make_loop(**fields)
        for name, salt in zip("ab", salts, strict=True):
            loop.scheduler.add(request(name, PROMPT, cache_salt=salt))
            assert loop.step().num_computed_tokens.tolist()[-1] == 0


def test_prompt_logprobs_compute_every_position() -> None:
    """R1.11, R3.90."""
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT, max_tokens=1))
    loop.run()
    loop.scheduler.add(request("b", PROMPT, sampling={"prompt_logprobs": 0}))
    assert loop.step().num_computed_tokens.tolist() == [0]
    stats = loop.scheduler.stats()
    assert (stats.prefix_cache_queries, stats.prefix_cache_hits) == (10, 0), "who may not read asked nothing"


def test_prompt_logprobs_are_computed_once_even_if_the_request_is_preempted() -> None:
    """R1.11 holds until they are delivered; afterwards a resumed request adopts what is cached."""
    for num_steps, computed in ((1, 0), (2, BLOCK * 2)):
        loop = make_loop(max_num_batched_tokens=BLOCK * 2)
        loop.scheduler.add(request("r", PROMPT, sampling={"prompt_logprobs": 0}))
        for _ in range(num_steps):
            loop.step()
        assert len(loop.tokens("r")) == num_steps - 1
        loop.scheduler._lifecycle.preempt(loop.scheduler._state.running.requests[0])
        assert loop.step().num_computed_tokens.tolist() == [computed]
        loop.run()
        assert loop.tokens("r") == expected(PROMPT, 5)


def test_common_prefix_blocks_are_those_computed_by_all_rows() -> None:
    """R3.97: not in the step in which the first row still computes them."""
    loop = make_loop(max_num_batched_tokens=64)
    for i in range(3):
        loop.scheduler.add(request(f"r{i}", [*PROMPT, 60 + i]))
    assert loop.step().num_common_prefix_blocks == (0,)
    assert loop.step().num_common_prefix_blocks == (2,)
    loop.scheduler.finish(["r1", "r2"], FinishReason.ABORT)
    assert loop.step().num_common_prefix_blocks == (0,)


def test_the_prefix_cache_is_reset_only_when_idle() -> None:
    """R3.22."""
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT))
    loop.step()
    assert not loop.scheduler.reset_prefix_cache()
    loop.run()
    assert loop.scheduler.reset_prefix_cache()
    loop.scheduler.add(request("b", PROMPT))
    assert loop.step().num_computed_tokens.tolist() == [0]


# Pausing


def test_pausing_new_requests_lets_running_and_preempted_ones_finish() -> None:
    """R3.33."""
    loop = make_loop(num_blocks=8, max_num_batched_tokens=64, prefix_caching=False)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 11), max_tokens=8))
    loop.step()
    loop.scheduler.set_pause(PauseMode.NEW)
    loop.scheduler.add(request("c", [4, 5]))
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 1
    assert (len(loop.tokens("a")), len(loop.tokens("b"))) == (8, 8)
    assert list(loop.scheduler.live_request_ids()) == ["c"]
    loop.scheduler.set_pause(PauseMode.NONE)
    loop.run()
    assert loop.tokens("c") == expected([4, 5], 5)


def test_pausing_everything_schedules_nothing() -> None:
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT))
    loop.step()
    loop.scheduler.set_pause(PauseMode.ALL)
    assert not loop.scheduler.has_work()
    assert loop.step().is_empty
    loop.scheduler.set_pause(PauseMode.NONE)
    loop.run()
    assert loop.tokens("a") == expected(PROMPT, 5)


# Configuration


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"max_inflight_steps": 0}, "max_inflight_steps is 0"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"max_num_batched_tokens": 0}, "max_num_batched_tokens is 0"),
        ({"max_num_active_seqs": 5}, "max_num_active_seqs is 5; allowed: 1 to max_num_seqs"),
        ({"watermark": 1.0}, "watermark is 1.0"),
        ({"watermark": -0.1}, "watermark is -0.1"),
        ({"long_prefill_threshold": -1}, "long_prefill_threshold is -1"),
        ({"chunked_prefill": False}, "max_num_batched_tokens"),
        ({"num_blocks": 1}, "--num-kv-blocks"),
    ],
)
def test_impossible_limits_are_refused_with_the_setting_to_change(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_scheduler(**changes)


def test_an_unknown_hash_is_refused() -> None:
    context = SchedulerContext(
        name="fcfs",
        api_version=1,
        roles=frozenset({ProcessRole.ENGINE}),
        limits=limits(),
        kv_cache=kv_config(9),
        hash_algorithm="md5",
    )
    with pytest.raises(PluginNotFoundError, match="'md5'"):
        create_fcfs(context, BatchOptions())


def test_a_model_without_kv_is_scheduled_too() -> None:
    scheduler = make_scheduler(kv_cache=type(kv_config(1))(num_blocks=1, groups=(), tensors=()))
    scheduler.add(request("a", PROMPT, max_tokens=2))
    for _ in range(2):
        step = scheduler.schedule()
        assert step.new_blocks == ()
        outputs = scheduler.update(step, answer(step))
        scheduler.check_integrity()
    assert finish_reasons(outputs) == [FinishReason.LENGTH]


def test_two_groups_send_their_own_block_lists() -> None:
    """R3.15, P3.12."""
    scheduler = make_scheduler(kv_cache=kv_config(64, 4, 8))
    scheduler.add(request("a", range(3, 14), max_tokens=12))
    step = scheduler.schedule()
    tables = [ids.tolist() for ids in step.new_rows[0].block_ids]
    assert [len(table) for table in tables] == [3, 2]
    outputs = scheduler.update(step, answer(step))
    while not outputs[-1].finish_reason:
        step = scheduler.schedule()
        for table, update in zip(tables, step.new_blocks, strict=True):
            assert int(update.counts.sum()) == len(update.ids)
            table.extend(update.ids.tolist())
        outputs = scheduler.update(step, answer(step))
        scheduler.check_integrity()
    assert [len(table) for table in tables] == [6, 3]
    assert len({*tables[0], *tables[1]}) == 9
