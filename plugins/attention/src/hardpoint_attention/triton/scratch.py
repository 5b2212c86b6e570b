"""Memory for parts of attention until they are put together, shared by all layers of a backend.

Legend: T tokens, H query heads, S splits, V size of values.
"""

from __future__ import annotations

import torch

__all__ = ["SCRATCH_ELEMENTS", "Scratch"]

SCRATCH_ELEMENTS = 16 * 1024 * 1024
"""Float32 entries of parts at most: 64 MiB. What would take more is not split."""


class Scratch:
    """Layers say what they may need when they are made, and builders allocate it, both before the first step.

    For layers that run one after another, on one stream.
    """

    def __init__(self) -> None:
        self._widest = 0
        self._buffers: dict[torch.device, torch.Tensor] = {}

    @staticmethod
    def max_parts(num_heads: int, size: int) -> int:
        """Parts, counted over query tokens, for which there is room."""
        return SCRATCH_ELEMENTS // (num_heads * (size + 1))

    def expect(self, num_heads: int, size: int) -> None:
        """A layer with values of at most ``size`` entries exists."""
        self._widest = max(self._widest, num_heads * (size + 1))

    def allocate(self, device: torch.device, num_parts: int) -> None:
        """Room for ``num_parts``, or as many as there may be at most, of the widest layer."""
        self._ensure(device, min(num_parts * self._widest, SCRATCH_ELEMENTS))

    def take(
        self, device: torch.device, num_tokens: int, num_heads: int, splits: int, size: int
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Uninitialized float32 parts [T, H, S, V] and log-sum-exps [T, H, S]; valid until the next call.

        Allocates only for a layer that came after the builder.
        """
        count = num_tokens * num_heads * splits
        buffer = self._ensure(device, count * (size + 1))
        parts = buffer[: count * size].view(num_tokens, num_heads, splits, size)
        return parts, buffer[count * size : count * (size + 1)].view(num_tokens, num_heads, splits)

    def _ensure(self, device: torch.device, elements: int) -> torch.Tensor:
        buffer = self._buffers.get(device)
        if buffer is None or buffer.numel() < elements:
            buffer = self._buffers[device] = torch.empty(elements, dtype=torch.float32, device=device)
        return buffer
