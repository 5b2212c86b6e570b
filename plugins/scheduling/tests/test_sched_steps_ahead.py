"""Steps planned ahead of the output of earlier ones: placeholders, late stops, stale output, fences (spec 03)."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise
from typing import Any

import msgspec
import numpy as np
import pytest

from hardpoint.interfaces import (
    EngineOutput,
    FinishReason,
    LogprobArrays,
    RequestView,
    RowFailure,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
)
from hardpoint.testing import FakeWorker
from hardpoint.testing.scheduler_loop import SchedulerLoop
from hardpoint_scheduling.schedulers.factories import create_priority
from hardpoint_scheduling.schedulers.request import LiveRequest, RequestStatus
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import BLOCK, answer, expected, kv_config, limits, make_scheduler, request

PROMPT = list(range(3, 13))


class Ahead:
    """A scheduler whose steps are scheduled and updated by hand, over the fake worker."""

    def __init__(self, depth: int = 2, num_blocks: int = 64, **fields: Any) -> None:
        self.scheduler: BatchScheduler = make_scheduler(num_blocks, max_inflight_steps=depth, **fields)
        self.worker = FakeWorker(block_size=BLOCK)
        self.worker.initialize_kv_cache(kv_config(num_blocks))
        self.under_way: list[tuple[SchedulerOutput, RunnerOutput]] = []
        self.tokens: dict[str, list[int]] = {}

    def schedule(self) -> SchedulerOutput:
        step = self.scheduler.schedule()
        output = self.worker.execute(step)
        assert isinstance(output, RunnerOutput)
        self.under_way.append((step, output))
        self.scheduler.check_integrity()
        return step

    def update(self) -> list[EngineOutput]:
        outputs = self.scheduler.update(*self.under_way.pop(0))
        for output in outputs:
            self.tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
        self.scheduler.check_integrity()
        return outputs

    def run(self, depth: int = 2) -> None:
        for _ in range(300):
            if not self.scheduler.has_work() and not self.under_way:
                return
            while len(self.under_way) < depth and self.scheduler.has_work():
                self.schedule()
            self.update()
        raise RuntimeError(f"the loop does not end: {self.scheduler.stats()}")

    def live(self, name: str) -> LiveRequest:
        return self.scheduler._state.live[name]


class Store(SchedulerExtension):
    """A connector that holds nothing back; its presence means that loads may refill freed blocks in any order."""

    name = "store"

    def may_free(self, request: RequestView) -> bool:
        return True


def make_deep_loop(depth: int, num_blocks: int = 64, **fields: Any) -> SchedulerLoop:
    create = {"create": fields.pop("create")} if "create" in fields else {}
    scheduler = make_scheduler(num_blocks, max_inflight_steps=depth, **create, **fields)
    return SchedulerLoop(scheduler, limits(max_inflight_steps=depth, **fields), num_blocks, depth)


# Placeholders


def test_a_step_is_planned_before_the_tokens_of_the_last_one_are_known() -> None:
    """R3.44, R3.96, R1.7: computed and in flight grow at once, placeholders stand for what is not back."""
    ahead = Ahead(depth=3)
    ahead.scheduler.add(request("a", PROMPT))
    live = ahead.live("a")
    seen = []
    for _ in range(3):
        step = ahead.schedule()
        assert step.samples.all()
        seen.append((live.num_computed_tokens, live.num_placeholders, live.num_in_flight_tokens, live.last_step))
    assert seen == [(10, 1, 10, 1), (11, 2, 11, 2), (12, 3, 12, 3)]
    assert (live.num_tokens, live.num_processed_tokens) == (10, 0)
    for left in (2, 1, 0):
        ahead.update()
        assert (live.num_placeholders, live.num_computed_tokens) == (left, 12)
    assert (live.num_in_flight_tokens, live.num_tokens) == (0, 13)
    ahead.run()
    assert ahead.tokens["a"] == expected(PROMPT, 5)


@pytest.mark.parametrize("depth", [1, 2, 3, 4])
def test_no_step_is_taken_after_the_last_allowed_token(depth: int) -> None:
    """R3.41, P3.7: as many rows are scheduled as tokens come back, however many steps are under way."""
    ahead = Ahead(depth=depth)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=4))
    ahead.run(depth)
    assert sum(step.num_rows for step in ahead.worker.steps) == 4
    assert ahead.tokens["a"] == expected(PROMPT, 4)


def test_the_length_rule_is_the_one_of_the_specification() -> None:
    """R3.41: with one step under way, placeholders > 0 and computed + 2 - placeholders >= prompt + max_tokens."""
    for max_tokens in range(1, 5):
        ahead = Ahead()
        ahead.scheduler.add(request("a", PROMPT, max_tokens=max_tokens))
        for _ in range(max_tokens + 1):
            live = ahead.scheduler._state.live.get("a")
            if live is None:
                break
            placeholders = live.num_placeholders
            skipped = placeholders > 0 and live.num_computed_tokens + 2 - placeholders >= len(PROMPT) + max_tokens
            assert ahead.schedule().num_rows == (0 if skipped else 1)
            if len(ahead.under_way) == 2:
                ahead.update()


def test_a_stop_found_late_drops_the_surplus_token() -> None:
    """The row that ran on is not delivered and takes nothing from the next owner of its slot."""
    stop = expected(PROMPT, 2)[1]
    ahead = Ahead(max_num_seqs=1)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=9, sampling={"stop_token_ids": (stop,)}))
    ahead.scheduler.add(request("b", PROMPT[:6], max_tokens=3))
    for _ in range(2):
        ahead.schedule()
    ahead.update()
    ahead.schedule()
    assert [output.finish_reason for output in ahead.update()] == [FinishReason.STOP]
    step = ahead.schedule()
    assert (step.finished_slots.tolist(), step.new_rows[0].request_id) == ([0], "b")
    assert ahead.update() == [], "the surplus token of a"
    ahead.run()
    assert ahead.tokens == {"a": expected(PROMPT, 2), "b": expected(PROMPT[:6], 3)}


def test_finishing_while_steps_are_under_way() -> None:
    """One terminal output, nothing after it; without loads the blocks are free at once, since steps run in order."""
    ahead = Ahead(depth=3)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=9))
    for _ in range(3):
        ahead.schedule()
    assert len(ahead.scheduler.finish(["a"], FinishReason.ABORT)) == 1
    assert ahead.scheduler.stats().num_free_blocks == 63
    ahead.scheduler.add(request("a", PROMPT[1:], max_tokens=2))
    for _ in range(3):
        assert ahead.update() == []
    ahead.run()
    assert ahead.tokens == {"a": expected(PROMPT[1:], 2)}


def test_chunks_of_a_prompt_follow_one_another_without_waiting() -> None:
    """R3.30, R3.44."""
    ahead = Ahead(depth=3, max_num_batched_tokens=4)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=1))
    steps = [ahead.schedule() for _ in range(3)]
    assert [step.num_computed_tokens.tolist() for step in steps] == [[0], [4], [8]]
    assert [step.samples.tolist() for step in steps] == [[False], [False], [True]]
    assert ahead.live("a").num_placeholders == 1
    ahead.run()
    assert ahead.tokens["a"] == expected(PROMPT, 1)


def test_decodes_of_one_request_keep_the_pace_of_the_pipeline() -> None:
    """R3.42: with as many stages as steps under way, each request decodes once per lap; others fill the gaps."""
    ahead = Ahead(depth=3, num_pipeline_stages=3)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=4))
    rows = []
    for _ in range(8):
        rows.append(ahead.schedule().num_rows)
        if len(ahead.under_way) == 3:
            ahead.update()
    assert rows == [1, 0, 0, 1, 0, 0, 1, 0]
    assert ahead.live("a").next_decode_step == 9
    ahead.run(3)
    assert ahead.tokens["a"] == expected(PROMPT, 4)


def test_blocks_enter_the_index_with_known_tokens_only() -> None:
    """R3.20, R3.21: a block whose last token is under way has no hash; it enters when that token is known."""
    ahead = Ahead(depth=2)
    pool = ahead.scheduler._state.kv.pool
    ahead.scheduler.add(request("a", PROMPT, max_tokens=9))
    found = []
    for _ in range(5):
        ahead.schedule()
        found.append((ahead.live("a").num_computed_tokens, ahead.live("a").num_tokens, pool.num_cached))
        if len(ahead.under_way) == 2:
            ahead.update()
    assert found == [(10, 10, 2), (11, 10, 2), (12, 11, 2), (13, 12, 3), (14, 13, 3)]


def test_a_request_that_ends_leaves_its_last_full_block_to_others() -> None:
    """R3.20: the block that its surplus step completed can be found."""
    ahead = Ahead(depth=2)
    ahead.scheduler.add(request("a", PROMPT[:7], max_tokens=2))
    ahead.run()
    assert ahead.scheduler._state.kv.pool.num_cached == 2


def test_many_rows_that_fill_a_block_at_once_enter_it_over_some_steps() -> None:
    """R1.8, R3.20: all hashes are there whenever one asks, and all blocks before the next one is full."""
    scheduler = make_scheduler(2_000, max_num_seqs=200, max_num_batched_tokens=4_000, kv_cache=kv_config(2_000, 16))
    for i in range(200):
        scheduler.add(request(f"r{i}", [7 + i, *range(3, 16)], max_tokens=40, sampling={"ignore_eos": True}))
    pool, entered = scheduler._state.kv.pool, []
    for _ in range(21):
        step = scheduler.schedule()
        entered.append(pool.num_cached)
        scheduler.update(step, answer(step))
        for live in scheduler._state.running.requests:
            assert len(live.block_hashes) == live.num_tokens // 16
    assert entered[:3] == [0, 0, 19]
    assert entered[17] == 200
    assert all(after - before <= 19 for before, after in pairwise(entered))
    scheduler.check_integrity()


# Preemption and stale output


def preempted(*, drop: bool, depth: int = 3) -> tuple[Ahead, LiveRequest]:
    """Request ``a`` with two decodes in flight when it is preempted."""
    ahead = Ahead(depth=depth)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=6))
    for _ in range(3):
        ahead.schedule()
    ahead.update()
    live = ahead.live("a")
    ahead.scheduler._lifecycle.preempt(live, drop_stale=drop)
    ahead.scheduler.check_integrity()
    return ahead, live


def test_preempting_resets_what_was_computed_and_keeps_the_tokens() -> None:
    """R3.78, R3.79: what is in flight is stale; a share that was stale before is not counted twice."""
    ahead, live = preempted(drop=False)
    assert live.status is RequestStatus.PREEMPTED
    assert (live.num_computed_tokens, live.num_placeholders, live.num_preemptions, live.num_tokens) == (0, 0, 1, 11)
    assert (live.num_stale_tokens, live.num_in_flight_tokens) == (2, 2)
    assert ahead.scheduler._state.waiting.peek() is live
    assert [event.milestone.value for event in live.take_events()] == ["queued", "scheduled", "preempted"]
    assert live.take_events() == []


def test_stale_output_is_delivered_and_moves_no_counter_but_its_own() -> None:
    """R3.79, P3.5, R3.62: the request waits for it, so that no token is computed twice."""
    ahead, live = preempted(drop=False)
    assert ahead.schedule().num_rows == 0, "deliverable output is still to come"
    assert len(ahead.update()) == 1
    assert (live.num_stale_tokens, live.num_computed_tokens, live.num_placeholders, live.num_tokens) == (1, 0, 0, 12)
    assert ahead.schedule().num_rows == 0
    assert len(ahead.update()) == 1
    assert (live.num_stale_tokens, live.num_in_flight_tokens, live.num_tokens) == (0, 0, 13)
    step = ahead.schedule()
    assert (step.new_rows[0].resumed, step.new_rows[0].token_ids.tolist()) == (True, [*PROMPT, *expected(PROMPT, 3)])
    ahead.run()
    assert ahead.tokens["a"] == expected(PROMPT, 6)


def test_dropped_stale_output_is_thrown_away_until_all_of_it_is_back() -> None:
    """R3.80: the request may run again at once; the flag stays until its stale share is drained, also when it is
    preempted once more in between, whatever that preemption asks for."""
    ahead, live = preempted(drop=True)
    assert ahead.schedule().new_rows[0].resumed
    assert (live.num_stale_tokens, live.num_in_flight_tokens) == (2, 5)
    assert ahead.update() == []
    assert (live.num_stale_tokens, live.drops_stale) == (1, True)
    ahead.scheduler._lifecycle.preempt(live)
    ahead.scheduler.check_integrity()
    assert (live.num_stale_tokens, live.drops_stale) == (4, True), "assigned, not 1 + 3 + 1"
    assert ahead.update() == []
    assert ahead.update() == []
    assert (live.num_stale_tokens, live.drops_stale, live.num_tokens) == (0, False, 11)
    ahead.run()
    assert ahead.tokens["a"] == expected(PROMPT, 6)


def test_stale_output_can_end_a_request_that_waits() -> None:
    """R3.79: stops and limits hold for delivered tokens wherever the request is."""
    ahead = Ahead()
    ahead.scheduler.add(request("a", PROMPT, max_tokens=2))
    for _ in range(2):
        ahead.schedule()
    ahead.scheduler._lifecycle.preempt(ahead.live("a"))
    assert [output.finish_reason for output in (*ahead.update(), *ahead.update())] == [None, FinishReason.LENGTH]
    assert ahead.tokens["a"] == expected(PROMPT, 2)
    ahead.run()
    assert ahead.scheduler.stats().num_waiting == 0


def test_aborting_a_preempted_request_drops_what_is_under_way() -> None:
    ahead, _ = preempted(drop=False)
    assert len(ahead.scheduler.finish(["a"], FinishReason.ABORT)) == 1
    assert [ahead.update(), ahead.update()] == [[], []]
    assert not ahead.scheduler.live_request_ids()


@pytest.mark.parametrize("drop", [False, True])
def test_a_stale_row_that_failed_ends_its_request_unless_it_is_thrown_away(drop: bool) -> None:
    """R3.79, R3.80: a later stale token must not take the place of the missing one."""
    ahead, live = preempted(drop=drop)
    step, _ = ahead.under_way.pop(0)
    failure = RowFailure(int(step.slots[0]), int(step.generations[0]), "not a number")
    failed = msgspec.structs.replace(
        answer(step),
        num_sampled=np.zeros(1, dtype=np.int32),
        token_ids=np.zeros(0, dtype=np.int32),
        failures=(failure,),
    )
    outputs = ahead.scheduler.update(step, failed)
    ahead.scheduler.check_integrity()
    assert [o.finish_reason for o in outputs] == ([] if drop else [FinishReason.ERROR])
    assert (live.num_stale_tokens == 1) == drop


def test_resetting_the_cache_under_running_requests() -> None:
    """R3.22, R3.80: everybody is preempted, comes back in order, and what was under way counts for nothing."""
    ahead = Ahead(depth=3, max_num_batched_tokens=64)
    for name, prompt in (("a", PROMPT), ("b", PROMPT[1:])):
        ahead.scheduler.add(request(name, prompt, max_tokens=5))
    for _ in range(2):
        ahead.schedule()
    assert not ahead.scheduler.reset_prefix_cache()
    assert ahead.scheduler.stats().num_preemptions == 0
    assert ahead.scheduler.reset_prefix_cache(reset_running=True)
    assert ahead.scheduler._state.kv.pool.num_cached == 0
    assert ahead.live("a").drops_stale
    step = ahead.schedule()
    assert [row.request_id for row in step.new_rows] == ["a", "b"]
    assert step.num_computed_tokens.tolist() == [0, 0]
    assert [ahead.update(), ahead.update()] == [[], []]
    ahead.run(3)
    assert ahead.tokens == {"a": expected(PROMPT, 5), "b": expected(PROMPT[1:], 5)}


def test_prompt_logprobs_survive_a_preemption_while_they_are_under_way() -> None:
    """R3.80, R1.11: the first output brings them, so one under way is thrown away and all positions come anew."""
    ahead = Ahead()
    ahead.scheduler.add(request("a", PROMPT[:4], max_tokens=3, sampling={"prompt_logprobs": 0}))
    ahead.schedule()
    ahead.scheduler._lifecycle.preempt(ahead.live("a"))
    assert ahead.live("a").drops_stale
    step = ahead.schedule()
    assert step.num_computed_tokens.tolist() == [0]
    assert ahead.update() == []
    step, output = ahead.under_way.pop(0)
    arrays = LogprobArrays(
        rows=np.zeros(4, dtype=np.int32),
        token_ids=np.arange(4, 8, dtype=np.int32)[:, None],
        logprobs=np.full((4, 1), -1.0, dtype=np.float32),
        ranks=np.ones(4, dtype=np.int32),
    )
    (first,) = ahead.scheduler.update(step, msgspec.structs.replace(output, prompt_logprobs=arrays))
    assert first.prompt_logprobs is not None
    assert [entry.token_ids[0] for entry in first.prompt_logprobs if entry is not None] == [4, 5, 6]
    ahead.scheduler.check_integrity()


def test_a_reset_preempts_nobody_for_nothing() -> None:
    """R3.22: blocks that a connector still reads cannot be given up, so those who run go on."""

    class Keeper(Store):
        def may_free(self, request: RequestView) -> bool:
            return False

    ahead = Ahead(depth=1, extensions=(Keeper(),))
    ahead.scheduler.add(request("a", PROMPT, max_tokens=1))
    ahead.scheduler.add(request("b", PROMPT, max_tokens=9))
    ahead.schedule()
    ahead.update()
    assert not ahead.scheduler.reset_prefix_cache(reset_running=True)
    assert ahead.scheduler.stats().num_preemptions == 0


# Victims


def prompt_of(number: int, length: int) -> list[int]:
    return [40 + number, *range(3, 2 + length)]


def decoding(num_blocks: int, first: Iterable[int], second: Iterable[int]) -> Ahead:
    """Requests by priority, admitted in two steps. Each fills two blocks now and wants a third in the next step."""
    ahead = Ahead(
        depth=1, num_blocks=num_blocks, create=create_priority, prefix_caching=False, max_num_batched_tokens=32
    )
    number = 0
    for length, priorities in ((6, first), (7, second)):
        for priority in priorities:
            ahead.scheduler.add(request(f"r{number}", prompt_of(number, length), max_tokens=9, priority=priority))
            number += 1
        ahead.schedule()
        ahead.update()
    ahead.schedule()
    ahead.update()
    return ahead


def finish_as_alone(ahead: Ahead, lengths: Iterable[int]) -> None:
    ahead.update()
    ahead.run(1)
    for number, length in enumerate(lengths):
        assert ahead.tokens[f"r{number}"] == expected(prompt_of(number, length), 9)


def test_a_victim_that_was_scheduled_already_gives_everything_back() -> None:
    """R3.48, R3.51, P3.2, I3.4: what r0 got in this step goes to those after it, and nobody is skipped."""
    ahead = decoding(10, [5], [1, 1, 1])
    step = ahead.schedule()
    assert [live.request_id for live in ahead.scheduler._state.running.requests] == ["r1", "r2", "r3"]
    assert (step.preempted_slots.tolist(), step.slots.tolist()) == ([0], [1, 2, 3])
    assert step.num_scheduled_tokens.tolist() == [1, 1, 1]
    assert step.new_blocks[0].counts.tolist() == [1, 1, 1]
    assert len(step.new_blocks[0].ids) == 3
    finish_as_alone(ahead, [6, 7, 7, 7])


def test_a_row_served_before_the_victim_keeps_what_it_got() -> None:
    """R3.51: r0's block stays with r0 although r1, after it and served too, is taken out."""
    ahead = decoding(11, [1, 5], [1, 1])
    step = ahead.schedule()
    assert (step.preempted_slots.tolist(), step.slots.tolist()) == ([1], [0, 2, 3])
    assert step.new_blocks[0].counts.tolist() == [1, 1, 1]
    finish_as_alone(ahead, [6, 6, 7, 7])


