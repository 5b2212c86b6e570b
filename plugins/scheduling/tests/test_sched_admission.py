"""The waiting loop, rule by rule: what holds a request back, what admits it, and what it may not do to others."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ExternalMatch, FinishReason, PauseMode, RequestView, SchedulerExtension, WaitReason
from hardpoint_scheduling.kv_cache.coordinator import Gates
from hardpoint_scheduling.schedulers.factories import create_priority
from hardpoint_scheduling.schedulers.plan import StepPlan
from hardpoint_scheduling.schedulers.request import LiveRequest, Milestone, RequestStatus
from sched_support import BLOCK, Loop, answer, expected, make_loop, make_scheduler, request

PROMPT = list(range(3, 13))


class Gate(SchedulerExtension):
    """Holds back the requests named in ``closed``, for the reason given."""

    def __init__(self, reason: WaitReason, *closed: str) -> None:
        self.name = reason.value
        self.wait_reason = reason
        self.closed = set(closed)

    def is_blocked(self, request: RequestView) -> bool:
        return request.request_id in self.closed


class Drafts(SchedulerExtension):
    """Wants room for three drafts per row."""

    name = "drafts"

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return 3


def live(loop: Loop, name: str) -> LiveRequest:
    return loop.scheduler._state.live[name]


def entered(loop: Loop) -> list[str]:
    return [row.request_id for row in loop.step().new_rows]


# What holds a request back


@pytest.mark.parametrize(
    ("reason", "status"),
    [
        (WaitReason.GRAMMAR, RequestStatus.WAITING_FOR_GRAMMAR),
        (WaitReason.REMOTE_KV, RequestStatus.WAITING_FOR_REMOTE_KV),
        (WaitReason.STREAMING_INPUT, RequestStatus.WAITING_FOR_STREAMING_INPUT),
    ],
)
def test_a_request_shows_what_it_waits_for_from_the_start(reason: WaitReason, status: RequestStatus) -> None:
    """R1.6, R3.2: it is among the skipped ones at once, and promoted when the wait is over."""
    gate = Gate(reason, "a")
    loop = make_loop(extensions=(gate,))
    for name in "ab":
        loop.scheduler.add(request(name, PROMPT))
    assert live(loop, "a").status is status
    assert live(loop, "b").status is RequestStatus.WAITING
    state = loop.scheduler._state
    assert ([r.request_id for r in state.skipped], [r.request_id for r in state.waiting]) == (["a"], ["b"])
    assert entered(loop) == ["b"]
    assert live(loop, "a").status is status
    gate.closed.clear()
    assert entered(loop) == ["a"]
    loop.run()
    assert loop.tokens("a") == expected(PROMPT, 5)


def test_a_missing_dependency_is_no_status_of_its_own() -> None:
    """R3.62: an adapter's turn, say. The request is looked at when its turn comes, and not before."""
    gate = Gate(WaitReason.DEPENDENCY, "a")
    loop = make_loop(extensions=(gate,))
    loop.scheduler.add(request("a", PROMPT))
    assert [r.request_id for r in loop.scheduler._state.waiting] == ["a"]
    assert entered(loop) == []
    assert [r.request_id for r in loop.scheduler._state.skipped] == ["a"]
    assert live(loop, "a").status is RequestStatus.WAITING


def test_those_set_aside_in_a_step_go_ahead_of_those_set_aside_before() -> None:
    """R3.62: in their own order."""
    gate = Gate(WaitReason.DEPENDENCY, "a", "b", "c", "d")
    loop = make_loop(extensions=(gate,))
    for name in "ab":
        loop.scheduler.add(request(name, PROMPT))
    loop.step()
    loop.scheduler._state.pause = PauseMode.NONE
    for name in "cd":
        loop.scheduler.add(request(name, PROMPT))
    loop.step()
    assert [r.request_id for r in loop.scheduler._state.skipped] == ["a", "b", "c", "d"]
    # One whose turn it is at once is set aside ahead of older ones that were not reached.
    loop.scheduler._state.skipped.discard("a")
    loop.scheduler._state.skipped.discard("b")
    loop.scheduler._state.waiting.prepend(live(loop, "a"))
    loop.scheduler._state.waiting.prepend(live(loop, "b"))
    loop.step()
    assert [r.request_id for r in loop.scheduler._state.skipped] == ["c", "d", "b", "a"]


