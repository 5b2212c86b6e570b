"""Persistent device buffers of a metadata builder, with the host side that fills them."""

from __future__ import annotations

import numpy as np
import torch

__all__ = ["StagedBuffer", "store_schedule"]

NUM_HALVES = 2
"""Host copies in turn: the device may still be reading the one of the step before."""


class StagedBuffer:
    """int32 of a fixed shape on the device, filled through (pinned) host memory. Nothing is allocated after creation.

    Attributes:
        device: the buffer that kernels read; its address never changes.
    """

    def __init__(self, shape: tuple[int, ...], device: torch.device) -> None:
        pinned = device.type == "cuda"
        self.device = torch.zeros(shape, dtype=torch.int32, device=device)
        self._host = [torch.zeros(shape, dtype=torch.int32, pin_memory=pinned) for _ in range(NUM_HALVES)]
        self._arrays = [half.numpy() for half in self._host]
        self._turn = 0

    def stage(self) -> np.ndarray:
        """The host array to fill before :meth:`upload`."""
        self._turn = (self._turn + 1) % NUM_HALVES
        return self._arrays[self._turn]

    def upload(self) -> torch.Tensor:
        """Queue the copy of the whole staged array and return the device buffer."""
        return self.device.copy_(self._host[self._turn], non_blocking=True)


def store_schedule(schedule: torch.Tensor, buffer: torch.Tensor) -> torch.Tensor:
    """Copy ``schedule`` to the head of ``buffer`` and zero the rest: a captured kernel reads all of it (R5.34).

    Returns the used slice. Raises ``ValueError`` for a schedule that is longer than the buffer.
    """
    count = schedule.shape[0]
    if count > buffer.shape[0]:
        raise ValueError(
            f"a schedule of {count} entries does not fit the {buffer.shape[0]} reserved for captured steps; raise "
            "--max-num-seqs or turn the graphs off"
        )
    used = buffer[:count]
    used.copy_(schedule)
    buffer[count:].zero_()
    return used