def test_rows_between_the_victim_and_the_short_one_keep_what_they_got() -> None:
    """R3.51: r1 was served after r0, which is taken out because r2 comes away empty."""
    ahead = decoding(11, [5], [1, 1, 1])
    step = ahead.schedule()
    assert (step.preempted_slots.tolist(), step.slots.tolist()) == ([0], [1, 2, 3])
    assert step.new_blocks[0].counts.tolist() == [1, 1, 1]
    finish_as_alone(ahead, [6, 7, 7, 7])


def test_the_worst_request_makes_room_for_nobody_but_itself() -> None:
    """R3.50: it is preempted, the loop ends."""
    ahead = decoding(9, [0], [1, 9])
    step = ahead.schedule()
    assert [live.request_id for live in ahead.scheduler._state.running.requests] == ["r0", "r1"]
    assert (step.preempted_slots.tolist(), step.slots.tolist()) == ([2], [0, 1])
    finish_as_alone(ahead, [6, 7, 7])


def test_budgets_given_back_by_a_victim_serve_those_after_it() -> None:
    """R3.51, P3.2: the whole budget is used although the first row, which had a part of it, was taken out."""
    ahead = decoding(10, [5], [1, 1, 1])
    ahead.scheduler._state.limits = limits(max_num_batched_tokens=3, prefix_caching=False)
    step = ahead.schedule()
    assert (step.slots.tolist(), step.num_tokens) == ([1, 2, 3], 3)
    finish_as_alone(ahead, [6, 7, 7, 7])


