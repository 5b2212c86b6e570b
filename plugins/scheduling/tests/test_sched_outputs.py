"""How requests end and what their outputs carry."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from hardpoint.interfaces import EngineOutput, FinishReason, LogprobArrays, PauseMode, RowFailure
from sched_support import answer, expected, make_loop, make_scheduler, request

PROMPT = list(range(3, 13))


def finish_reasons(outputs: list[EngineOutput]) -> list[FinishReason]:
    return [output.finish_reason for output in outputs if output.finish_reason is not None]


# Ends


def stop_case(tokens: list[int], **fields: Any) -> list[EngineOutput]:
    """Outputs of one request whose worker says ``tokens``."""
    scheduler = make_scheduler()
    scheduler.add(request("r", [4, 5], **fields))
    outputs = []
    for token in tokens:
        step = scheduler.schedule()
        outputs.extend(scheduler.update(step, answer(step, token)))
        scheduler.check_integrity()
    assert scheduler.stats().num_running == 0
    assert scheduler.stats().num_free_blocks == scheduler.stats().num_total_blocks
    return outputs


def test_end_of_sequence_and_stop_ids() -> None:
    outputs = stop_case([9, 2], max_tokens=9, eos_token_ids=(1, 2))
    assert [(o.new_token_ids, o.finish_reason, o.stop_reason) for o in outputs] == [
        ([9], None, None),
        ([2], FinishReason.STOP, None),
    ]
    outputs = stop_case([9, 7], max_tokens=9, sampling={"stop_token_ids": (7,)})
    assert (outputs[-1].finish_reason, outputs[-1].stop_reason) == (FinishReason.STOP, 7)


def test_ignored_end_of_sequence_still_stops_as_a_stop_id() -> None:
    outputs = stop_case([2, 2, 2], max_tokens=3, eos_token_ids=(2,), sampling={"ignore_eos": True})
    assert finish_reasons(outputs) == [FinishReason.LENGTH]
    outputs = stop_case([2], eos_token_ids=(2,), sampling={"ignore_eos": True, "stop_token_ids": (2,)})
    assert outputs[0].stop_reason == 2


def test_stops_count_only_after_min_tokens() -> None:
    outputs = stop_case([2, 7, 2], max_tokens=9, eos_token_ids=(2,), sampling={"min_tokens": 2, "stop_token_ids": (7,)})
    assert len(outputs) == 3
    assert finish_reasons(outputs) == [FinishReason.STOP]


def test_a_stop_within_min_tokens_is_a_token_like_any_other_also_in_the_first_output() -> None:
    """Outputs that carry more than their token are looked at one by one; the same rule holds there."""
    outputs = stop_case([2, 2], max_tokens=9, eos_token_ids=(2,), sampling={"min_tokens": 1, "logprobs": 0})
    assert [output.finish_reason for output in outputs] == [None, FinishReason.STOP]


def test_a_stop_on_the_last_allowed_token_is_a_stop() -> None:
    outputs = stop_case([9, 2], max_tokens=2, eos_token_ids=(2,))
    assert finish_reasons(outputs) == [FinishReason.STOP]


def test_more_stop_ids_than_the_array_holds() -> None:
    outputs = stop_case([9, 9, 39], max_tokens=9, sampling={"stop_token_ids": tuple(range(20, 40))})
    assert (len(outputs), outputs[-1].stop_reason) == (3, 39)


def test_length_limits() -> None:
    """max_tokens, the context length, and what the pool holds for one sequence."""
    assert len(stop_case([9, 9, 9], max_tokens=3)) == 3
    for fields, count in (({"max_model_len": 8}, 6), ({"num_blocks": 3}, 7)):
        loop = make_loop(**fields)
        loop.scheduler.add(request("r", [4, 5], max_tokens=None))
        loop.run()
        assert loop.tokens("r") == expected([4, 5], count)
        assert finish_reasons(loop.outputs["r"]) == [FinishReason.LENGTH]


def test_the_first_output_carries_what_is_said_once() -> None:
    scheduler = make_scheduler(clock=lambda: 123.0)
    scheduler.add(request("r", PROMPT, max_tokens=3))
    outputs = []
    for _ in range(3):
        step = scheduler.schedule()
        outputs.extend(scheduler.update(step, answer(step)))
    assert [o.first_scheduled_time for o in outputs] == [123.0, None, None]


# Ending from outside


def test_finishing_frees_blocks_and_reports_the_slot_once() -> None:
    loop = make_loop()
    loop.scheduler.add(request("a", PROMPT, max_tokens=50))
    loop.scheduler.add(request("w", PROMPT, max_tokens=50))
    loop.scheduler.set_pause(PauseMode.NONE)
    loop.step()
    ended = loop.scheduler.finish(["a", "a", "nobody", "w"], FinishReason.ABORT)
    assert [(o.request_id, o.finish_reason) for o in ended] == [("a", FinishReason.ABORT), ("w", FinishReason.ABORT)]
    assert loop.scheduler.finish(["a"], FinishReason.ABORT) == []
    assert loop.scheduler.has_work()
    assert sorted(loop.step().finished_slots.tolist()) == [0, 1]
    assert not loop.scheduler.has_work()
    assert loop.scheduler.schedule().finished_slots.tolist() == []
    assert loop.scheduler.stats().num_free_blocks == 63


def test_a_waiting_request_can_be_ended_without_a_step() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT))
    scheduler.finish(["a"], FinishReason.ABORT)
    assert not scheduler.has_work()
    scheduler.check_integrity()


def test_a_late_result_does_not_reach_the_next_owner_of_the_slot() -> None:
    scheduler = make_scheduler(max_num_seqs=1)
    scheduler.add(request("a", [4, 5]))
    late = scheduler.schedule()
    scheduler.finish(["a"], FinishReason.ABORT)
    scheduler.update(late, answer(late))
    scheduler.add(request("b", [4, 5]))
    step = scheduler.schedule()
    assert (step.slots.tolist(), step.generations.tolist()) == ([0], [2])
    assert step.finished_slots.tolist() == [0]


def test_a_deadline_ends_running_and_waiting_requests() -> None:
    now = [100.0]
    loop = make_loop(max_num_seqs=1, clock=lambda: now[0])
    loop.scheduler.add(request("runs", PROMPT, max_tokens=50, deadline=105.0))
    loop.scheduler.add(request("waits", PROMPT, max_tokens=50, deadline=105.0))
    loop.scheduler.add(request("stays", PROMPT, max_tokens=2, deadline=500.0))
    loop.step()
    now[0] = 105.0
    loop.step()
    for name in ("runs", "waits"):
        (end,) = loop.ends(name)
        assert end.finish_reason is FinishReason.ABORT
        assert end.error == "the deadline of the request has passed"
    loop.run()
    assert loop.tokens("stays") == expected(PROMPT, 2)


def test_deadlines_of_ended_requests_are_not_kept() -> None:
    """A limit of a day must not keep a day's requests."""
    scheduler = make_scheduler()
    for number in range(1_000):
        scheduler.add(request(f"r{number}", PROMPT, deadline=1e9))
        scheduler.finish([f"r{number}"], FinishReason.ABORT)
    assert len(scheduler._deadlines) < 100


