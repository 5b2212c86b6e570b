"""The fake graph backend: what a replay repeats, and what a capture refuses."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from hardpoint.interfaces import NoOptions, PluginContext
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_platform import FakeGraphPool, FakePlatform
from hardpoint_testing_torch import FakeGraphBackend
from hardpoint_testing_torch.fake_graph_backend import create


def layers(x: torch.Tensor, weight: torch.Tensor, cache: torch.Tensor) -> dict[str, torch.Tensor]:
    """Reads, writes in place, allocates, and returns views."""
    hidden = torch.nn.functional.silu(x @ weight)
    cache[1:3] += hidden.sum(0)
    return {"hidden": hidden[:, ::2], "cache": cache}


def test_a_replay_equals_an_eager_call_on_the_new_contents() -> None:
    """I9.2."""
    torch.manual_seed(0)
    x, weight, cache = torch.randn(4, 6), torch.randn(6, 6), torch.zeros(3, 6)
    graph = FakeGraphBackend().capture(lambda: layers(x, weight, cache), [x], FakeGraphPool())
    places = {name: tensor.data_ptr() for name, tensor in graph.output.items()}
    for _ in range(3):
        x.copy_(torch.randn(4, 6))
        weight.mul_(0.9)
        wanted = layers(x.clone(), weight.clone(), cache.clone())
        graph.replay()
        for name, tensor in graph.output.items():
            torch.testing.assert_close(tensor, wanted[name])
    assert {name: tensor.data_ptr() for name, tensor in graph.output.items()} == places
    assert graph.num_replays == 3


def test_the_hosts_part_is_not_repeated() -> None:
    """What Python decided at capture time stays decided."""
    x, scale, calls = torch.ones(2), [2.0], list[int]()

    def run() -> torch.Tensor:
        calls.append(1)
        return x * scale[0]

    graph = FakeGraphBackend().capture(run, [x], None)
    scale[0] = 100.0
    x.fill_(3.0)
    graph.replay()
    assert graph.output.tolist() == [6.0, 6.0]
    assert calls == [1]


def test_moved_inputs_are_found() -> None:
    """R4.55, P9.13, R9.48: a device would go on reading the old place."""
    x = torch.ones(2)
    graph = FakeGraphBackend().capture(lambda: x + 1, [torch.zeros(1), x], None)
    assert graph.input_addresses[1] == x.data_ptr()
    x.set_(torch.ones(2).untyped_storage())
    with pytest.raises(RuntimeError, match=r"inputs \[1\] moved"):
        graph.replay()


@pytest.mark.parametrize(
    ("run", "operator"),
    [
        (lambda x: x + 1, "aten::add"),
        (lambda x: torch.zeros(3), "aten::zeros"),
        (lambda x: x.to(torch.float64), "aten::_to_copy"),
        (lambda x: x.expand(2, 4).contiguous(), "aten::clone"),
    ],
)
def test_allocation_can_be_forbidden(run: Callable[[torch.Tensor], torch.Tensor], operator: str) -> None:
    """R4.55, R5.38: persistent buffers are written, never replaced."""
    x = torch.ones(4)
    backend = FakeGraphBackend(forbid_allocation=True)
    with pytest.raises(RuntimeError, match=rf"{operator}.* allocates \d+ bytes during the capture"):
        backend.capture(lambda: run(x), [x], None)
    assert backend.refuse() is None
    assert backend.graphs == []


def test_work_in_persistent_buffers_needs_no_allocation() -> None:
    x, buffer = torch.ones(4), torch.zeros(8)

    def run() -> torch.Tensor:
        torch.mul(x, 3, out=buffer[:4])
        buffer[4:].zero_()
        return buffer.view(2, 4)[0]

    graph = FakeGraphBackend(forbid_allocation=True).capture(run, [x], None)
    assert graph.allocated_bytes == 0
    x.fill_(5.0)
    graph.replay()
    assert graph.output.tolist() == [15.0] * 4


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum().item(),
        lambda x: bool(x[0] > 0),
        lambda x: torch.equal(x, x),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: x.unique(),
    ],
)
def test_waiting_for_the_device_is_refused(run: Callable[[torch.Tensor], object]) -> None:
    x = torch.ones(4)
    with pytest.raises(RuntimeError, match="waits for the device"):
        FakeGraphBackend().capture(lambda: run(x), [x], None)


def test_gathering_by_indices_is_no_waiting() -> None:
    x, rows = torch.arange(4.0), torch.tensor([3, 1])
    graph = FakeGraphBackend().capture(lambda: x[rows], [x, rows], None)
    rows.copy_(torch.tensor([0, 2]))
    graph.replay()
    assert graph.output.tolist() == [0.0, 2.0]


def test_one_capture_at_a_time() -> None:
    backend = FakeGraphBackend()
    x = torch.ones(1)
    with pytest.raises(RuntimeError, match="a capture is going on already"):
        backend.capture(lambda: backend.capture(lambda: x + 1, [x], None), [x], None)
    assert backend.refuse() is None


def test_what_the_call_raises_passes_and_leaves_nothing() -> None:
    backend, pool = FakeGraphBackend(), FakeGraphPool()

    def run() -> None:
        torch.zeros(100)
        raise KeyError("mine")

    with pytest.raises(KeyError, match="mine"):
        backend.capture(run, [], pool)
    assert (backend.graphs, pool.bytes_in_use) == ([], 0)


def test_memory_belongs_to_the_pool_until_it_is_released() -> None:
    """R9.52, R9.53: one pool for all graphs of the process."""
    pool = FakePlatform.graph_pool()
    before = pool.bytes_in_use
    backend, x = FakeGraphBackend(), torch.ones(256)
    graphs = [backend.capture(lambda: x * 2, [x], pool) for _ in range(3)]
    assert [graph.allocated_bytes for graph in graphs] == [1024] * 3
    assert pool.bytes_in_use - before == 3 * 1024
    graphs[0].release()
    graphs[0].release()
    assert pool.bytes_in_use - before == 2 * 1024
    with pytest.raises(RuntimeError, match="was released"):
        graphs[0].replay()
    graphs[1].replay()


def test_it_can_be_installed_as_a_plugin() -> None:
    context = PluginContext("fake", 1, frozenset({ProcessRole.WORKER}))
    assert create(context, NoOptions()).refuse() is None
