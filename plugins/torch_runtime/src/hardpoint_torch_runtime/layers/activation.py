"""Gated activations on merged gate-and-up projections. Legend: T tokens, M intermediate size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["SiluAndMul"]


class SiluAndMul(torch.nn.Module):
    """[..., 2 M] (gate first) to [..., M]: ``silu(gate) * up``."""

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        return F.silu(gate).mul_(up)