# Fences


def test_without_loads_nothing_waits_for_a_step() -> None:
    """R3.85: workers run steps in order, so only a connector that can have several steps under way needs fences."""
    for depth, extensions, enabled in ((1, (), False), (1, (Store(),), False), (3, (), False), (3, (Store(),), True)):
        scheduler = make_scheduler(max_inflight_steps=depth, extensions=extensions)
        assert scheduler._state.fences.enabled == enabled


def test_blocks_written_by_a_step_under_way_are_freed_when_it_is_updated() -> None:
    """R3.85-R3.87, P3.4, I3.7: nobody gets them before, and their request's name stays taken."""
    ahead = Ahead(depth=2, num_blocks=5, extensions=(Store(),))
    ahead.scheduler.add(request("a", range(3, 15)))
    ahead.schedule()
    assert len(ahead.scheduler.finish(["a"], FinishReason.ABORT)) == 1
    ahead.scheduler.check_integrity()
    assert ahead.scheduler.stats().num_free_blocks == 1
    with pytest.raises(ValueError, match="still holds blocks"):
        ahead.scheduler.add(request("a", [4]))
    ahead.scheduler.add(request("b", range(40, 49)))
    assert ahead.schedule().num_rows == 0, "no room before the fence"
    assert ahead.update() == []
    assert ahead.scheduler.stats().num_free_blocks == 4
    ahead.run()
    assert ahead.tokens["b"] == expected(list(range(40, 49)), 5)