def test_a_blocked_head_blocks_nobody_under_any_policy() -> None:
    """R3.2, P3.8: not even the most urgent one."""
    gate = Gate(WaitReason.GRAMMAR, "first")
    loop = make_loop(extensions=(gate,), create=create_priority)
    loop.scheduler.add(request("first", PROMPT, priority=-9))
    loop.scheduler.add(request("second", PROMPT))
    assert entered(loop) == ["second"]
    loop.scheduler.add(request("third", PROMPT))
    gate.closed.clear()
    assert entered(loop) == ["first", "third"], "R3.5: the better head of both queues"


def test_output_that_is_still_to_be_delivered_holds_a_resumed_request_back() -> None:
    """R3.62: computing it again would deliver its tokens twice."""
    scheduler = make_scheduler(max_inflight_steps=2)
    scheduler.add(request("a", PROMPT))
    first = scheduler.schedule()
    scheduler._lifecycle.preempt(scheduler._state.running.requests[0])
    assert scheduler.schedule().is_empty
    assert scheduler._state.live["a"].status is RequestStatus.PREEMPTED
    scheduler.update(first, answer(first))
    step = scheduler.schedule()
    assert [row.resumed for row in step.new_rows] == [True]
    assert step.new_rows[0].token_ids.tolist() == [*PROMPT, 50]


def test_a_session_that_waits_for_input_keeps_its_place() -> None:
    """R3.61: it counts as running; when its input comes, the place is there."""
    gate = Gate(WaitReason.STREAMING_INPUT, "session")
    loop = make_loop(extensions=(gate,), max_num_active_seqs=2)
    loop.scheduler.add(request("session", PROMPT))
    for name in "abc":
        loop.scheduler.add(request(name, [4, 5, ord(name)], max_tokens=30))
    assert entered(loop) == ["a"], "two places, one of them kept"
    gate.closed.clear()
    assert entered(loop) == ["session"], "its place is its own, though others came before its input"
    loop.scheduler.finish(["session"], FinishReason.ABORT)
    assert entered(loop) == ["b"]


def test_a_session_that_ends_while_it_waits_gives_its_place_back() -> None:
    """R3.61."""
    gate = Gate(WaitReason.STREAMING_INPUT, "session")
    loop = make_loop(extensions=(gate,), max_num_active_seqs=1)
    loop.scheduler.add(request("session", PROMPT))
    loop.scheduler.add(request("a", PROMPT))
    assert entered(loop) == []
    loop.scheduler.finish(["session"], FinishReason.ABORT)
    assert entered(loop) == ["a"]


# Caps and budgets


def test_the_active_cap_leaves_slots_unused() -> None:
    """R3.3: the slot cap sizes the workers' batch, the active cap limits who runs; slots stay the same."""
    loop = make_loop(max_num_seqs=4, max_num_active_seqs=3, max_num_batched_tokens=64)
    for i in range(6):
        loop.scheduler.add(request(f"r{i}", [5, i], max_tokens=2 + i))
    loop.run()
    assert max(step.num_rows for step in loop.steps) == 3
    assert loop.scheduler._state.table.num_slots == 4
    assert all(int(step.slots.max(initial=0)) < 4 for step in loop.steps)


def test_room_for_drafts_is_taken_from_the_batch_and_not_from_the_tokens_to_schedule() -> None:
    """R3.31: 10 tokens may be scheduled and 18 fit the batch; every row takes 3 more for its drafts."""
    loop = make_loop(extensions=(Drafts(),), max_scheduled_tokens=10, max_num_batched_tokens=18)
    for i in range(4):
        loop.scheduler.add(request(f"r{i}", [5, 6, 7, i + 10], max_tokens=4))
    step = loop.step()
    # 4 + 3, 4 + 3, and then 4 are left, of which 1 is not for drafts.
    assert step.num_scheduled_tokens.tolist() == [4, 4, 1]
    loop.run()
    for i in range(4):
        assert loop.tokens(f"r{i}") == expected([5, 6, 7, i + 10], 4)


def test_without_drafts_the_smaller_budget_alone_counts() -> None:
    """R3.31, I3.4."""
    loop = make_loop(max_scheduled_tokens=5, max_num_batched_tokens=16)
    loop.scheduler.add(request("a", PROMPT, max_tokens=3))
    assert [loop.step().num_tokens for _ in range(3)] == [5, 5, 1]


