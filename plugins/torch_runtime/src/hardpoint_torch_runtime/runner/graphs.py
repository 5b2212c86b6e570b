"""Forwards captured once per shape and replayed over the same buffers."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from hardpoint.interfaces.graph_backend import CapturedGraph, GraphBackend
from hardpoint_torch_runtime.forward_context import BatchDescriptor

__all__ = ["GraphStore"]


class GraphStore:
    """Recordings by shape, all in one ``pool`` (the platform's ``graph_pool()``)."""

    def __init__(self, backend: GraphBackend, pool: Any) -> None:
        self._backend = backend
        self._pool = pool
        self._graphs: dict[BatchDescriptor, CapturedGraph[torch.Tensor]] = {}

    @property
    def descriptors(self) -> tuple[BatchDescriptor, ...]:
        """Shapes captured so far, in that order."""
        return tuple(self._graphs)

    def __contains__(self, descriptor: BatchDescriptor) -> bool:
        return descriptor in self._graphs

    def capture(
        self, descriptor: BatchDescriptor, run: Callable[[], torch.Tensor], inputs: Sequence[torch.Tensor]
    ) -> None:
        """Record ``run``. Raises what it raises, and what the backend finds fault with."""
        self._graphs[descriptor] = self._backend.capture(run, inputs, self._pool)

    def replay(self, descriptor: BatchDescriptor, inputs: Sequence[torch.Tensor]) -> torch.Tensor:
        """The output of the recorded forward over what ``inputs`` hold now; overwritten by the next replay.

        Raises ``RuntimeError`` when an input lies elsewhere than at the capture: the device would read the old place.
        """
        graph = self._graphs[descriptor]
        addresses = tuple(tensor.data_ptr() for tensor in inputs)
        if addresses != graph.input_addresses:
            pairs = zip(addresses, graph.input_addresses, strict=False)
            moved = [number for number, (now, then) in enumerate(pairs) if now != then]
            raise RuntimeError(
                f"inputs {moved} of the step moved since {descriptor} was captured; whoever prepares them must write "
                "into persistent buffers (R4.55)"
            )
        graph.replay()
        return graph.output

    def release(self) -> None:
        """Give back all memory; idempotent."""
        for graph in self._graphs.values():
            graph.release()
        self._graphs.clear()
