"""Guesses to verify: how many are scheduled, what a refused one takes back, and where a sequence ends among several."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from hardpoint.interfaces import (
    EngineOutput,
    FinishReason,
    LogprobArrays,
    RequestView,
    RunnerOutput,
    SchedulerExtension,
    SchedulerOutput,
    TokenUpdate,
)
from hardpoint.testing import FakeWorker
from hardpoint.testing.fake_worker import ScriptedDrafter
from hardpoint.testing.scheduler_loop import SchedulerLoop
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from sched_support import BLOCK, expected, kv_config, limits, make_scheduler, request

PROMPT = list(range(3, 13))


class Speculator(SchedulerExtension):
    """The worker has three guesses after each sample, whether they are told or not."""

    name = "speculator"
    drafts_on_worker = True

    def num_lookahead_tokens(self, request: RequestView) -> int:
        return 3


def make_loop(
    right: Sequence[int], depth: int = 1, *, on_worker: bool = False, num_blocks: int = 64, **fields: Any
) -> SchedulerLoop:
    """Over a worker of whose three guesses as many are right as ``right`` says by the length of the sequence."""
    extensions = (Speculator(),) if on_worker else ()
    scheduler = make_scheduler(num_blocks, max_inflight_steps=depth, extensions=extensions, **fields)
    worker = FakeWorker(block_size=BLOCK, drafter=ScriptedDrafter(3, right), keeps_drafts=on_worker)
    return SchedulerLoop(scheduler, limits(max_inflight_steps=depth, **fields), num_blocks, depth, worker)


def verified(
    step: SchedulerOutput, tokens: Sequence[Sequence[int]], drafts: Sequence[Sequence[int]] = (), **fields: Any
) -> RunnerOutput:
    """A worker's output with the given tokens per row, and guesses at what follows."""
    update = None
    if drafts:
        counts = np.asarray([len(row) for row in drafts], dtype=np.int32)
        update = TokenUpdate(counts, np.asarray([token for row in drafts for token in row], dtype=np.int32))
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=np.asarray([len(row) for row in tokens], dtype=np.int32),
        token_ids=np.asarray([token for row in tokens for token in row], dtype=np.int32),
        drafts=update,
        **fields,
    )


def guessing(drafts: Sequence[int], prompt: Sequence[int] = PROMPT, **fields: Any) -> BatchScheduler:
    """A scheduler whose only request has one output, 20, and ``drafts`` for its next step."""
    scheduler = make_scheduler(max_num_batched_tokens=fields.pop("max_num_batched_tokens", 16))
    scheduler.add(request("a", prompt, **{"max_tokens": 9, **fields}))
    step = scheduler.schedule()
    scheduler.update(step, verified(step, [[20]], [drafts]))
    scheduler.check_integrity()
    return scheduler


def test_guesses_are_scheduled_behind_the_known_tokens() -> None:
    """R3.44, R3.52: they are recorded with the step and gone from the request; blocks cover them."""
    scheduler = guessing([21, 22, 23])
    live = scheduler._state.live["a"]
    assert live.num_tokens_with_drafts == 14
    step = scheduler.schedule()
    scheduler.check_integrity()
    assert step.drafts is not None
    assert (step.drafts.counts.tolist(), step.drafts.ids.tolist()) == ([3], [21, 22, 23])
    assert (step.num_scheduled_tokens.tolist(), step.samples.tolist()) == ([4], [True])
    assert (live.num_tokens_with_drafts, live.num_placeholders, live.num_computed_tokens) == (11, 4, 14)
    assert int(scheduler._state.table.capacity[0]) >= 14


def test_rows_without_guesses_have_none_in_the_step() -> None:
    """R3.52: recorded only where there are any."""
    scheduler = guessing([21])
    scheduler.add(request("b", [7, 8], max_tokens=2))
    step = scheduler.schedule()
    assert step.drafts is not None
    assert (step.drafts.counts.tolist(), step.drafts.ids.tolist()) == ([1, 0], [21])
    scheduler.update(step, verified(step, [[21, 30], [40]]))
    assert scheduler.schedule().drafts is None