def test_a_deadline_is_kept_while_everything_is_paused() -> None:
    now = [0.0]
    scheduler = make_scheduler(clock=lambda: now[0])
    scheduler.add(request("a", PROMPT, deadline=1.0))
    scheduler.set_pause(PauseMode.ALL)
    assert not scheduler.has_work()
    now[0] = 2.0
    assert scheduler.has_work()
    assert scheduler.schedule().is_empty
    assert finish_reasons(scheduler.take_outputs()) == [FinishReason.ABORT]
    assert scheduler.take_outputs() == []
    assert not scheduler.has_work()


# Failures


def test_a_failed_row_ends_alone_and_its_blocks_are_never_shared() -> None:
    scheduler = make_scheduler()
    for name in ("bad", "good"):
        scheduler.add(request(name, [*PROMPT, ord(name[0])], max_tokens=2))
    step = scheduler.schedule()
    output = answer(step)
    failed = answer(
        step,
        [50],
        failures=(RowFailure(0, 1, "not a number"), RowFailure(0, 9, "stale"), RowFailure(77, 1, "no such slot")),
    )
    failed = type(output)(
        **{
            name: getattr(failed, name) for name in failed.__struct_fields__ if name not in ("num_sampled", "token_ids")
        },
        num_sampled=np.asarray([0, 1], dtype=np.int32),
        token_ids=np.asarray([50], dtype=np.int32),
    )
    outputs = {o.request_id: o for o in scheduler.update(step, failed)}
    assert (outputs["bad"].finish_reason, outputs["bad"].error) == (FinishReason.ERROR, "not a number")
    assert outputs["good"].new_token_ids == [50]
    scheduler.check_integrity()
    scheduler.add(request("again", [*PROMPT, 5]))
    step = scheduler.schedule()
    assert step.num_computed_tokens.tolist()[-1] == 0


