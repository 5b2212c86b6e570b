"""The plain kernels behind the seams, in torch. They are what every override is held against.

Legend: T tokens (0 included), C hidden size, M intermediate size, H heads, D head size, R rotated part of D,
V vocabulary.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["add_rms_norm", "embedding", "linear", "rms_norm", "rotary_embedding", "silu_and_mul"]

linear = F.linear


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """[..., 2 M] (gate first) to [..., M]: ``silu(gate) * up``."""
    gate, up = gate_up.chunk(2, dim=-1)
    return F.silu(gate).mul_(up)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """[..., C] to [..., C]: ``x / rms(x) * weight``, accumulated in float32."""
    return torch.rms_norm(x, weight.shape, weight, eps)


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """(norm of the sum, ``residual``), the latter with ``x`` added in place; both [T, C]."""
    residual.add_(x)
    return torch.rms_norm(residual, weight.shape, weight, eps), residual


def rotary_embedding(heads: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, rotary_size: int) -> torch.Tensor:
    """Rotate the first ``rotary_size`` values of every head of [T, H, D] in place and return it."""
    part = heads if rotary_size == heads.shape[-1] else heads[..., :rotary_size]
    half = rotary_size // 2
    if part.dtype == torch.float32:
        swapped = torch.cat((part[..., half:], part[..., :half]), dim=-1)
        part.mul_(cos).addcmul_(swapped, sin)
        return heads
    exact = part.float()
    swapped = torch.cat((exact[..., half:], exact[..., :half]), dim=-1)
    part.copy_(exact.mul_(cos).addcmul_(swapped, sin))
    return heads


def embedding(token_ids: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """int64 [T] and [V, C] to [T, C]."""
    return torch.embedding(weight, token_ids)
