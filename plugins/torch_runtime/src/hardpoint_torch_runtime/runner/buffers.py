"""Arrays that the host fills and the device reads, allocated once so that their addresses never change (R4.55)."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

__all__ = ["StagedBuffer", "is_host_memory"]


def is_host_memory(device: torch.device) -> bool:
    """Whether what the host writes is what the device reads, and work is done when it is submitted."""
    return device.type == "cpu"


class StagedBuffer:
    """A host array and its device tensor. On the CPU they are the same memory and :meth:`upload` copies nothing.

    Attributes:
        host: numpy array of ``shape``, written by the input preparation.
        tensor: device tensor of the same shape and dtype.

    Without ``waits`` an upload returns before the device has read the host array, which must not be written until then.
    """

    def __init__(self, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device, *, waits: bool = True) -> None:
        self._waits = waits
        if is_host_memory(device):
            staging = torch.zeros(shape, dtype=dtype)
            self.tensor = staging
        else:
            staging = torch.zeros(shape, dtype=dtype, pin_memory=True)
            self.tensor = torch.zeros(shape, dtype=dtype, device=device)
        self._staging = staging
        self._view = self.tensor[:0]
        self._length = 0
        self.host: np.ndarray[Any, np.dtype[Any]] = staging.numpy()

    def upload(self, length: int) -> torch.Tensor:
        """Make the first ``length`` entries visible to the device; returns that slice of :attr:`tensor`."""
        if length != self._length:
            # Steps of one size follow one another, and making a view takes as long as much of the preparation.
            self._view, self._length = self.tensor[:length], length
        if self.tensor is not self._staging:
            self._view.copy_(self._staging[:length], non_blocking=not self._waits)
        return self._view