def test_fences_open_one_by_one() -> None:
    """R3.86, R3.87: an entry waits for every step scheduled before it, no longer."""
    ahead = Ahead(depth=3, extensions=(Store(),), prefix_caching=False, max_num_batched_tokens=64)
    for i, name in enumerate("abc"):
        ahead.scheduler.add(request(name, [40 + i, *PROMPT], max_tokens=9))
    free = ahead.scheduler.stats().num_free_blocks
    for name in "ab":
        ahead.schedule()
        ahead.scheduler.finish([name], FinishReason.ABORT)
    assert [entry.fence for entry in ahead.scheduler._state.fences.waiting] == [1, 2]
    left = []
    for _ in range(2):
        ahead.update()
        left.append(free - ahead.scheduler.stats().num_free_blocks)
    assert left == [6, 3]
    ahead.run()


def test_a_victim_with_a_step_under_way_is_left_alone() -> None:
    """R3.49, P3.3: the loop ends early instead of preempting or spinning; once the step is back, it goes on."""
    ahead = Ahead(depth=2, num_blocks=7, max_num_batched_tokens=64, prefix_caching=False, extensions=(Store(),))
    for i in range(2):
        ahead.scheduler.add(request(f"r{i}", [40 + i, *range(3, 14)], max_tokens=6))
    assert ahead.schedule().num_rows == 2
    assert ahead.schedule().num_rows == 0
    assert ahead.scheduler.stats().num_preemptions == 0
    ahead.run()
    assert ahead.scheduler.stats().num_preemptions >= 1
    for i in range(2):
        assert ahead.tokens[f"r{i}"] == expected([40 + i, *range(3, 14)], 6)


