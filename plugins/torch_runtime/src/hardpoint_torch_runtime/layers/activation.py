"""Gated activations on merged gate-and-up projections. Legend: T tokens, M intermediate size."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F

from hardpoint_torch_runtime.ops import reference

__all__ = ["GeluTanhAndMul", "SiluAndMul"]


class SiluAndMul(torch.nn.Module):
    """[..., 2 M] (gate first) to [..., M]: ``silu(gate) * up``, by the kernel of the seam ``silu_and_mul``."""

    def __init__(self, kernel: Callable[[torch.Tensor], torch.Tensor] = reference.silu_and_mul) -> None:
        super().__init__()
        self._kernel = kernel

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        return self._kernel(gate_up)


class GeluTanhAndMul(torch.nn.Module):
    """[..., 2 M] (gate first) to [..., M]: ``gelu(gate) * up``, the Gaussian error function approximated by tanh."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.gelu(gate, approximate="tanh").mul_(up)
