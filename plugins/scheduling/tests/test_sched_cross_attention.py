"""Models whose decoder attends to an encoder: encoders are planned without limits of their own."""

from __future__ import annotations

from typing import Any

import pytest

from hardpoint.errors import InvalidRequestError
from hardpoint.interfaces import (
    ENCODER_INPUTS,
    EncoderInputs,
    Feature,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    SchedulerOutput,
    spec_to_wire,
)
from hardpoint_scheduling.schedulers.scheduler import BatchScheduler
from kv_support import cross, full
from sched_support import answer, make_scheduler, request


def scheduler(num_blocks: int = 60, longest: int = 20, **limits: Any) -> BatchScheduler:
    groups = tuple(KVCacheGroup((f"layers.{i}",), spec_to_wire(one)) for i, one in enumerate((full(), cross(longest))))
    return make_scheduler(kv_cache=KVCacheConfig(num_blocks=num_blocks, groups=groups, tensors=()), **limits)


def add(made: BatchScheduler, name: str, length: int, content: str = "", max_tokens: int = 3) -> None:
    feature = Feature(modality="text", content_hash=content or name, offset=0, length=1, num_encoder_tokens=length)
    assert made.add(request(name, [3, 4], max_tokens=max_tokens, features=(feature,))) is None


def planned(step: SchedulerOutput) -> int:
    inputs = step.extensions.get(ENCODER_INPUTS)
    assert inputs is None or isinstance(inputs, EncoderInputs)
    return 0 if inputs is None else len(inputs.rows)


def run(made: BatchScheduler) -> list[FinishReason | None]:
    reasons: list[FinishReason | None] = []
    while made.has_work():
        step = made.schedule()
        reasons += [output.finish_reason for output in made.update(step, answer(step)) if output.finish_reason]
        made.check_integrity()
    return reasons


def test_an_encoder_runs_in_the_step_in_which_its_request_enters() -> None:
    made = scheduler(max_num_batched_tokens=8)
    add(made, "a", 7)
    add(made, "b", 13)
    add(made, "c", 5)
    first = made.schedule()
    # As much as the longest input in one step, since that is more than the step has tokens.
    assert (planned(first), [row.request_id for row in first.new_rows]) == (2, ["a", "b"])
    assert [len(row.block_ids[1]) for row in first.new_rows] == [2, 4]
    made.update(first, answer(first))
    second = made.schedule()
    assert (planned(second), [row.request_id for row in second.new_rows]) == (1, ["c"])
    made.update(second, answer(second))
    assert run(made) == [FinishReason.LENGTH] * 3
    assert made.stats().num_free_blocks == made.stats().num_total_blocks


def test_equal_inputs_are_planned_once() -> None:
    made = scheduler()
    for name in "ab":
        add(made, name, 9, content="the same")
    first = made.schedule()
    assert (planned(first), len(first.new_rows)) == (1, 2)


def test_whoever_is_preempted_gets_its_output_again_or_a_new_one() -> None:
    made = scheduler()
    add(made, "a", 9, max_tokens=9)
    first = made.schedule()
    made.update(first, answer(first))
    assert made.reset_prefix_cache(reset_running=True)
    again = made.schedule()
    assert [row.request_id for row in again.new_rows] == ["a"]
    assert again.num_computed_tokens.tolist() == [0]
    assert len(again.new_rows[0].block_ids[1]) == 3
    made.update(again, answer(again))
    assert run(made) == [FinishReason.LENGTH]


def test_no_prefix_is_found(caplog: Any) -> None:
    """What an encoder has seen is in no hash of the decoder's tokens, and the log says so."""
    with caplog.at_level("INFO", "hardpoint.plugin"):
        made = scheduler(prefix_caching=True)
    assert "every prompt will be computed" in caplog.text
    for name in "ab":
        add(made, name, 9, content="the same")
        run(made)
    assert made.stats().prefix_cache_hits == 0


def test_fewer_tokens_than_none_are_refused() -> None:
    """Or books would be kept of less than nothing."""
    made = scheduler()
    feature = Feature(modality="text", content_hash="x", offset=0, length=1, num_encoder_tokens=-3)
    with pytest.raises(InvalidRequestError, match="^the item at 0 has -3 encoder tokens"):
        made.add(request("a", [3, 4], features=(feature,)))
    add(made, "b", 4)
    assert run(made) == [FinishReason.LENGTH]
