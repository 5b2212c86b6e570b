"""Activations: gated ones on merged gate-and-up projections, and plain ones. Legend: M intermediate size."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial

import torch
import torch.nn.functional as F

from hardpoint.errors import UnsupportedModelError
from hardpoint_torch_runtime.ops import reference

__all__ = ["ACTIVATIONS", "Activation", "ClampedSwiGLU", "GeluTanhAndMul", "SiluAndMul"]

_gelu_tanh = partial(F.gelu, approximate="tanh")


def _quick_gelu(states: torch.Tensor) -> torch.Tensor:
    return states * torch.sigmoid(1.702 * states)


ACTIVATIONS: Mapping[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "gelu": F.gelu,
    "gelu_fast": _gelu_tanh,
    "gelu_new": _gelu_tanh,
    "gelu_pytorch_tanh": _gelu_tanh,
    "quick_gelu": _quick_gelu,
    "relu": F.relu,
    "silu": F.silu,
}
"""By the names that configurations give them; ``gelu`` is the exact one, by the Gaussian error function."""


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


class ClampedSwiGLU(torch.nn.Module):
    """[..., 2 M] (gate first) to [..., M]: ``gate * sigmoid(slope * gate) * (up + 1)``, after gates above ``limit`` and
    ups beyond it on either side are set to it."""

    def __init__(self, slope: float, limit: float) -> None:
        super().__init__()
        self.slope = slope
        self.limit = limit

    def forward(self, gate_up: torch.Tensor) -> torch.Tensor:
        gate, up = gate_up.chunk(2, dim=-1)
        gate, up = gate.clamp(max=self.limit), up.clamp(-self.limit, self.limit)
        return gate * torch.sigmoid(self.slope * gate) * (up + 1)

    def extra_repr(self) -> str:
        return f"slope={self.slope}, limit={self.limit}"


class Activation(torch.nn.Module):
    """[..., M] to [..., M], element by element. Raises ``UnsupportedModelError`` for a name not in ``ACTIVATIONS``."""

    def __init__(self, name: str) -> None:
        super().__init__()
        if name not in ACTIVATIONS:
            raise UnsupportedModelError(f"activation {name!r} is unknown; supported: {', '.join(ACTIVATIONS)}")
        self.name = name
        self._function = ACTIVATIONS[name]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self._function(x)

    def extra_repr(self) -> str:
        return self.name
