"""Refused drafts that the host does not know of yet, and what they change in inputs that it prepared.

While the steps before are under way, the host counts their drafts as right. On the device the truth is there already:
rows are moved back by it before the forward reads them, and nobody waits. Legend as in ``input_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import NewRow
from hardpoint_torch_runtime.runner.buffers import StagedBuffer, is_host_memory
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["DraftDebt"]


class DraftDebt:
    """int64 [N] on the device: by slot, drafts refused by steps whose results the host has not read.

    ``block_sizes`` are the tokens per block in the batch's tables, None for groups that keep no KV.
    """

    def __init__(
        self, num_slots: int, max_tokens: int, block_sizes: Sequence[int | None], device: torch.device
    ) -> None:
        self._owed = torch.zeros(num_slots, dtype=torch.int64, device=device)
        self._block_sizes = tuple(block_sizes)
        self._rows = StagedBuffer((max_tokens,), torch.int64, device, waits=False)
        self._is_used = False

    def enter(self, row: NewRow) -> None:
        if self._is_used:
            self._owed[row.slot] = 0

    def release(self, slots: Int32Array) -> None:
        if self._is_used:
            self._owed[self._there(slots)] = 0

    def charge(self, slots: Int32Array, refused: torch.Tensor) -> None:
        """``refused`` int64 [S] drafts of ``slots`` turned out wrong, as only the device knows."""
        self._is_used = True
        self._owed.index_add_(0, self._there(slots), refused)

    def forgive(self, slots: Int32Array, refused: np.ndarray) -> None:
        """The host has learned of them: what it prepares from now on is right by so much."""
        if refused.any():
            self._owed.index_add_(0, self._there(slots), -self._there(refused))

    def correct(self, batch: InputBatch, axes: torch.Tensor | None = None) -> InputBatch:
        """Move the rows of ``batch`` back, in its own tensors; lengths on a device's host become upper bounds.

        ``axes`` int64 [k, T'] are the positions of a model with several axes, moved back as well.
        """
        if not self._is_used:
            return batch
        total = batch.num_tokens
        self._rows.host[:total] = np.repeat(np.arange(batch.num_rows), batch.num_scheduled)
        rows = self._rows.upload(total)
        owed = self._owed[self._there(batch.slots)]
        batch.seq_lens[: batch.num_rows] -= owed.to(batch.seq_lens.dtype)
        positions = batch.positions[:total]
        positions -= owed[rows]
        if axes is not None:
            axes[:, :total] -= owed[rows]
        for size, table, mapping in zip(self._block_sizes, batch.block_tables, batch.slot_mappings, strict=True):
            if size is not None:
                blocks = table[rows, positions // size].to(torch.int64)
                mapping[:total] = blocks * size + positions % size
        return replace(batch, lengths_are_exact=is_host_memory(batch.seq_lens.device))

    def _there(self, array: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(array.astype(np.int64)).to(self._owed.device, non_blocking=True)
