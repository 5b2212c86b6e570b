"""From the hidden states of prompts to their embeddings or scores.

Legend: T tokens of the step, C hidden size, N rows of a result, D their entries.

A prompt may be computed in several chunks; what is needed of earlier ones is kept by slot. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np
import torch

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.request import Int32Array, PoolingParams
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.input_batch import InputBatch
from hardpoint_torch_runtime.runner.pooling_plan import EACH_TOKEN, PoolingModel, PoolingPlan, activate

__all__ = ["PooledRows", "PoolingModel", "SlotPooling", "runner_type"]


def runner_type(info: ModelInfo) -> Literal["generate", "pooling"]:
    """What a runner of the model is for (R4.21): one that cannot generate only pools."""
    return "generate" if "generate" in info.tasks else "pooling"


@dataclass(slots=True)
class _Job:
    """One request. ``total`` [C]: the sum of, or the one state out of, the first ``num_seen`` positions; ``parts``:
    float32 [tokens, D] on the host, chunk after chunk, of methods that keep a row for each of several tokens."""

    plan: PoolingPlan
    method: str
    normalizes: bool
    dimensions: int | None
    num_prompt_tokens: int
    num_seen: int = 0
    total: torch.Tensor | None = None
    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, hidden: torch.Tensor, first: int, token_ids: torch.Tensor) -> None:
        """States [tokens, C] and ids [tokens] of the positions from ``first`` on.

        Raises ``RuntimeError`` when positions are missing whose states the method needs.
        """
        if self.method != "last" and first != self.num_seen:
            raise RuntimeError(
                f"pooling by {self.method!r} needs the states of all positions, but those from {self.num_seen} to "
                f"{first} were not computed; a scheduler may not take them from a cache"
            )
        self.num_seen = first + len(hidden)
        # Copies: the next step may be computed in the same memory.
        if self.method in EACH_TOKEN:
            kept = hidden if self.method == "token_embed" else hidden[token_ids == self.plan.step_token_id]
            self.parts.append(self._result(kept.to(torch.float32, copy=True)))
        elif self.method == "mean":
            summed = hidden.float().sum(dim=0)
            self.total = summed if self.total is None else self.total + summed
        elif self.method == "last" and self.is_through:
            self.total = hidden[-1].to(torch.float32, copy=True)
        elif self.method == "cls" and first == 0:
            self.total = hidden[0].to(torch.float32, copy=True)

    @property
    def is_through(self) -> bool:
        return self.num_seen >= self.num_prompt_tokens

    def finish(self) -> np.ndarray:
        """float32 [D], or [tokens, D] where several have a row each."""
        if self.total is None:
            return np.concatenate(self.parts)
        states = self.total / self.num_prompt_tokens if self.method == "mean" else self.total
        return self._result(states.unsqueeze(0))[0]

    def _result(self, states: torch.Tensor) -> np.ndarray:
        """float32 [N, C] to [N, D] on the host: scores of each row, or its leading entries."""
        if self.plan.head is not None:
            scores = self.plan.head(states)
            return activate(scores, self.plan.activation if self.normalizes else "none").cpu().numpy()
        rows = states.cpu().numpy()[:, : self.dimensions]
        if self.normalizes:
            lengths = np.linalg.norm(rows, axis=-1, keepdims=True)
            rows = rows / np.maximum(lengths, np.finfo(np.float32).tiny)
        return np.ascontiguousarray(rows, dtype=np.float32)

    def fault(self, size: int) -> str | None:
        """Why there is no result, in words a client may see; ``size`` is that of hidden states."""
        if self.plan.judges and self.dimensions is not None:
            return "this model gives scores, which cannot be cut to fewer dimensions"
        if self.plan.judges and self.method != self.plan.method and not {self.method, self.plan.method} <= EACH_TOKEN:
            return f"this model gives scores by the pooling {self.plan.method!r} alone, not {self.method!r}"
        if self.dimensions is not None and not 1 <= self.dimensions <= size:
            return f"embeddings of this model have {size} dimensions, so {self.dimensions} cannot be kept"
        allowed = self.plan.dimensions
        if self.dimensions is not None and allowed and self.dimensions not in (*allowed, size):
            listed = ", ".join(map(str, allowed))
            return f"embeddings of this model can be cut to {listed} dimensions, not to {self.dimensions}"
        if self.method == "step" and not sum(map(len, self.parts)):
            return f"the prompt holds no token {self.plan.step_token_id}, which ends a step, so there is none to judge"
        return None


@dataclass(frozen=True, slots=True)
class PooledRows:
    """``results`` by step row, ``faults`` by slot: why a request has none, in words a client may see."""

    results: dict[int, np.ndarray] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)


_NOTHING = PooledRows()


class SlotPooling:
    """The requests that pool, by slot; one of the state's parts."""

    def __init__(self, plan: PoolingPlan) -> None:
        self.plan = plan
        self._jobs: dict[int, _Job] = {}

    def enter(self, row: NewRow) -> None:
        self._jobs.pop(row.slot, None)
        if row.task == "generate":
            return
        asked = row.pooling or PoolingParams()
        self._jobs[row.slot] = _Job(
            plan=self.plan,
            method=asked.pooling or self.plan.method,
            normalizes=self.plan.normalizes if asked.normalize is None else asked.normalize,
            dimensions=asked.dimensions,
            num_prompt_tokens=row.num_prompt_tokens,
        )

    def release(self, slots: Int32Array) -> None:
        for slot in slots.tolist() if self._jobs else ():
            self._jobs.pop(slot, None)

    def collect(self, hidden: torch.Tensor, batch: InputBatch) -> PooledRows:
        """Take in the states [T', C] of a step, and finish the prompts that it completed.

        On an accelerator this waits for the forward where a prompt ends. Raises ``RuntimeError`` for a step that left
        out positions which are needed.
        """
        if not self._jobs:
            return _NOTHING
        pooled = PooledRows()
        starts: Sequence[int] = batch.query_start_loc_cpu.tolist()
        for row, slot in enumerate(batch.slots.tolist()):
            job = self._jobs.get(slot)
            if job is None:
                continue
            tokens = slice(starts[row], starts[row + 1])
            job.add(hidden[tokens], int(batch.num_computed[row]), batch.token_ids[tokens])
            if job.is_through:
                self._finish(slot, int(batch.step_rows[row]), job, hidden.shape[-1], pooled)
        return pooled

    def _finish(self, slot: int, step_row: int, job: _Job, size: int, pooled: PooledRows) -> None:
        del self._jobs[slot]
        fault = job.fault(size)
        if fault is not None:
            pooled.faults[slot] = fault
            return
        result = job.finish()
        if np.isfinite(result).all():
            pooled.results[step_row] = result
        else:
            pooled.faults[slot] = f"the {'score' if self.plan.judges else 'embedding'} is not finite"