def test_a_failure_of_an_earlier_owner_does_not_end_the_present_one() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT, max_tokens=2))
    step = scheduler.schedule()
    stale = answer(step, failures=(RowFailure(0, 2, "stale"),))
    assert [output.finish_reason for output in scheduler.update(step, stale)] == [None]


def test_what_a_failed_row_wrote_is_not_found_even_if_its_request_ended_meanwhile() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("gone", PROMPT, max_tokens=2))
    step = scheduler.schedule()
    scheduler.finish(["gone"], FinishReason.ABORT)
    scheduler.update(step, answer(step, failures=(RowFailure(0, 1, "not a number"),)))
    scheduler.check_integrity()
    scheduler.add(request("next", PROMPT))
    assert scheduler.schedule().num_computed_tokens.tolist() == [0]


def test_outputs_that_do_not_fit_the_step_are_refused() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("a", PROMPT))
    step = scheduler.schedule()
    good = answer(step)
    fields = {name: getattr(good, name) for name in good.__struct_fields__}
    for change, text in (
        ({"step_id": 7}, "does not have the rows"),
        ({"slots": np.asarray([1], dtype=np.int32)}, "does not have the rows"),
        ({"num_sampled": np.zeros(1, dtype=np.int32), "token_ids": np.zeros(0, dtype=np.int32)}, "1 expected"),
        ({"token_ids": np.asarray([1, 2], dtype=np.int32)}, "2 token ids for 1 samples"),
        ({"token_ids": np.asarray([-1], dtype=np.int32)}, "-1 is negative"),
    ):
        fresh = make_scheduler()
        fresh.add(request("a", PROMPT))
        with pytest.raises(RuntimeError, match=text):
            fresh.update(fresh.schedule(), type(good)(**{**fields, **change}))
    scheduler.update(step, good)
    with pytest.raises(RuntimeError, match="oldest step under way is none"):
        scheduler.update(step, good)


# Log-probabilities


def test_logprobs_reach_the_rows_that_asked() -> None:
    scheduler = make_scheduler()
    scheduler.add(request("with", [4, 5], max_tokens=2, sampling={"logprobs": 1}))
    scheduler.add(request("without", [6, 5], max_tokens=2))
    for _ in range(2):
        step = scheduler.schedule()
        arrays = LogprobArrays(
            rows=np.asarray([0], dtype=np.int32),
            token_ids=np.asarray([[50, 8, -1]], dtype=np.int32),
            logprobs=np.asarray([[-0.5, -1.5, 0.0]], dtype=np.float32),
            ranks=np.asarray([2], dtype=np.int32),
        )
        outputs = {o.request_id: o for o in scheduler.update(step, answer(step, logprobs=arrays))}
        assert outputs["without"].logprobs is None
        found = outputs["with"].logprobs
        assert found is not None
        assert [(e.token_ids, e.logprobs, e.rank) for e in found] == [([50, 8], [-0.5, -1.5], 2)]


def test_prompt_logprobs_of_all_chunks_come_with_the_first_output() -> None:
    scheduler = make_scheduler(max_num_batched_tokens=4)
    scheduler.add(request("a", [4, 5, 6, 7, 8, 9], sampling={"prompt_logprobs": 0}))
    outputs = []
    for count, first in ((4, 5), (2, 9)):
        step = scheduler.schedule()
        assert step.num_tokens == count
        arrays = LogprobArrays(
            rows=np.zeros(count, dtype=np.int32),
            token_ids=np.arange(first, first + count, dtype=np.int32)[:, None],
            logprobs=np.full((count, 1), -1.0, dtype=np.float32),
            ranks=np.ones(count, dtype=np.int32),
        )
        outputs.extend(scheduler.update(step, answer(step, prompt_logprobs=arrays)))
    (output,) = outputs
    assert output.prompt_logprobs is not None
    assert output.prompt_logprobs[0] is None
    assert [e.token_ids[0] for e in output.prompt_logprobs if e is not None] == [5, 6, 7, 8, 9]