def test_without_fences_a_victim_may_have_a_step_under_way() -> None:
    """R3.49, R3.79: its token comes later and is delivered."""
    ahead = Ahead(depth=2, num_blocks=7, max_num_batched_tokens=64, prefix_caching=False)
    for i in range(2):
        ahead.scheduler.add(request(f"r{i}", [40 + i, *range(3, 14)], max_tokens=6))
    ahead.schedule()
    assert len(ahead.schedule().preempted_slots) == 1
    assert ahead.live("r1").num_stale_tokens == 12
    ahead.run()
    for i in range(2):
        assert ahead.tokens[f"r{i}"] == expected([40 + i, *range(3, 14)], 6)


def test_a_reset_under_running_requests_waits_for_fences() -> None:
    """R3.22, R3.49: with loads about, blocks under way cannot be reused, so nothing is reset or preempted."""
    ahead = Ahead(depth=2, extensions=(Store(),))
    ahead.scheduler.add(request("a", PROMPT))
    ahead.schedule()
    assert not ahead.scheduler.reset_prefix_cache(reset_running=True)
    assert ahead.scheduler.stats().num_preemptions == 0
    ahead.update()
    assert ahead.scheduler.reset_prefix_cache(reset_running=True)
    ahead.run()
    assert ahead.tokens["a"] == expected(PROMPT, 5)


