"""Steps planned before the output of the one before them: the worker's own samples are what they go on with.

A scheduler that plans ahead does not know the last token of a row, nor whether the row failed or its request ended.
"""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.interfaces.request import AdapterRef, EngineRequest
from hardpoint.interfaces.step import RunnerOutput
from hardpoint.testing import FakeExecutor

PROMPT = [11, 12, 13, 14, 15, 16, 17]


def ahead(world: Any, worker: Any, records: list[EngineRequest], depth: int) -> dict[str, list[int]]:
    """All requests through a pipeline with ``depth`` steps under way."""
    scheduler = world.scheduler(max_tokens=5)
    pipeline = StepPipeline(scheduler, FakeExecutor(worker), max_inflight_steps=depth)
    tokens: dict[str, list[int]] = {record.request_id: [] for record in records}
    for record in records:
        assert scheduler.add(record) is None
    while pipeline.has_work():
        for output in pipeline.advance():
            tokens[output.request_id] += output.new_token_ids
    return tokens


@pytest.mark.parametrize("depth", [2, 3])
def test_tokens_do_not_depend_on_the_steps_under_way(world: Any, depth: int) -> None:
    """I3.8: also of rows that draw, whose stream goes by their own output positions (R6.18)."""
    worker = world.start()
    plain = [world.engine_request(f"p{i}", PROMPT[: i + 2]) for i in range(4)]
    drawn = [
        world.engine_request(f"d{i}", PROMPT[i:], temperature=1.3, seed=i, repetition_penalty=1.4) for i in range(2)
    ]
    assert ahead(world, worker, [*plain, *drawn], depth) == world.generate(
        world.start(), [*plain, *drawn], max_tokens=5
    )


def test_a_row_goes_on_with_the_token_it_sampled_itself(world: Any, make_step: Any, make_row: Any) -> None:
    """R3.44, R3.96: three steps are submitted, none tells the worker what an earlier one sampled."""
    worker = world.start()
    steps = [
        make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]),
        make_step(1, [(0, 1, 7, 1, True)]),
        make_step(2, [(0, 1, 8, 1, True)]),
    ]
    tokens = [int(worker.execute(step).token_ids[0]) for step in steps]
    assert tokens == world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=3)])["x"]


def nan_for_token(worker: Any, token: int) -> None:
    """Rows whose history holds ``token`` get logits that are not numbers."""
    with torch.no_grad():
        worker.loaded.model.table[token] = float("nan")
    table = worker.loaded.model.table[:token]
    worker.loaded.model.logits = lambda hidden: torch.nn.functional.linear(hidden, table)


def test_a_failed_row_fails_in_the_steps_planned_meanwhile_too(world: Any, make_step: Any, make_row: Any) -> None:
    """Class 32: nothing else is harmed by a row that goes on behind a token that never was."""
    alone = world.start()
    nan_for_token(alone, 36)
    expected = world.generate(alone, [world.engine_request("x", [5, 6], max_tokens=2)])["x"]
    worker = world.start()
    nan_for_token(worker, 36)
    rows = [make_row(0, [36, 1], [1, 3]), make_row(1, [5, 6], [2, 4])]
    outputs = [
        worker.execute(make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, True)], new_rows=rows)),
        worker.execute(make_step(1, [(0, 1, 2, 1, True), (1, 1, 2, 1, True)])),
    ]
    for output in outputs:
        assert output.num_sampled.tolist() == [0, 1]
        assert [(failure.slot, failure.generation) for failure in output.failures] == [(0, 1)]
        assert "not numbers" in output.failures[0].reason
    assert [int(output.token_ids[0]) for output in outputs] == expected
    fresh = make_row(0, [5, 6], [1, 3], generation=2)
    after = worker.execute(make_step(2, [(0, 2, 0, 2, True)], new_rows=[fresh], finished=[0, 1]))
    assert (after.token_ids.tolist(), after.failures) == (expected[:1], ()), "the slot's next owner is sound"


def test_a_refused_row_is_refused_in_every_step(world: Any, make_step: Any, make_row: Any) -> None:
    worker = world.start()
    odd = msgspec.structs.replace(make_row(0, [5], [1]), adapter=AdapterRef("mine", 1, "/x"))
    first = worker.execute(make_step(0, [(0, 1, 0, 1, True)], new_rows=[odd]))
    second = worker.execute(make_step(1, [(0, 1, 1, 1, True)]))
    for output in (first, second):
        assert isinstance(output, RunnerOutput)
        assert ["mine" in failure.reason for failure in output.failures] == [True]
        assert not output.num_sampled.any()


def test_a_surplus_step_of_an_ended_request_leaves_no_trace(world: Any, make_step: Any, make_row: Any) -> None:
    """The request ended with step 0; step 1 was under way already. Its slot and blocks go to another one in step 2."""
    worker = world.start()
    expected = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=1)])["x"]
    worker.execute(make_step(0, [(0, 1, 0, 3, True)], new_rows=[make_row(0, [3, 1, 4], [1, 2], logit_bias={4: 1e6})]))
    worker.execute(make_step(1, [(0, 1, 3, 1, True)]))
    row = make_row(0, PROMPT, [2, 1], generation=2)
    output = worker.execute(make_step(2, [(0, 2, 0, 7, True)], new_rows=[row], finished=[0]))
    assert output.token_ids.tolist() == expected
    assert worker.runner.state.slots.num_tokens[0] == len(PROMPT) + 1


def test_the_last_place_of_a_context_takes_a_surplus_token(world: Any, make_step: Any, make_row: Any) -> None:
    """R3.41: a request that ends with the context is not scheduled again, so one place more is enough."""
    worker = world.start()
    prompt = np.resize(PROMPT, world.max_len - 1).tolist()
    blocks = list(range(1, -(-world.max_len // world.block_size) + 1))
    starts = range(0, len(prompt), world.max_tokens)
    for step_id, start in enumerate(starts):
        count = min(world.max_tokens, len(prompt) - start)
        rows = [make_row(0, prompt, blocks)] if start == 0 else []
        worker.execute(make_step(step_id, [(0, 1, start, count, start + count == len(prompt))], new_rows=rows))
    output = worker.execute(make_step(9, [(0, 1, len(prompt), 1, True)]))
    assert output.num_sampled.tolist() == [1]
    assert worker.runner.state.slots.num_tokens[0] == world.max_len + 1
