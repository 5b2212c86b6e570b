"""From the hidden states of prompts to their embeddings. Legend: T tokens of the step, C hidden size, D entries kept.

A prompt may be computed in several chunks; what is needed of earlier ones is kept by slot. All arithmetic is float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal, Protocol, runtime_checkable

import numpy as np
import torch

from hardpoint.interfaces.model import Model
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.request import Int32Array, PoolingParams
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["PooledRows", "PoolingModel", "SlotPooling", "runner_type"]

_DEFAULT_METHOD, _DEFAULT_NORMALIZES = "last", True


@runtime_checkable
class PoolingModel(Protocol):
    """A model that says how its hidden states become an embedding, unless a request says otherwise.

    Others take the last token's, scaled to length 1: in a decoder it alone has seen the whole prompt.
    """

    @property
    def pooling_method(self) -> str:
        """One of ``POOLING_METHODS``."""

    @property
    def normalizes(self) -> bool: ...


def runner_type(info: ModelInfo) -> Literal["generate", "pooling"]:
    """What a runner of the model is for (R4.21): one that cannot generate only pools."""
    return "generate" if "generate" in info.tasks else "pooling"


@dataclass(slots=True)
class _Job:
    """One request. ``total`` [C]: the sum of, or the one state out of, the first ``num_seen`` positions; ``parts``:
    float32 [tokens, C] on the host, chunk after chunk."""

    method: str
    normalizes: bool
    dimensions: int | None
    num_prompt_tokens: int
    num_seen: int = 0
    total: torch.Tensor | None = None
    parts: list[np.ndarray] = field(default_factory=list)

    def add(self, hidden: torch.Tensor, first: int) -> None:
        """States [tokens, C] of the positions from ``first`` on.

        Raises ``RuntimeError`` when positions are missing whose states the method needs.
        """
        if self.method != "last" and first != self.num_seen:
            raise RuntimeError(
                f"pooling by {self.method!r} needs the states of all positions, but those from {self.num_seen} to "
                f"{first} were not computed; a scheduler may not take them from a cache"
            )
        self.num_seen = first + len(hidden)
        # Copies: the next step may be computed in the same memory.
        if self.method == "token_embed":
            self.parts.append(hidden.to("cpu", torch.float32, copy=True).numpy())
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
        """float32 [D], or [prompt, D] of each token."""
        if self.total is None:
            states = np.concatenate(self.parts)
        else:
            states = self.total.cpu().numpy()
            if self.method == "mean":
                states = states / np.float32(self.num_prompt_tokens)
        states = states[..., : self.dimensions]
        if self.normalizes:
            lengths = np.linalg.norm(states, axis=-1, keepdims=True)
            states = states / np.maximum(lengths, np.finfo(np.float32).tiny)
        return np.ascontiguousarray(states, dtype=np.float32)


@dataclass(frozen=True, slots=True)
class PooledRows:
    """``results`` by step row, ``faults`` by slot: why a request has none, in words a client may see."""

    results: dict[int, np.ndarray] = field(default_factory=dict)
    faults: dict[int, str] = field(default_factory=dict)


_NOTHING = PooledRows()


class SlotPooling:
    """The requests that pool, by slot; one of the state's parts."""

    def __init__(self, model: Model) -> None:
        self.default_method, self.normalizes = _DEFAULT_METHOD, _DEFAULT_NORMALIZES
        if isinstance(model, PoolingModel):
            self.default_method, self.normalizes = model.pooling_method, model.normalizes
        self._jobs: dict[int, _Job] = {}

    def enter(self, row: NewRow) -> None:
        self._jobs.pop(row.slot, None)
        if row.task == "generate":
            return
        asked = row.pooling or PoolingParams()
        self._jobs[row.slot] = _Job(
            method=asked.pooling or self.default_method,
            normalizes=self.normalizes if asked.normalize is None else asked.normalize,
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
            job.add(hidden[starts[row] : starts[row + 1]], int(batch.num_computed[row]))
            if job.is_through:
                self._finish(slot, int(batch.step_rows[row]), job, hidden.shape[-1], pooled)
        return pooled

    def _finish(self, slot: int, step_row: int, job: _Job, size: int, pooled: PooledRows) -> None:
        del self._jobs[slot]
        if job.dimensions is not None and not 1 <= job.dimensions <= size:
            pooled.faults[slot] = f"embeddings of this model have {size} dimensions, so {job.dimensions} cannot be kept"
            return
        result = job.finish()
        if np.isfinite(result).all():
            pooled.results[step_row] = result
        else:
            pooled.faults[slot] = "the embedding is not finite"
