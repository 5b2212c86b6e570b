"""Outputs that are promises, on a device whose copies are done when the test says so."""

from __future__ import annotations

import threading
import weakref
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint.interfaces.step import Deferred, GrammarMask, RunnerOutput, TokenUpdate
from hardpoint.interfaces.worker import PendingOutput
from hardpoint_testing_torch.fake_streams import POISON, FakeStreams
from hardpoint_torch_runtime.runner.assembly import RunnerParts
from hardpoint_torch_runtime.runner.async_output import AsyncOutput, DeviceCopies
from hardpoint_torch_runtime.runner.streams import ImmediateStreams, device_streams
from hardpoint_torch_runtime.worker import TorchWorker, TorchWorkerOptions

PROMPT = [11, 12, 13, 14, 15, 16, 17]
COPIES = "wait copies"


class Worker(TorchWorker):
    """With the streams of a test, and a note of each forward among what these log."""

    streams: FakeStreams

    def runner_parts(self) -> RunnerParts:
        return replace(super().runner_parts(), streams=self.streams)


def start(world: Any) -> tuple[Worker, FakeStreams]:
    worker = Worker(world.context(), TorchWorkerOptions())
    worker.streams = streams = FakeStreams()
    world.boot(worker)
    model: Any = worker.loaded.model
    forward = model.forward

    def noting(*args: Any, **fields: Any) -> torch.Tensor:
        streams.log.append("forward")
        hidden: torch.Tensor = forward(*args, **fields)
        return hidden

    model.forward = noting
    return worker, streams


def promise(answer: RunnerOutput | Deferred | PendingOutput) -> PendingOutput:
    assert isinstance(answer, PendingOutput)
    return answer


def counts(value: int, rows: int = 1) -> np.ndarray:
    return np.full(rows, value, dtype=np.int32)


# Copies


def test_copies_wait_for_the_forward_and_the_event_for_the_copies() -> None:
    """R4.70, R4.71, P4.7: the order of things on the device, and that a waiting thread sleeps."""
    streams = FakeStreams()
    copies = DeviceCopies({"a": torch.arange(3), "b": torch.ones(2)}, streams.create_copy_stream())
    assert streams.log == ["copies wait for main"]
    (event,) = streams.events
    assert event.blocking
    assert event.place == streams.end == 2
    done = []
    for place in range(3):
        streams.advance_to(place)
        done.append(copies.is_done)
    assert done == [False, False, True]
    assert {name: array.tolist() for name, array in copies.wait().items()} == {"a": [0, 1, 2], "b": [1.0, 1.0]}


def test_nothing_is_copied_before_the_stream_waits_for_the_forward() -> None:
    """R4.70: the double itself refuses the wrong order."""
    with pytest.raises(AssertionError, match="before its stream was told"):
        FakeStreams().create_copy_stream().copy_to_host(torch.zeros(1))


def test_sources_live_until_the_copies_are_done_and_no_longer() -> None:
    """R4.72, P4.6: nobody else holds them meanwhile."""
    streams = FakeStreams()
    source = torch.arange(4)
    watched = weakref.ref(source)
    copies = DeviceCopies({"a": source}, streams.create_copy_stream())
    del source
    assert watched() is not None
    assert copies.wait()["a"].tolist() == [0, 1, 2, 3]
    assert watched() is None
    assert copies.wait()["a"].tolist() == [0, 1, 2, 3], "what is on the host stays readable"


def test_memory_let_go_before_the_copy_is_somebody_elses() -> None:
    """P4.6: the double shows what the reversed order would do."""
    streams = FakeStreams()
    copies = DeviceCopies({"a": torch.arange(4)}, streams.create_copy_stream())
    copies._sources = {}
    assert copies.wait()["a"].tolist() == [POISON] * 4


def test_an_output_is_taken_once_and_on_any_thread() -> None:
    nothing = np.zeros(0, dtype=np.int32)
    output = AsyncOutput(
        lambda: RunnerOutput(step_id=3, slots=nothing, generations=nothing, num_sampled=nothing, token_ids=nothing)
    )
    taken: list[RunnerOutput] = []
    thread = threading.Thread(target=lambda: taken.append(output.result()))
    thread.start()
    thread.join()
    assert [result.step_id for result in taken] == [3]
    with pytest.raises(RuntimeError, match="taken already"):
        output.result()


