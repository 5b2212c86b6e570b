"""Gated activations on merged gate-and-up projections. Legend: T tokens, M intermediate size."""

from __future__ import annotations

from collections.abc import Callable

import torch

from hardpoint_torch_runtime.ops import reference

__all__ = ["SiluAndMul"]


class SiluAndMul(torch.nn.Module):
    """[..., 2 M] (gate first) to [..., M]: ``silu(gate) * up``, by the kernel of the seam ``silu_and_mul``."""

    def __init__(self, kernel: Callable[[torch.Tensor], torch.Tensor] = reference.silu_and_mul) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernel(gate_up)
