"""The graph backend, over a device that takes notes: what surrounds a capture, and what is left when one fails."""

from __future__ import annotations

import gc
from functools import partial

import pytest
import torch

from gpu_doubles import RecordingDevice
from hardpoint.interfaces.plugin import declaration_of
from hardpoint_gpu.graphs import DeviceGraphBackend, GraphOptions, create

POOL = (0, 7)


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> RecordingDevice:
    # A whole test run's objects take long to go through, and none of them is the device's.
    monkeypatch.setattr(gc, "collect", lambda: 0)
    return RecordingDevice()


def test_a_capture_runs_on_a_stream_of_its_own_between_the_work_around_it(device: RecordingDevice) -> None:
    backend = DeviceGraphBackend(namespace=device)
    source = torch.zeros(2)

    def run() -> bool:
        device.calls.append("run")
        return gc.isenabled()

    graph = backend.capture(run, [source], POOL)
    assert device.calls == [
        ("synchronize", None),
        ("side", "waits for", "main"),
        ("begin", "side", POOL, "thread_local"),
        "run",
        "end",
        ("main", "waits for", "side"),
    ]
    assert graph.output is False, "the collector ran during the capture"
    assert gc.isenabled()
    assert graph.input_addresses == (source.data_ptr(),)


def test_a_recording_is_replayed_until_it_is_released(device: RecordingDevice) -> None:
    graph = DeviceGraphBackend(namespace=device).capture(lambda: 5, [], POOL)
    graph.replay()
    graph.release()
    graph.release()
    assert device.calls[-2:] == ["replay", "reset"]
    with pytest.raises(RuntimeError, match="released; capture it again"):
        graph.replay()


def test_what_the_call_raises_passes_and_nothing_stays(device: RecordingDevice) -> None:
    def fail() -> None:
        raise ZeroDivisionError("mine")

    backend = DeviceGraphBackend(namespace=device)
    device.fail_end = True  # ending a spoilt capture complains as well
    with pytest.raises(ZeroDivisionError, match="mine"):
        backend.capture(fail, [], POOL)
    assert device.calls[-3:] == ["end", "reset", ("main", "waits for", "side")]
    assert gc.isenabled()
    assert backend.refuse() is None


def test_a_capture_that_is_invalid_at_its_end_says_what_spoils_one(device: RecordingDevice) -> None:
    device.fail_end = True
    with pytest.raises(RuntimeError, match="capture was invalidated; the call waited for the device"):
        DeviceGraphBackend(namespace=device).capture(lambda: None, [], POOL)
    assert "reset" in device.calls


def test_it_refuses_within_a_capture_and_without_a_device(device: RecordingDevice) -> None:
    backend = DeviceGraphBackend(GraphOptions(capture_mode="relaxed"), device)
    backend.capture(lambda: None, [], POOL)
    assert ("begin", "side", POOL, "relaxed") in device.calls
    device.capturing = True
    with pytest.raises(RuntimeError, match="no graph can be captured now: a capture is going on already"):
        backend.capture(lambda: None, [], POOL)
    device.available = False
    assert backend.refuse() == "torch reaches no device that captures graphs"


def test_it_is_a_plugin() -> None:
    declaration = declaration_of(create)
    assert declaration is not None
    assert (declaration.kind, declaration.options) == ("graph_backend", GraphOptions)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device that captures graphs")
def test_a_real_recording_reads_new_contents_at_old_places() -> None:
    """Two shapes in one pool; each replay computes over what its inputs hold now."""
    backend, pool = DeviceGraphBackend(), torch.cuda.graph_pool_handle()
    inputs = [torch.zeros(size, device="cuda") for size in (64, 16)]
    graphs = [backend.capture(partial(torch.add, source, 1), [source], pool) for source in inputs]
    for value in (3.0, 4.0):
        for source, graph in zip(inputs, graphs, strict=True):
            source.fill_(value)
            graph.replay()
            assert graph.output.tolist() == [value + 1] * len(source)
    with pytest.raises(RuntimeError):
        backend.capture(lambda: inputs[0].sum().item(), inputs, pool)
    assert backend.refuse() is None
    for graph in graphs:
        graph.release()