def test_a_platform_may_bring_its_own_streams() -> None:
    class Own:
        def create_device_streams(self, device: torch.device) -> FakeStreams:
            del device
            return streams

    streams = FakeStreams()
    cpu = torch.device("cpu")
    assert device_streams(Own(), cpu) is streams
    immediate = device_streams(object(), cpu)
    assert isinstance(immediate, ImmediateStreams)
    copies = DeviceCopies({"a": torch.arange(2)}, immediate.create_copy_stream())
    assert copies.is_done
    assert copies.wait()["a"].tolist() == [0, 1]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.accelerator.is_available(), reason="no accelerator")
def test_copies_on_a_real_device_hold_what_was_computed() -> None:
    """R4.70, R4.71, R4.72: sources are dropped by everybody else while the device is busy, and their memory is asked
    for again at once."""
    device = torch.accelerator.current_accelerator()
    assert device is not None
    stream = device_streams(object(), device).create_copy_stream()
    batches = []
    for number in range(20):
        busy = torch.ones(2048, 2048, device=device)
        busy = busy @ busy
        source = torch.full((1024,), number, device=device) + (busy[0, :1024] * 0).to(torch.int64)
        batches.append(DeviceCopies({"a": source}, stream))
        del source, busy
    for number, copies in enumerate(batches):
        assert (copies.wait()["a"] == number).all()
        assert copies.is_done


# Steps


def test_steps_are_submitted_without_waiting_for_those_before(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.41, R4.44, R4.72: three steps are under way, and the host, which has seen no token of them, waits for none
    of their copies."""
    worker, streams = start(world)
    steps = [
        make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]),
        make_step(1, [(0, 1, 7, 1, True)]),
        make_step(2, [(0, 1, 8, 1, True)]),
    ]
    outputs = [promise(worker.execute(step)) for step in steps]
    assert COPIES not in streams.log
    assert streams.log.count("forward") == 3
    assert "copy" not in streams.log
    slots = worker.runner.state.slots
    assert (slots.num_tokens[0], slots.num_pending[0]) == (10, 3)
    tokens = [int(output.result().token_ids[0]) for output in outputs]
    assert tokens == world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=3)])["x"]
    assert all(event.blocking for event in streams.events)
    worker.execute(make_step(3, [(0, 1, 9, 1, True)]))
    assert slots.token_ids[0, 7:10].tolist() == tokens, "what has arrived is known from the next step on"
    assert (slots.num_tokens[0], slots.num_pending[0]) == (11, 1)


def test_inputs_are_not_written_while_the_device_may_read_them(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.55: the buffers stay where they are, so the host waits until the last step's uploads are done."""
    worker, streams = start(world)
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]))
    assert "wait uploads" not in streams.log
    worker.execute(make_step(1, [(0, 1, 7, 1, True)]))
    assert streams.log.index("forward") < streams.log.index("wait uploads")
    assert streams.log[-2:] == ["forward", "copies wait for main"]


def test_rows_without_a_sample_come_back_empty(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.73: also where no row of the step has one."""
    worker, _ = start(world)
    rows = [make_row(0, PROMPT, [1, 2]), make_row(1, [5, 6], [3])]
    first = worker.execute(make_step(0, [(0, 1, 0, 4, False), (1, 1, 0, 2, True)], new_rows=rows))
    output = promise(first).result()
    assert output.num_sampled.tolist() == [0, 1]
    assert len(output.token_ids) == 1
    second = worker.execute(make_step(1, [(0, 1, 4, 2, False)]))
    empty = second.result() if isinstance(second, PendingOutput) else second
    assert isinstance(empty, RunnerOutput)
    assert (empty.num_sampled.tolist(), empty.token_ids.tolist()) == ([0], [])


def test_device_memory_of_a_step_is_let_go_with_its_output(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.72: by the output itself, although the worker has the step on its list until the next one."""
    worker, streams = start(world)
    output = promise(
        worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3], logprobs=2)]))
    )
    backlog = worker.runner.state.backlog
    assert backlog is not None
    (record,) = backlog.steps
    kept = [weakref.ref(tensor) for tensor in record.copies._sources.values()]
    assert len(kept) > 4
    streams.advance()
    assert all(ref() is not None for ref in kept)
    logprobs = output.result().logprobs
    assert logprobs is not None
    assert logprobs.token_ids.shape == (1, 3)
    del record, logprobs
    assert all(ref() is None for ref in kept)


@pytest.mark.parametrize("sampling", [{"repetition_penalty": 1.5}, {"bad_words_token_ids": ((3, 4),)}])
def test_parameters_that_look_at_tokens_wait_behind_the_launch(
    world: Any, make_step: Any, make_row: Any, sampling: dict[str, Any]
) -> None:
    """P4.8: the forward does not wait for the tokens that only sampling needs."""
    worker, streams = start(world)
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3], **sampling)]))
    streams.log.clear()
    worker.execute(make_step(1, [(0, 1, 7, 1, True)]))
    assert [entry for entry in streams.log if entry in ("forward", COPIES)] == ["forward", COPIES]