@pytest.mark.parametrize(
    ("adaptive", "others", "granted"), [(False, 0, 24), (False, 1, 4), (True, 1, 12), (True, 2, 8), (True, 9, 4)]
)
def test_the_long_prefill_threshold(adaptive: bool, others: int, granted: int) -> None:
    """R3.32, P3.9: off for a lone request; the adaptive form grants an equal share of the batch if that is more."""
    loop = make_loop(
        max_num_seqs=16, max_num_batched_tokens=24, long_prefill_threshold=4, adaptive_prefill_threshold=adaptive
    )
    loop.scheduler.add(request("long", range(3, 53)))
    for i in range(others):
        loop.scheduler.add(request(f"r{i}", [7, i]))
    assert int(loop.step().num_scheduled_tokens[0]) == granted


def test_without_chunking_a_prompt_over_the_rest_of_the_budget_stops_admission() -> None:
    """R3.66: shorter ones behind it do not overtake."""
    loop = make_loop(chunked_prefill=False, max_num_batched_tokens=64)
    for name, prompt in (("a", range(3, 43)), ("b", range(43, 83)), ("c", [9, 9])):
        loop.scheduler.add(request(name, prompt))
    assert entered(loop) == ["a"]
    assert entered(loop) == ["b", "c"]


def test_nobody_is_admitted_in_a_step_that_preempted() -> None:
    """R3.60: although its victim left more than enough blocks."""
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64, prefix_caching=False)
    for name, start in (("a", 3), ("b", 40)):
        loop.scheduler.add(request(name, range(start, start + 7), max_tokens=8))
    loop.step()
    loop.step()
    loop.scheduler.add(request("tiny", [4], max_tokens=1))
    assert entered(loop) == []
    stats = loop.scheduler.stats()
    assert (stats.num_preemptions, stats.num_waiting, stats.num_free_blocks) == (1, 2, 2)


# Pausing


def test_a_pause_for_new_requests_finds_preempted_ones_wherever_they_wait() -> None:
    """R3.33: more urgent new ones in front of them stay where they are."""
    loop = make_loop(create=create_priority, max_num_batched_tokens=64)
    loop.scheduler.add(request("old", PROMPT, priority=5))
    loop.step()
    loop.scheduler._lifecycle.preempt(live(loop, "old"))
    for i in range(3):
        loop.scheduler.add(request(f"new{i}", PROMPT, priority=-i))
    loop.scheduler.set_pause(PauseMode.NEW)
    assert loop.scheduler.has_work()
    assert entered(loop) == ["old"]
    assert len(loop.scheduler._state.waiting) == 3
    assert not len(loop.scheduler._state.skipped)
    loop.scheduler.set_pause(PauseMode.NONE)
    assert entered(loop) == ["new2", "new1", "new0"]


def test_a_pause_of_everything_takes_all_budget_away() -> None:
    """R3.33."""
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT))
    scheduler.set_pause(PauseMode.ALL)
    assert scheduler._state.start_plan().budget == 0
    assert scheduler.schedule().is_empty


# Gates


@pytest.mark.parametrize(
    "status", [RequestStatus.WAITING, RequestStatus.PREEMPTED, RequestStatus.WAITING_FOR_REMOTE_KV]
)
@pytest.mark.parametrize("somebody_runs", [False, True])
def test_when_the_watermark_counts(status: RequestStatus, somebody_runs: bool) -> None:
    """R3.74: only for those who wait or were preempted, and only while somebody runs."""
    loop = make_loop(num_blocks=50, watermark=0.25)
    if somebody_runs:
        loop.scheduler.add(request("runs", [4]))
        loop.step()
    candidate = LiveRequest(request("a", PROMPT), 20)
    candidate.status = status
    gates = loop.scheduler._admission._gates(candidate, loop.scheduler._state.start_plan())
    counts = somebody_runs and status is not RequestStatus.WAITING_FOR_REMOTE_KV
    assert gates == Gates(full_sequence_must_fit=False, reserved_blocks=12 if counts else 0)


def test_the_watermark_counts_in_the_step_in_which_the_first_one_enters() -> None:
    """R3.74: scheduled in this step is as good as running."""
    loop = make_loop(num_blocks=9, watermark=0.5, max_num_batched_tokens=64, prefix_caching=False)
    loop.scheduler.add(request("a", range(3, 18), max_tokens=1))
    loop.scheduler.add(request("b", [4, 5], max_tokens=1))
    assert entered(loop) == ["a"], "b would leave 3 of 9 blocks free, not 4"
    assert entered(loop) == ["b"]


