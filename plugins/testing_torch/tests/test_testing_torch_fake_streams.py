"""The double of a device with queues shows what it is there to show."""

from __future__ import annotations

import gc
from typing import Any

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces import PendingOutput, RunnerOutput
from hardpoint.testing import FakeWorker
from hardpoint_testing_torch import FakeStreams, PromisingExecutor
from hardpoint_testing_torch.fake_streams import POISON


def test_copies_take_place_when_time_passes_and_in_order() -> None:
    streams = FakeStreams()
    stream = streams.create_copy_stream()
    sources = [torch.tensor([1, 2]), torch.tensor([True, False])]
    stream.wait_for_main()
    hosts = [stream.copy_to_host(source) for source in sources]
    event = stream.record_event(blocking=True)
    assert [host.tolist() for host in hosts] == [[POISON] * 2, [True, True]], "not written yet"
    streams.advance_to(1)
    assert hosts[0].tolist() == [1, 2]
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert hosts[1].tolist() == [True, False]
    assert streams.log == ["copies wait for main", "copy", "wait copies", "copy"]


def test_a_later_change_of_the_source_is_seen_by_a_copy_that_is_late() -> None:
    """As on a device, where only what is behind the copy on its own stream comes after it."""
    streams = FakeStreams()
    stream = streams.create_copy_stream()
    source = torch.tensor([1])
    stream.wait_for_main()
    host = stream.copy_to_host(source)
    source.fill_(2)
    streams.advance()
    assert host.tolist() == [2]


def test_memory_without_an_owner_is_spoilt() -> None:
    """P4.6, R4.72."""
    streams = FakeStreams()
    stream = streams.create_copy_stream()
    kept, dropped = torch.tensor([1, 2]), torch.tensor([3.0, 4.0])
    stream.wait_for_main()
    hosts = [stream.copy_to_host(kept), stream.copy_to_host(dropped)]
    del dropped
    gc.collect()
    streams.advance()
    assert [host.tolist() for host in hosts] == [[1, 2], [float(POISON)] * 2]


def test_each_batch_of_copies_has_to_wait_for_the_main_stream() -> None:
    """R4.70."""
    stream = FakeStreams().create_copy_stream()
    stream.wait_for_main()
    stream.copy_to_host(torch.zeros(1))
    stream.record_event(blocking=False)
    with pytest.raises(AssertionError, match="told to wait for the main stream"):
        stream.copy_to_host(torch.zeros(1))


def test_events_of_the_main_stream_are_done_at_once() -> None:
    event = FakeStreams().record_main()
    assert event.query()
    assert event.blocking


class _Late(PendingOutput):
    def __init__(self) -> None:
        self.num_taken = 0

    def result(self) -> RunnerOutput:
        self.num_taken += 1
        none: Any = torch.zeros(0, dtype=torch.int32).numpy()
        return RunnerOutput(step_id=1, slots=none, generations=none, num_sampled=none, token_ids=none)


def test_the_executor_takes_outputs_when_it_is_asked_for_them() -> None:
    late = _Late()

    class Promising(FakeWorker):
        def execute(self, step: Any) -> Any:
            return late

    worker = Promising()
    executor = PromisingExecutor(worker)
    step: Any = None
    future = executor.execute(step)
    assert not future.done()
    assert late.num_taken == 0
    assert future.result() is future.result()
    assert late.num_taken == 1
    assert executor.collective_rpc("supported_tasks") == [worker.supported_tasks()]
    with pytest.raises(ConfigError, match="'sing' is not callable; allowed: .*execute"):
        executor.collective_rpc("sing")