@pytest.mark.parametrize("right", [0, 1, 2])
def test_drafts_are_corrected_behind_the_launch(world: Any, make_step: Any, make_row: Any, right: int) -> None:
    """R4.37, P4.8: the next forward is submitted as if all were right, and reads where rows really are; then the host
    waits, and takes back what was refused before the step after that."""
    solo = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=6)])["x"]
    worker, streams = start(world)
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3, 4])]))
    guesses = [*solo[1 : 1 + right], *[(token + 1) % 37 for token in solo[1 + right : 3]]]
    first = promise(
        worker.execute(
            make_step(1, [(0, 1, 7, 3, True)], drafts=TokenUpdate(counts(2), np.asarray(guesses, dtype=np.int32)))
        )
    )
    slots = worker.runner.state.slots
    assert (slots.num_tokens[0], slots.num_pending[0]) == (11, 4), "both drafts count as right"
    streams.log.clear()
    second = promise(worker.execute(make_step(2, [(0, 1, 10, 1, True)])))
    assert [entry for entry in streams.log if entry in ("forward", COPIES)] == ["forward", COPIES, COPIES]
    assert slots.num_tokens[0] == 7 + 1 + (right + 1) + 1
    assert (slots.num_pending[0], slots.num_refused[0]) == (1, 2 - right)
    assert first.result().token_ids.tolist() == solo[1 : right + 2]
    assert second.result().token_ids.tolist() == [solo[right + 2]]
    # Planned before the refusals were known: starts as many tokens later than the worker does.
    third = worker.execute(make_step(3, [(0, 1, 11, 1, True)]))
    assert promise(third).result().token_ids.tolist() == [solo[right + 3]]


def test_a_step_past_what_was_refused_is_none(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.37: only refused drafts may have made a scheduler count too much."""
    worker, _ = start(world)
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3, 4])]))
    drafts = TokenUpdate(counts(1), counts(36))
    promise(worker.execute(make_step(1, [(0, 1, 7, 2, True)], drafts=drafts))).result()
    with pytest.raises(RuntimeError, match="up to token 11, but 9 tokens are known"):
        worker.execute(make_step(2, [(0, 1, 10, 1, True)]))


def test_a_failed_row_fails_in_the_steps_submitted_meanwhile_too(world: Any, make_step: Any, make_row: Any) -> None:
    """Class 32: nobody knew when the second step was submitted, and its own logits are sound."""
    worker, _ = start(world)
    model: Any = worker.loaded.model
    logits = model.logits
    spoil = [True]

    def failing(hidden: torch.Tensor) -> torch.Tensor:
        found = logits(hidden).clone()
        if spoil.pop():
            found[0] = float("nan")
        return found

    model.logits = failing
    rows = [make_row(0, [5, 6], [1, 3]), make_row(1, [7, 8], [2, 4])]
    spoil[:] = [False, True]
    outputs = [
        promise(worker.execute(make_step(0, [(0, 1, 0, 2, True), (1, 1, 0, 2, True)], new_rows=rows))),
        promise(worker.execute(make_step(1, [(0, 1, 2, 1, True), (1, 1, 2, 1, True)]))),
    ]
    for output in (entry.result() for entry in outputs):
        assert output.num_sampled.tolist() == [0, 1]
        assert [(failure.slot, failure.generation) for failure in output.failures] == [(0, 1)]
        assert "not numbers" in output.failures[0].reason
    spoil[:] = [False]
    third = promise(worker.execute(make_step(2, [(0, 1, 3, 1, True), (1, 1, 3, 1, True)]))).result()
    assert third.num_sampled.tolist() == [0, 1]
    spoil[:] = [False]
    fresh = make_row(0, [5, 6], [1, 3], generation=2)
    after = promise(worker.execute(make_step(3, [(0, 2, 0, 2, True)], new_rows=[fresh], finished=[0, 1]))).result()
    assert (after.num_sampled.tolist(), after.failures) == ([1], ()), "the slot's next owner is sound"


def test_results_of_a_request_that_is_gone_touch_nobody(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.30, P4.5: its slot has a new owner when they arrive."""
    expected = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=2)])["x"]
    worker, _ = start(world)
    row = make_row(0, [3, 1, 4], [1, 2], logit_bias={4: 1e6}, request_id="same")
    worker.execute(make_step(0, [(0, 1, 0, 3, True)], new_rows=[row]))
    worker.execute(make_step(1, [(0, 1, 3, 1, True)]))
    again = make_row(0, PROMPT, [3, 4], generation=2, request_id="same")
    first = promise(worker.execute(make_step(2, [(0, 2, 0, 7, True)], new_rows=[again], finished=[0])))
    second = promise(worker.execute(make_step(3, [(0, 2, 7, 1, True)])))
    assert [*first.result().token_ids.tolist(), *second.result().token_ids.tolist()] == expected
    slots = worker.runner.state.slots
    worker.runner.state.settle()
    assert slots.token_ids[0, :9].tolist() == [*PROMPT, *expected]