def test_no_blocks_end_the_waiting_loop() -> None:
    """R3.67: nobody behind overtakes, nobody running is preempted."""
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64, prefix_caching=False)
    loop.scheduler.add(request("a", range(3, 15), max_tokens=2))
    loop.scheduler.add(request("b", range(3, 15), max_tokens=2))
    loop.scheduler.add(request("c", [4], max_tokens=2))
    assert entered(loop) == ["a"]
    assert [r.request_id for r in loop.scheduler._state.waiting] == ["b", "c"]
    loop.run()
    assert loop.scheduler.stats().num_preemptions == 0


def test_a_refused_head_is_not_looked_up_again_before_something_is_free() -> None:
    """R3.67, R3.63: connectors and the prefix index are asked once, not in every step."""

    class Asked(SchedulerExtension):
        name = "asked"
        count = 0

        def match_external(self, request: RequestView, num_local_tokens: int) -> ExternalMatch | None:
            self.count += 1
            return ExternalMatch(0)

    asked = Asked()
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64, extensions=(asked,))
    loop.scheduler.add(request("a", range(3, 15), max_tokens=6))
    loop.scheduler.add(request("b", range(30, 45), max_tokens=2))
    loop.run_some(5)
    assert asked.count == 2
    loop.run()
    assert asked.count == 3
    assert loop.tokens("b") == expected([*range(30, 45)], 2)


# What admission leaves behind


def test_an_admitted_request_is_reported_as_new_or_as_resumed() -> None:
    """R3.68, R1.14: and its life is on record."""
    ticks = iter(range(100))
    loop = make_loop(clock=lambda: float(next(ticks)))
    loop.scheduler.add(request("a", PROMPT))
    step = loop.step()
    assert [row.resumed for row in step.new_rows] == [False]
    assert live(loop, "a").status is RequestStatus.RUNNING
    assert loop.scheduler._state.running.requests == [live(loop, "a")]
    loop.scheduler._lifecycle.preempt(live(loop, "a"))
    assert [row.resumed for row in loop.step().new_rows] == [True]
    milestones = [event.milestone for event in live(loop, "a").take_events()]
    assert milestones == [Milestone.QUEUED, Milestone.SCHEDULED, Milestone.PREEMPTED, Milestone.SCHEDULED]


def test_statistics_count_only_requests_that_were_admitted() -> None:
    """R3.93: a lookup that came to nothing counts nothing."""
    loop = make_loop(num_blocks=6, max_num_batched_tokens=64)
    loop.scheduler.add(request("a", range(3, 17), max_tokens=3))
    loop.scheduler.add(request("b", range(40, 54), max_tokens=3))
    loop.step()
    assert loop.scheduler.stats().prefix_cache_queries == 14
    loop.run()
    assert loop.scheduler.stats().prefix_cache_queries == 28


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"num_pipeline_stages": 0}, "num_pipeline_stages is 0"),
        ({"prefill_interval": 0}, "prefill_interval is 0"),
        ({"max_scheduled_tokens": 17}, r"max_scheduled_tokens is 17; allowed: 1 to max_num_batched_tokens \(16\)"),
        ({"max_scheduled_tokens": 0}, "max_scheduled_tokens is 0"),
        ({"encoder_budget": 8}, "encoder_budget is 8 and encoder_cache_size 0; set both"),
        ({"encoder_budget": 8, "encoder_cache_size": -1}, "encoder_cache_size -1"),
        (
            {"chunked_prefill": False, "max_num_batched_tokens": 64, "max_scheduled_tokens": 60},
            r"max_scheduled_tokens \(60\) must be at least max_model_len",
        ),
    ],
)
def test_limits_that_contradict_each_other_are_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        make_scheduler(**changes)


def test_a_plan_charges_what_it_admits() -> None:
    """I3.4: start minus the sum of what was scheduled is what remains, in every step."""
    loop = make_loop(max_num_batched_tokens=12, max_num_seqs=3)
    plans: list[StepPlan] = []
    start = loop.scheduler._state.start_plan

    def watched() -> StepPlan:
        plans.append(start())
        return plans[-1]

    object.__setattr__(loop.scheduler, "_start_plan", watched)
    for i in range(5):
        loop.scheduler.add(request(f"r{i}", range(3, 8 + i), max_tokens=4))
    while loop.scheduler.has_work():
        step = loop.step()
        assert plans[-1].budget == 12 - step.num_tokens >= 0
        assert step.num_rows <= 3
        assert all(count <= BLOCK * 3 for count in step.num_scheduled_tokens.tolist())
