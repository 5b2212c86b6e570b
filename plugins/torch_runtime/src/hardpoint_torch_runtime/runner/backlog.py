"""Steps whose results are not on the host yet, in the order in which they were submitted."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field

import numpy as np

from hardpoint.interfaces.request import Int32Array
from hardpoint_torch_runtime.runner.async_output import DeviceCopies
from hardpoint_torch_runtime.runner.samples import StepSamples

__all__ = ["Backlog", "LaunchedStep"]


@dataclass(slots=True)
class LaunchedStep:
    """What the S sampling rows of a step brought, once its copies are there.

    Attributes:
        slots, generations: int32 [S].
        expected: int32 [S], tokens that each row brings if all of its drafts are right.
        copies: the results on their way.
        decode: what they mean; dropped with everything it holds once it was called.
    """

    slots: Int32Array
    generations: Int32Array
    expected: Int32Array
    copies: DeviceCopies
    decode: Callable[[Mapping[str, np.ndarray]], StepSamples] | None
    _samples: StepSamples | None = None
    _lock: threading.Lock = field(default_factory=threading.Lock)

    @property
    def has_drafts(self) -> bool:
        return bool((self.expected > 1).any())

    def read(self) -> StepSamples:
        """Wait for the copies; on any thread, any number of times."""
        with self._lock:
            if self._samples is None:
                if self.decode is None:
                    raise RuntimeError("the results of this step could not be read before")
                host, decode, self.decode = self.copies.wait(), self.decode, None
                self._samples = decode(host)
            return self._samples


class Backlog:
    """For the runner's thread. Whoever waits for an output reads the same records."""

    def __init__(self) -> None:
        self._steps: deque[LaunchedStep] = deque()

    @property
    def steps(self) -> tuple[LaunchedStep, ...]:
        return tuple(self._steps)

    @property
    def has_drafts(self) -> bool:
        """Whether it is unknown how many tokens some step under way brings."""
        return any(step.has_drafts for step in self._steps)

    def add(self, step: LaunchedStep) -> None:
        self._steps.append(step)

    def take_ready(self) -> list[LaunchedStep]:
        """The oldest ones whose results have arrived, without waiting."""
        ready = []
        while self._steps and self._steps[0].copies.is_done:
            ready.append(self._steps.popleft())
        return ready

    def take_all(self) -> list[LaunchedStep]:
        """All, whether their results have arrived or not."""
        taken = list(self._steps)
        self._steps.clear()
        return taken