def test_refusals_of_a_request_that_is_gone_move_nobody(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.37: its slot has a new owner, whose rows start where they start, while others' drafts are under way."""
    expected = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=3)])["x"]
    worker, _ = start(world)
    rows = [make_row(0, [3, 1, 4], [1, 2, 3]), make_row(1, [5, 9, 2], [4, 5, 6])]
    worker.execute(make_step(0, [(0, 1, 0, 3, True), (1, 1, 0, 3, True)], new_rows=rows))

    def missing(*numbers: int) -> TokenUpdate:
        return TokenUpdate(np.asarray(numbers, dtype=np.int32), np.full(sum(numbers), -1, dtype=np.int32))

    worker.execute(make_step(1, [(0, 1, 3, 3, True), (1, 1, 3, 3, True)], drafts=missing(2, 2)))
    fresh = make_row(0, PROMPT, [7, 8, 9], generation=2)
    rows_of = {"finished": [0], "new_rows": [fresh], "drafts": missing(0, 1)}
    outputs = [worker.execute(make_step(2, [(0, 2, 0, 7, True), (1, 1, 6, 2, True)], **rows_of))]
    outputs.append(worker.execute(make_step(3, [(0, 2, 7, 1, True), (1, 1, 8, 2, True)], drafts=missing(0, 1))))
    outputs.append(worker.execute(make_step(4, [(0, 2, 8, 1, True), (1, 1, 10, 2, True)], drafts=missing(0, 1))))
    assert [int(promise(output).result().token_ids[0]) for output in outputs] == expected


def test_a_deferred_step_is_answered_by_a_promise(world: Any, make_step: Any, make_row: Any) -> None:
    """R4.22, I4.6: execute and sample alternate here as well, and the mask decides."""
    worker, streams = start(world)
    step = make_step(0, [(0, 1, 0, 2, True)], new_rows=[make_row(0, [5, 6], [1])], defers_sampling=True)
    assert worker.execute(step) == Deferred(0)
    with pytest.raises(RuntimeError, match="step 0 still waits"):
        worker.execute(make_step(1))
    bits = np.zeros((1, 2), dtype=np.int32)
    bits[0, 0] = 1 << 17
    output = promise(worker.sample(0, GrammarMask(counts(0), bits)))
    assert COPIES not in streams.log
    assert output.result().token_ids.tolist() == [17]
    with pytest.raises(RuntimeError, match="waiting: none"):
        worker.sample(0, None)


def test_tokens_that_are_not_on_the_host_are_waited_for_where_only_it_could_give_them(
    world: Any, make_step: Any, make_row: Any
) -> None:
    """R4.45: a row that is computed anew, without leaving, reads samples that the device no longer holds."""
    solo = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=4)])["x"]
    worker, streams = start(world)
    worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]))
    worker.execute(make_step(1, [(0, 1, 7, 1, True)]))
    worker.execute(make_step(2, [(0, 1, 8, 1, True)]))
    output = promise(worker.execute(make_step(3, [(0, 1, 4, 6, True)])))
    assert streams.log.index(COPIES) < len(streams.log) - 1 - streams.log[::-1].index("forward")
    assert output.result().token_ids.tolist() == solo[3:4]


def test_the_installed_worker_answers_so_when_it_is_told_to(world: Any, make_step: Any, make_row: Any) -> None:
    expected = world.generate(world.start(), [world.engine_request("x", PROMPT, max_tokens=1)])["x"]
    for option, kind in ((None, RunnerOutput), (False, RunnerOutput), (True, PendingOutput)):
        worker = world.start(TorchWorkerOptions(asynchronous_output=option))
        answer = worker.execute(make_step(0, [(0, 1, 0, 7, True)], new_rows=[make_row(0, PROMPT, [1, 2, 3])]))
        assert isinstance(answer, kind)
        output = answer.result() if isinstance(answer, PendingOutput) else answer
        assert output.token_ids.tolist() == expected
