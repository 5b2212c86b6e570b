"""Graph backend ``cuda_graphs``: captures what a call queues on a device and queues it again as one.

Both vendors' devices are reached through the same names of the framework.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, Literal, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces.graph_backend import CapturedGraph, GraphBackend
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.worker import WorkerContext

if TYPE_CHECKING:
    from types import ModuleType

__all__ = ["DeviceGraph", "DeviceGraphBackend", "GraphOptions", "create"]

_T = TypeVar("_T")


class GraphOptions(BaseModel):
    """Options under ``plugins.graph_backend.cuda_graphs``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    capture_mode: Literal["thread_local", "global", "relaxed"] = Field(
        default="thread_local",
        description="whose calls to the device spoil a capture: only the capturing thread's, any thread's, or nobody's",
    )


class DeviceGraph(CapturedGraph[_T]):
    """A recording in the memory of its pool."""

    def __init__(self, graph: Any, inputs: Sequence[torch.Tensor], output: _T) -> None:
        self.output = output
        self.input_addresses = tuple(tensor.data_ptr() for tensor in inputs)
        # The device reads these places: nobody may be given their memory while the recording lives.
        self._inputs = tuple(inputs)
        self._graph = graph

    def replay(self) -> None:
        if self._graph is None:
            raise RuntimeError("this graph was released; capture it again")
        self._graph.replay()

    def release(self) -> None:
        graph, self._graph, self._inputs = self._graph, None, ()
        if graph is not None:
            graph.reset()


class DeviceGraphBackend(GraphBackend):
    """``namespace`` is the framework's module of the device; tests hand in one that takes notes."""

    def __init__(self, options: GraphOptions | None = None, namespace: ModuleType | Any = torch.cuda) -> None:
        self.options = options or GraphOptions()
        self._device = namespace
        self._stream: Any = None

    def refuse(self) -> str | None:
        if not self._device.is_available():
            return "torch reaches no device that captures graphs"
        if self._device.is_current_stream_capturing():
            return "a capture is going on already"
        return None

    def capture(self, run: Callable[[], _T], inputs: Sequence[torch.Tensor], pool: Any) -> DeviceGraph[_T]:
        reason = self.refuse()
        if reason is not None:
            raise RuntimeError(f"no graph can be captured now: {reason}")
        graph = self._device.CUDAGraph()
        with self._on_own_stream(), _without_collection():
            graph.capture_begin(pool=pool, capture_error_mode=self.options.capture_mode)
            try:
                output = run()
            except BaseException:
                # Ending a spoilt capture complains about it once more; the first complaint is the one that tells.
                with suppress(RuntimeError):
                    graph.capture_end()
                graph.reset()
                raise
            try:
                graph.capture_end()
            except RuntimeError as error:
                graph.reset()
                raise RuntimeError(
                    f"the capture failed at its end: {error}; the call waited for the device or used another stream"
                ) from error
        return DeviceGraph(graph, inputs, output)

    @contextmanager
    def _on_own_stream(self) -> Iterator[None]:
        """The stream that work runs on by default cannot be captured. Work queued there before comes first, and what
        is queued there afterwards waits for this."""
        main = self._device.current_stream()
        if self._stream is None:
            self._stream = self._device.Stream()
        self._device.synchronize()
        self._stream.wait_stream(main)
        try:
            with self._device.stream(self._stream):
                yield
        finally:
            main.wait_stream(self._stream)


@contextmanager
def _without_collection() -> Iterator[None]:
    """Objects of the device that the collector happens to free meanwhile would spoil the capture."""
    gc.collect()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


@plugin("graph_backend", options=GraphOptions)
def create(ctx: WorkerContext, options: GraphOptions) -> DeviceGraphBackend:
    """Entry point ``hardpoint.graph_backend.v1`` ``cuda_graphs``."""
    del ctx
    return DeviceGraphBackend(options)
