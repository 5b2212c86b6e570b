"""The fake worker finds out what a scheduler does wrong with guesses."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from hardpoint.interfaces import KVCacheConfig, RunnerOutput, SamplingParams
from hardpoint.interfaces.step import BlockUpdate, NewRow, SchedulerOutput, TokenUpdate
from hardpoint.testing import FakeWorker, next_token
from hardpoint.testing.fake_worker import ScriptedDrafter

PROMPT = [5, 6, 7]


def ints(*values: int) -> np.ndarray:
    return np.asarray(values, dtype=np.int32)


def step(
    number: int, computed: int, scheduled: int, drafts: Sequence[int] = (), *, new: bool = False
) -> SchedulerOutput:
    row = NewRow(
        request_id="a",
        slot=0,
        generation=1,
        token_ids=ints(*PROMPT),
        num_prompt_tokens=3,
        block_ids=(ints(1, 2, 3, 4),),
        sampling=SamplingParams(temperature=0.0),
    )
    return SchedulerOutput(
        step_id=number,
        slots=ints(0),
        generations=ints(1),
        num_computed_tokens=ints(computed),
        num_scheduled_tokens=ints(scheduled),
        samples=np.asarray([True]),
        new_rows=(row,) if new else (),
        new_blocks=(BlockUpdate(ints(0), ints()),),
        finished_slots=ints(),
        preempted_slots=ints(),
        blocks_to_zero=ints(),
        num_common_prefix_blocks=(0,),
        num_tokens=scheduled,
        drafts=TokenUpdate(ints(len(drafts)), ints(*drafts)) if drafts else None,
    )


def started(pattern: Sequence[int], *, keeps_drafts: bool = False) -> tuple[FakeWorker, list[int]]:
    """A worker after the first sample, and its guesses as it told them."""
    worker = FakeWorker(drafter=ScriptedDrafter(3, pattern), keeps_drafts=keeps_drafts)
    worker.initialize_kv_cache(KVCacheConfig(num_blocks=5, groups=(), tensors=()))
    output = run(worker, step(0, 0, 3, new=True))
    assert output.drafts is not None
    return worker, output.drafts.ids.tolist()


def run(worker: FakeWorker, record: SchedulerOutput) -> RunnerOutput:
    output = worker.execute(record)
    assert isinstance(output, RunnerOutput)
    return output


def alone(count: int) -> list[int]:
    tokens = list(PROMPT)
    for _ in range(count):
        tokens.append(next_token(tokens, 97, 3))
    return tokens[3:]


def test_a_script_says_how_many_guesses_are_right() -> None:
    """By the length of the sequence."""
    for right in range(4):
        guesses = ScriptedDrafter(3, [9, right])(PROMPT)
        same = [guess == token for guess, token in zip(guesses, alone(3), strict=True)]
        assert same == [place < right for place in range(3)]


@pytest.mark.parametrize("right", [0, 1, 2, 3])
@pytest.mark.parametrize("keeps", [False, True])
def test_right_guesses_and_one_more_token_come_back(right: int, keeps: bool) -> None:
    worker, told = started([right], keeps_drafts=keeps)
    assert (set(told) == {-1}) == keeps
    output = run(worker, step(1, 3, 4, told))
    assert output.num_sampled.tolist() == [right + 1]
    assert output.token_ids.tolist() == alone(right + 2)[1:]


def test_a_row_that_counts_refused_guesses_as_right_starts_earlier() -> None:
    """A step that was planned before the refusal was known."""
    worker, told = started([1], keeps_drafts=True)
    run(worker, step(1, 3, 4, told))
    output = run(worker, step(2, 7, 1))
    assert output.token_ids.tolist() == alone(4)[3:]
    with pytest.raises(AssertionError, match="behind its last token"):
        run(worker, step(3, 12, 1))


def test_other_guesses_and_other_places_are_found_out() -> None:
    worker, told = started([3])
    with pytest.raises(AssertionError, match="were guessed"):
        worker.execute(step(1, 3, 4, [told[0] + 1, *told[1:]]))
    worker, told = started([3])
    with pytest.raises(AssertionError, match="before or behind"):
        worker.execute(step(1, 3, 3, told))
