"""Graph capture without a device: records the operators of a call and repeats exactly those, on the same addresses.

As on a device, the host's part happens once. Python branches are frozen, numbers read at capture time stay, and only
the contents of tensors differ between replays; so whatever would go wrong there goes wrong here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, TypeVar

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_iter

from hardpoint.interfaces import CapturedGraph, GraphBackend, NoOptions, PluginContext, plugin
from hardpoint.testing.fake_platform import FakeGraphPool

__all__ = ["FakeGraph", "FakeGraphBackend", "OperatorRecorder", "create"]

_T = TypeVar("_T")

WAITING = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operators whose result the host has to wait for: by its value, or by its size."""
INDEXING = frozenset({"aten::index"})
"""Tagged for masks; with indices the size of the result is known."""


class RecordedCall(NamedTuple):
    """One operator as it ran: its arguments are the tensors themselves, so a replay reads their contents of then."""

    operator: Any
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    result: Any


class FakeGraph(CapturedGraph[_T]):
    """Attributes:
    calls: the recorded operators, in order.
    allocated_bytes: memory the capture took from its pool.
    num_replays: how often :meth:`replay` ran.
    """

    def __init__(
        self, calls: list[RecordedCall], inputs: Sequence[torch.Tensor], output: _T, allocated_bytes: int, pool: Any
    ) -> None:
        self.calls = calls
        self.output = output
        self.input_addresses = tuple(tensor.data_ptr() for tensor in inputs)
        self.allocated_bytes = allocated_bytes
        self.num_replays = 0
        self._inputs = tuple(inputs)
        self._pool = pool
        self._released = False

    def replay(self) -> None:
        """Raises ``RuntimeError`` when an input has moved since the capture: a device would read the old place."""
        if self._released:
            raise RuntimeError("this graph was released; capture it again")
        moved = [
            number
            for number, (tensor, address) in enumerate(zip(self._inputs, self.input_addresses, strict=True))
            if tensor.data_ptr() != address
        ]
        if moved:
            raise RuntimeError(f"inputs {moved} moved since the capture; write into them instead of replacing them")
        for call in self.calls:
            result = call.operator(*call.args, **call.kwargs)
            for kept, fresh in zip(_tensors(call.result), _tensors(result), strict=True):
                if kept.data_ptr() != fresh.data_ptr():
                    kept.copy_(fresh)
        self.num_replays += 1

    def release(self) -> None:
        if not self._released:
            self._released = True
            self.calls.clear()
            if isinstance(self._pool, FakeGraphPool):
                self._pool.bytes_in_use -= self.allocated_bytes


class FakeGraphBackend(GraphBackend):
    """``forbid_allocation`` holds the call to preallocated buffers: an operator that returns new memory is a fault.

    Without it new memory counts as the pool's, as on a device. ``graphs`` are all that were captured, in order.
    """

    def __init__(self, *, forbid_allocation: bool = False) -> None:
        self.forbid_allocation = forbid_allocation
        self.graphs: list[FakeGraph[Any]] = []
        self._capturing = False

    def refuse(self) -> str | None:
        return "a capture is going on already" if self._capturing else None

    def capture(self, run: Callable[[], _T], inputs: Sequence[torch.Tensor], pool: Any) -> FakeGraph[_T]:
        reason = self.refuse()
        if reason is not None:
            raise RuntimeError(f"no graph can be captured now: {reason}")
        recorder = OperatorRecorder(self.forbid_allocation)
        self._capturing = True
        try:
            with recorder:
                output = run()
        finally:
            self._capturing = False
        graph = FakeGraph(recorder.calls, inputs, output, recorder.allocated_bytes, pool)
        if isinstance(pool, FakeGraphPool):
            pool.bytes_in_use += recorder.allocated_bytes
        self.graphs.append(graph)
        return graph


class OperatorRecorder(TorchDispatchMode):
    """Sees every operator below autograd while it is entered."""

    def __init__(self, forbid_allocation: bool) -> None:
        super().__init__()
        self.calls: list[RecordedCall] = []
        self.allocated_bytes = 0
        self._forbid_allocation = forbid_allocation

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        name = func.name().partition(".")[0]
        if WAITING & set(func.tags) and (name not in INDEXING or _is_mask(args[1])):
            raise RuntimeError(f"{name} waits for the device and cannot be captured; keep its result on the device")
        known = {storage.data_ptr() for storage in _storages((args, kwargs or {}))}
        result = func(*args, **(kwargs or {}))
        fresh = {storage.data_ptr(): storage.nbytes() for storage in _storages(result)}
        taken = sum(size for address, size in fresh.items() if address not in known)
        if taken and self._forbid_allocation:
            raise RuntimeError(f"{name} allocates {taken} bytes during the capture; write into a persistent buffer")
        self.allocated_bytes += taken
        self.calls.append(RecordedCall(func, args, kwargs or {}, result))
        return result


def _is_mask(indices: Any) -> bool:
    return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors(indices))


def _tensors(tree: Any) -> Iterator[torch.Tensor]:
    return (leaf for leaf in tree_iter(tree) if isinstance(leaf, torch.Tensor))


def _storages(tree: Any) -> Iterator[torch.UntypedStorage]:
    return (tensor.untyped_storage() for tensor in _tensors(tree))


@plugin("graph_backend")
def create(ctx: PluginContext, options: NoOptions) -> FakeGraphBackend:
    """Factory for tests that install it as a plugin."""
    del ctx, options
    return FakeGraphBackend()
