"""What waits between a step's forward and its sampling: one frozen record at most, used up once (R4.22, I4.6)."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces.step import LogprobArrays, SchedulerOutput
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["Deferral", "ForwardProducts"]


@dataclass(frozen=True, slots=True)
class ForwardProducts:
    """What sampling still needs of a forward.

    ``batch`` is None for a step without tokens, ``logits`` [P, V] when nothing is sampled. ``pooled`` holds finished
    pooling results by step row, ``extensions`` the payloads of features by name.
    """

    step: SchedulerOutput
    batch: InputBatch | None = None
    logits: torch.Tensor | None = None
    prompt_logprobs: LogprobArrays | None = None
    pooled: dict[int, np.ndarray] = field(default_factory=dict)
    extensions: dict[str, Any] = field(default_factory=dict)


class Deferral:
    """Makes forward and sampling take turns."""

    def __init__(self) -> None:
        self._waiting: ForwardProducts | None = None

    def check_free(self) -> None:
        """Raises ``RuntimeError`` while a step waits for sampling."""
        if self._waiting is not None:
            raise RuntimeError(f"step {self._waiting.step.step_id} still waits for sampling; sample it first")

    def put(self, products: ForwardProducts) -> None:
        self.check_free()
        self._waiting = products

    def take(self, step_id: int) -> ForwardProducts:
        """Raises ``RuntimeError`` when another step, or none, is waiting."""
        waiting = self._waiting
        if waiting is None or waiting.step.step_id != step_id:
            what = "none" if waiting is None else f"step {waiting.step.step_id}"
            raise RuntimeError(f"step {step_id} is not waiting for sampling; waiting: {what}")
        self._waiting = None
        return waiting
