"""Positions along several axes (multimodal rotary embedding). Legend: k axes, T tokens of the step."""

from __future__ import annotations

from typing import Protocol, runtime_checkable

import numpy as np
import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["AxisPositions", "PositionAxes"]


@runtime_checkable
class AxisPositions(Protocol):
    """A model whose forward takes positions int64 [k, T]."""

    @property
    def num_position_axes(self) -> int:
        """k."""

    def position_rows(self, row: NewRow) -> np.ndarray:
        """int [k, N'] for the first tokens of ``row``, at least its prompt.

        Those after them go on, on all axes alike, behind the largest of the last column.
        """


class PositionAxes:
    """Positions of each slot, computed once when a request enters, and the part that a step needs."""

    def __init__(self, model: AxisPositions, num_slots: int, max_tokens: int, device: torch.device) -> None:
        self._model = model
        self._given: list[np.ndarray] = [np.zeros((model.num_position_axes, 0), dtype=np.int64)] * num_slots
        self._num_given = np.zeros(num_slots, dtype=np.int64)
        self._behind = np.zeros(num_slots, dtype=np.int64)
        """By slot: how far a position behind the given ones lies from the token's place in its sequence."""
        self._buffers = [StagedBuffer((max_tokens,), torch.int64, device) for _ in range(model.num_position_axes)]
        self._tensor = torch.zeros((model.num_position_axes, max_tokens), dtype=torch.int64, device=device)

    def enter(self, row: NewRow) -> None:
        """Raises ``ModelFormatError`` for positions of another shape."""
        rows = np.asarray(self._model.position_rows(row), dtype=np.int64)
        axes, known = self._tensor.shape[0], len(row.token_ids)
        if rows.ndim != 2 or rows.shape[0] != axes or not row.num_prompt_tokens <= rows.shape[1] <= known:
            raise ModelFormatError(
                f"request {row.request_id}: the model computed positions of shape {list(rows.shape)}; they must be "
                f"[{axes}, {row.num_prompt_tokens} to {known}], one column per token of the prompt at least"
            )
        self._given[row.slot] = rows
        self._num_given[row.slot] = rows.shape[1]
        self._behind[row.slot] = (int(rows[:, -1].max()) + 1 if rows.size else 0) - rows.shape[1]

    def release(self, slots: Int32Array) -> None:
        self._num_given[slots] = 0

    def positions(self, batch: InputBatch) -> torch.Tensor:
        """int64 [k, T'], 0 where padding is. The result is a part of one buffer, valid until the next call."""
        total, padded = batch.num_tokens, len(batch.token_ids)
        starts = batch.query_start_loc_cpu[: batch.num_rows]
        offsets = batch.num_computed + self._behind[batch.slots] - starts
        behind = np.arange(total) + np.repeat(offsets, batch.num_scheduled)
        for buffer in self._buffers:
            buffer.host[:total] = behind
            buffer.host[total:padded] = 0
        for row in np.flatnonzero(batch.num_computed < self._num_given[batch.slots]).tolist():
            first, start = int(batch.num_computed[row]), int(starts[row])
            inside = self._given[int(batch.slots[row])][:, first : first + int(batch.num_scheduled[row])]
            for buffer, known in zip(self._buffers, inside, strict=True):
                buffer.host[start : start + len(known)] = known
        for axis, buffer in enumerate(self._buffers):
            self._tensor[axis, :padded] = buffer.upload(padded)
        return self._tensor[:, :padded]