@pytest.mark.parametrize("accepted", [0, 1, 2, 3])
def test_refused_guesses_are_taken_back(accepted: int) -> None:
    """R3.81: computed and placeholders fall by the refused ones, and the next step starts at the last known token."""
    scheduler = guessing([21, 22, 23])
    live = scheduler._state.live["a"]
    step = scheduler.schedule()
    tokens = [21, 22, 23, 24][: accepted + 1]
    (output,) = scheduler.update(step, verified(step, [tokens]))
    scheduler.check_integrity()
    assert output.new_token_ids == tokens
    assert (live.num_computed_tokens, live.num_placeholders) == (11 + accepted, 0)
    assert live.num_tokens == 12 + accepted
    step = scheduler.schedule()
    assert (step.num_computed_tokens.tolist(), step.num_scheduled_tokens.tolist()) == ([11 + accepted], [1])


def test_guesses_are_cut_to_the_budget() -> None:
    """R3.45, R3.52."""
    scheduler = guessing([21, 22, 23])
    scheduler._state.limits = limits(max_num_batched_tokens=3)
    step = scheduler.schedule()
    assert step.drafts is not None
    assert (step.drafts.counts.tolist(), step.drafts.ids.tolist(), step.num_tokens) == ([2], [21, 22], 3)
    scheduler.update(step, verified(step, [[21, 22, 30]]))
    assert scheduler._state.live["a"].num_tokens == 14
    scheduler.check_integrity()


def test_guesses_are_cut_to_the_length_of_the_sequence() -> None:
    """R3.45: with room for two more tokens one guess is of use; with room for one, none."""
    for max_tokens, drafts in ((2, 0), (3, 1), (4, 2), (5, 3)):
        scheduler = guessing([21, 22, 23], max_tokens=max_tokens)
        step = scheduler.schedule()
        assert step.num_tokens == drafts + 1
        assert (0 if step.drafts is None else len(step.drafts.ids)) == drafts


