"""Results that travel to the host while the device goes on: copies on a stream of their own, and the step's output."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping

import numpy as np
import torch

from hardpoint.interfaces.step import RunnerOutput
from hardpoint.interfaces.worker import PendingOutput
from hardpoint_torch_runtime.runner.streams import CopyStream

__all__ = ["AsyncOutput", "DeviceCopies"]


class DeviceCopies:
    """Copies of device tensors, submitted when this is made, after everything that the main stream has to do (R4.70).

    The sources are kept until the copies are done: their memory could otherwise be given to somebody else meanwhile.
    """

    def __init__(self, sources: Mapping[str, torch.Tensor], stream: CopyStream) -> None:
        self._sources: Mapping[str, torch.Tensor] = dict(sources)
        stream.wait_for_main()
        self._copies = {name: stream.copy_to_host(tensor) for name, tensor in self._sources.items()}
        # R4.71: the waiting thread sleeps instead of asking over and over.
        self._event = stream.record_event(blocking=True)
        self._lock = threading.Lock()

    @property
    def is_done(self) -> bool:
        return self._event.query()

    def wait(self) -> dict[str, np.ndarray]:
        """The copies by name; on any thread, any number of times."""
        self._event.synchronize()
        with self._lock:
            # R4.72: only now.
            self._sources = {}
        return {name: copy.numpy() for name, copy in self._copies.items()}


class AsyncOutput(PendingOutput):
    """``finish`` waits for what it needs and assembles the output; it is let go with everything it holds."""

    def __init__(self, finish: Callable[[], RunnerOutput]) -> None:
        self._finish: Callable[[], RunnerOutput] | None = finish

    def result(self) -> RunnerOutput:
        """Raises ``RuntimeError`` when it was called before."""
        finish = self._finish
        if finish is None:
            raise RuntimeError("this output was taken already; each is taken once")
        output = finish()
        self._finish = None
        return output
