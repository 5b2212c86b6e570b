"""Root-mean-square normalization. Legend: T tokens, C normalized size."""

from __future__ import annotations

import torch
import torch.nn.functional as F

__all__ = ["RMSNorm"]


class RMSNorm(torch.nn.Module):
    """``x / rms(x) * weight`` over the last dimension, accumulated in float32.

    With ``residual`` the sum ``x + residual`` is normalized and returned as the new residual; ``residual`` is updated
    in place, so the caller must own it.
    """

    def __init__(self, size: int, eps: float, dtype: torch.dtype, device: torch.device) -> None:
        super().__init__()
        self.size = size
        self.eps = eps
        self._shape = (size,)
        self.weight = torch.nn.Parameter(torch.ones(size, dtype=dtype, device=device), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.rms_norm(x, self._shape, self.weight, self.eps)

    def add(self, x: torch.Tensor, residual: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        """(normalized sum, the sum). ``residual`` None starts a stream: ``x`` becomes the residual, uncopied."""
        residual = x if residual is None else residual.add_(x)
        return F.rms_norm(residual, self._shape, self.weight, self.eps), residual

    def extra_repr(self) -> str:
        return f"{self.size}, eps={self.eps}"