# Step records


def test_lists_of_a_step_are_its_own() -> None:
    """R3.95: what ends after a step was handed out does not alter it."""
    ahead = Ahead(depth=2)
    ahead.scheduler.add(request("a", PROMPT, max_tokens=9))
    ahead.scheduler.add(request("b", PROMPT, max_tokens=9))
    ahead.schedule()
    ahead.scheduler.finish(["a"], FinishReason.ABORT)
    step = ahead.schedule()
    ahead.scheduler.finish(["b"], FinishReason.ABORT)
    assert step.finished_slots.tolist() == [0]
    step = ahead.schedule()
    assert (step.finished_slots.tolist(), step.preempted_slots.tolist(), step.num_rows) == ([1], [], 0)


@pytest.mark.parametrize("depth", [2, 3, 4])
@pytest.mark.parametrize("num_blocks", [9, 16, 40])
def test_tokens_do_not_depend_on_the_depth_under_the_engines_loop(depth: int, num_blocks: int) -> None:
    """I3.5, I3.6, I3.8."""
    loop = make_deep_loop(depth, num_blocks, max_num_batched_tokens=9)
    prompts = {f"r{i}": [*PROMPT[: 3 + i], 50 + i % 2] for i in range(7)}
    for name, prompt in prompts.items():
        loop.add(request(name, prompt, max_tokens=7))
    loop.run()
    assert loop.tokens == {name: expected(prompt, 7) for name, prompt in prompts.items()}
    loop.check_empty()
