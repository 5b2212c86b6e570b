"""The plain linear method: one dense weight in the compute dtype."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.ops import reference

__all__ = ["PackedLinearMethod", "PlacingLinearMethod", "UnquantizedLinearMethod"]


class UnquantizedLinearMethod(LinearMethod):
    """Weight [output, input], contiguous, so that applying it is a single matrix product: the seam ``linear``."""

    def __init__(
        self,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Callable[[torch.Tensor, torch.Tensor, torch.Tensor | None], torch.Tensor] = reference.linear,
    ) -> None:
        self._dtype = dtype
        self._device = device
        self._kernel = kernel

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        weight = torch.empty(shape.output_size, shape.input_size, dtype=self._dtype, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(weight, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight: torch.Tensor = layer.weight  # type: ignore[assignment]
        return self._kernel(x, weight, bias)


@runtime_checkable
class PackedLinearMethod(Protocol):
    """What a linear method adds when it wants stored tensors of packed formats as they are."""

    def load_packed(self, layer: torch.nn.Module, parameter: str, placement: Placement, tensor: WeightTensor) -> None:
        """Copy this rank's part of ``tensor`` (logical shape already checked against ``placement``) into ``layer``."""


@runtime_checkable
class PlacingLinearMethod(Protocol):
    """What a linear method adds when its parameters (scales, zero points) are not laid out like a dense weight."""

    def place(self, layer: torch.nn.Module, parameter: str, shard: str | None, weight: Placement) -> Placement:
        """Placement of ``parameter``, given that of the dense weight of the same part."""