def test_a_threshold_caps_guesses_too() -> None:
    """R3.45: the long-prefill threshold comes first in the clamps."""
    scheduler = guessing([21, 22, 23])
    scheduler._state.limits = limits(long_prefill_threshold=2)
    scheduler.add(request("b", [7, 8]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [2, 2]


def test_blocks_with_guesses_are_not_shared() -> None:
    """R3.21: a block filled up by guesses enters only as far as tokens are known."""
    scheduler = guessing([21, 22, 23])
    pool = scheduler._state.kv.pool
    assert pool.num_cached == 2
    step = scheduler.schedule()
    assert int(step.num_computed_tokens[0] + step.num_scheduled_tokens[0]) == 14
    assert pool.num_cached == 2
    scheduler.update(step, verified(step, [[21, 22, 23, 24]]))
    step = scheduler.schedule()
    assert pool.num_cached == 3
    assert len(scheduler._state.live["a"].block_hashes) == 15 // BLOCK
    scheduler.check_integrity()


def test_a_preempted_request_loses_its_guesses() -> None:
    """R3.78."""
    scheduler = guessing([21, 22, 23])
    live = scheduler._state.live["a"]
    scheduler._lifecycle.preempt(live)
    assert live.num_tokens_with_drafts == 11
    step = scheduler.schedule()
    assert step.drafts is None
    assert step.new_rows[0].token_ids.tolist() == [*PROMPT, 20]


# Ends among several tokens


def ends_with(tokens: list[int], **fields: Any) -> EngineOutput:
    """The output of a step that verifies three guesses with ``tokens``, the request having 20 already."""
    scheduler = guessing([21, 22, 23], **fields)
    step = scheduler.schedule()
    (output,) = scheduler.update(step, verified(step, [tokens]))
    scheduler.check_integrity()
    if output.finish_reason is not None:
        assert scheduler.stats().num_free_blocks == scheduler.stats().num_total_blocks
        assert not scheduler.live_request_ids()
    return output


def test_tokens_behind_a_stop_are_dropped() -> None:
    output = ends_with([21, 22, 23, 24], sampling={"stop_token_ids": (22,)})
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([21, 22], FinishReason.STOP, 22)
    output = ends_with([21, 2, 23, 24], eos_token_ids=(2,))
    assert (output.new_token_ids, output.finish_reason, output.stop_reason) == ([21, 2], FinishReason.STOP, None)


def test_stops_within_min_tokens_do_not_count() -> None:
    output = ends_with([22, 22, 22, 22], sampling={"stop_token_ids": (22,), "min_tokens": 3})
    assert (output.new_token_ids, output.finish_reason) == ([22, 22, 22], FinishReason.STOP)


def test_the_length_limit_ends_a_sequence_among_several_tokens() -> None:
    """P3.7: also when all guesses were right, no token beyond max_tokens is told."""
    output = ends_with([21, 22, 23, 24], max_tokens=5)
    assert (output.new_token_ids, output.finish_reason) == ([21, 22, 23, 24], FinishReason.LENGTH)
    output = ends_with([21, 22, 23], max_tokens=4)
    assert (output.new_token_ids, output.finish_reason) == ([21, 22, 23], FinishReason.LENGTH)
    output = ends_with([21, 22], max_tokens=5)
    assert (output.new_token_ids, output.finish_reason) == ([21, 22], None)


def test_log_probabilities_of_several_tokens_come_in_order_and_stop_with_the_sequence() -> None:
    for stops, count in (((), 4), ((22,), 2)):
        scheduler = guessing([21, 22, 23], sampling={"logprobs": 0, "stop_token_ids": stops})
        step = scheduler.schedule()
        arrays = LogprobArrays(
            rows=np.zeros(4, dtype=np.int32),
            token_ids=np.asarray([[21], [22], [23], [24]], dtype=np.int32),
            logprobs=np.asarray([[-1.0], [-2.0], [-3.0], [-4.0]], dtype=np.float32),
            ranks=np.ones(4, dtype=np.int32),
        )
        (output,) = scheduler.update(step, verified(step, [[21, 22, 23, 24]], logprobs=arrays))
        assert output.logprobs is not None
        assert [entry.token_ids[0] for entry in output.logprobs] == [21, 22, 23, 24][:count]
        assert [entry.logprobs[0] for entry in output.logprobs] == [-1.0, -2.0, -3.0, -4.0][:count]


@pytest.mark.parametrize(
    ("tokens", "drafts", "text"),
    [
        ([[21, 22, 23, 24, 25]], (), "5 tokens sampled, 1 to 4 expected"),
        ([[]], (), "0 tokens sampled, 1 to 4 expected"),
        ([[21]], [[1], [2]], "2 counts of them for 1 rows"),
    ],
)
def test_outputs_that_cannot_be_right_are_refused(tokens: list[list[int]], drafts: list[list[int]], text: str) -> None:
    scheduler = guessing([21, 22, 23])
    step = scheduler.schedule()
    with pytest.raises(RuntimeError, match=text):
        scheduler.update(step, verified(step, tokens, drafts))


# Several steps under way


def test_guesses_for_a_step_that_is_under_way_come_too_late() -> None:
    """R3.96: the step after the sample was planned without them, so they fit nowhere any more."""
    scheduler = make_scheduler(max_inflight_steps=2)
    scheduler.add(request("a", PROMPT, max_tokens=9))
    first = scheduler.schedule()
    second = scheduler.schedule()
    scheduler.update(first, verified(first, [[20]], [[21, 22]]))
    assert scheduler._state.live["a"].num_tokens_with_drafts == 11
    scheduler.update(second, verified(second, [[21]], [[22, 23]]))
    assert scheduler._state.live["a"].num_tokens_with_drafts == 14
    scheduler.check_integrity()


def test_steps_are_planned_with_guesses_that_only_the_worker_knows() -> None:
    """R3.44, R3.81: ids of -1; counters take them as right until the output says otherwise."""
    scheduler = make_scheduler(max_inflight_steps=2, extensions=(Speculator(),))
    scheduler.add(request("a", PROMPT, max_tokens=20))
    live = scheduler._state.live["a"]
    first = scheduler.schedule()
    second = scheduler.schedule()
    assert first.drafts is None
    assert second.drafts is not None
    assert (second.drafts.counts.tolist(), second.drafts.ids.tolist()) == ([3], [-1, -1, -1])
    assert (live.num_computed_tokens, live.num_placeholders) == (14, 5)
    scheduler.update(first, verified(first, [[20]], [[-1, -1, -1]]))
    third = scheduler.schedule()
    scheduler.check_integrity()
    assert (third.num_computed_tokens.tolist(), third.num_scheduled_tokens.tolist()) == ([14], [4])
    scheduler.update(second, verified(second, [[21, 22]], [[-1, -1, -1]]))
    scheduler.check_integrity()
    # Two guesses of the second step were refused, so the third starts two tokens earlier than it was told.
    assert (live.num_tokens, live.num_computed_tokens, live.num_placeholders) == (13, 16, 4)
    scheduler.update(third, verified(third, [[23]], [[-1, -1]]))
    scheduler.check_integrity()
    assert (live.num_tokens, live.num_computed_tokens, live.num_placeholders) == (14, 13, 0)
    step = scheduler.schedule()
    assert step.drafts is not None
    assert step.drafts.counts.tolist() == [2], "the worker had fewer than expected, and said so in time"


@pytest.mark.parametrize("depth", [1, 2, 3])
@pytest.mark.parametrize("on_worker", [False, True])
@pytest.mark.parametrize("right", [[0], [3], [1, 2], [0, 3, 1]])
def test_tokens_do_not_depend_on_guesses(depth: int, on_worker: bool, right: list[int]) -> None:
    """I3.8, I3.6: whatever is guessed, refused, preempted and under way."""
    for num_blocks in (12, 64):
        loop = make_loop(right, depth, on_worker=on_worker, num_blocks=num_blocks)
        prompts = {f"r{i}": [*PROMPT[: 3 + 2 * i], 50 + i % 2] for i in range(5)}
        for name, prompt in prompts.items():
            loop.add(request(name, prompt, max_tokens=9))
        loop.run()
        assert loop.tokens == {name: expected(prompt, 9) for name, prompt in prompts.items()}
        loop.check_empty()


def test_right_guesses_save_steps() -> None:
    def num_steps(right: list[int]) -> int:
        loop = make_loop(right)
        loop.add(request("a", PROMPT, max_tokens=13))
        loop.run()
        assert loop.tokens["a"] == expected(PROMPT, 13)
        return len([step for step in loop.rules.steps if step.num_rows])

    assert (num_steps([0]), num_steps([1]), num_steps([3])) == (13, 7, 4)


# Guesses that the model appends inside the batch


def test_rows_leave_room_for_guesses_that_the_model_appends() -> None:
    """R3.31, R3.45: each row takes its draft slots out of the input budget besides its tokens."""
    scheduler = make_scheduler(
        max_num_batched_tokens=10, max_scheduled_tokens=6, extensions=(Speculator(),), max_num_seqs=4
    )
    for i in range(3):
        scheduler.add(request(f"r{i}", [40 + i, 5]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [2, 2], "2 + 3 and 2 + 3 fill the batch"
    scheduler.update(step, verified(step, [[20], [20]]))
    step = scheduler.schedule()
    assert step.num_scheduled_tokens.tolist() == [1, 1]
    scheduler.update(step, verified(step, [[20], [20]]))
    scheduler._state.limits = limits(max_num_batched_tokens=7, max_scheduled_tokens=6)
    assert scheduler.schedule().num_scheduled_tokens.tolist() == [1]


def test_the_scheduled_tokens_have_a_budget_of_their_own() -> None:
    """R3.31, I3.4."""
    scheduler = make_scheduler(max_num_batched_tokens=16, max_scheduled_tokens=6, extensions=(Speculator(),))
    scheduler.add(request("a", PROMPT))
    step = scheduler.schedule()
    assert step.num_tokens == 6
    scheduler.update(step, verified(step, [[]]))
    assert scheduler.schedule().num_tokens == 4


def test_the_worker_refuses_guesses_it_did_not_make() -> None:
    """The fake itself: a scheduler that makes guesses up is found out."""
    loop = make_loop([3])
    loop.add(request("a", PROMPT, max_tokens=9))
    loop.advance()
    scheduler = loop.scheduler
    assert isinstance(scheduler, BatchScheduler)
    scheduler._state.table.drafts[0, 0] += 1
    with pytest.raises(AssertionError, match="were guessed"):
        loop.advance()


def test_common_blocks_and_guesses_of_two_groups() -> None:
    """R3.15, R3.95: block lists per group cover guesses in both."""
    scheduler = make_scheduler(kv_cache=kv_config(64, 4, 8))
    scheduler.add(request("a", PROMPT, max_tokens=9))
    step = scheduler.schedule()
    scheduler.update(step, verified(step, [[20]], [[21, 22, 23]]))
    step = scheduler.schedule()
    assert [update.counts.tolist() for update in step.new_blocks] == [[1], [0]]
    scheduler.update(step, verified(step, [[21, 22, 23, 24]], [[25, 26, 27]]))
    step = scheduler.schedule()
    assert [update.counts.tolist() for update in step.new_blocks] == [[1], [1]]
    scheduler.check_integrity()


def test_guesses_that_leave_no_room_for_a_token_end_the_request_at_once() -> None:
    """R3.31: what remains of the input budget beside them would be nothing in every step."""
    scheduler = make_scheduler(20, extensions=(Speculator(),), max_num_batched_tokens=3, max_scheduled_tokens=1)
    refused = scheduler.add(request("a", PROMPT))
    assert refused is not None
    assert refused.finish_reason is FinishReason.ERROR
    assert refused.error is not None
    assert "max_num_batched_tokens (3)" in refused.error
    assert not scheduler.has_work()
