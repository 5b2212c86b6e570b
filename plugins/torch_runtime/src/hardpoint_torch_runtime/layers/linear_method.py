"""The plain linear method, one dense weight in the compute dtype, and what methods may add to the interface."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch

from hardpoint.interfaces.model_source import WeightTensor
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_torch_runtime.layers.placement import Placement
from hardpoint_torch_runtime.layers.stored_weights import DenseWeight
from hardpoint_torch_runtime.ops import reference

__all__ = [
    "LoadingObserver",
    "PackedLinearMethod",
    "PlacingLinearMethod",
    "StreamingLinearMethod",
    "TableLinearMethod",
    "TableQuantization",
    "UnquantizedLinearMethod",
]


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

    def stored(self, layer: torch.nn.Module) -> DenseWeight:
        """See ``StoredLinearMethod``."""
        weight = layer.get_parameter("weight")
        if not weight.numel():
            raise RuntimeError("the weight of this layer was released to a kernel, which keeps its own")
        return DenseWeight(weight)

    def release(self, layer: torch.nn.Module) -> None:
        """See ``StoredLinearMethod``."""
        nothing = torch.empty(0, dtype=self._dtype, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(nothing, requires_grad=False))


@runtime_checkable
class PackedLinearMethod(Protocol):
    """What a linear method adds when it wants stored tensors of packed formats as they are."""

    def load_packed(self, layer: torch.nn.Module, parameter: str, placement: Placement, tensor: WeightTensor) -> None:
        """Copy this rank's part of ``tensor`` (logical shape already checked against ``placement``) into ``layer``."""


@runtime_checkable
class StreamingLinearMethod(Protocol):
    """What a linear method adds when it converts dense tensors one by one as they come, so that the dense weight of a
    layer is never there as a whole. It then needs no dense parameter: ``weight`` may have any type and shape."""

    def load_dense(self, layer: torch.nn.Module, placement: Placement, values: torch.Tensor) -> None:
        """Take ``values`` [rows, I]: this rank's part of one stored weight, of a floating dtype, not to be written to.

        Rows begin at ``placement.target_start`` of the layer, or at its first where ``placement.dim`` is 1.
        """


@runtime_checkable
class TableLinearMethod(Protocol):
    """What a linear method adds when it may also keep a vocabulary: an embedding whose tied head it applies."""

    def look_up(self, layer: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """Rows of the weight by their numbers, int64 [T], as [T, I] in the compute dtype."""


@runtime_checkable
class TableQuantization(Protocol):
    """What a quantization method adds when it keeps vocabularies too."""

    def table_method(self, name: str, shape: LinearShape) -> LinearMethod | None:
        """A :class:`TableLinearMethod` for the embedding ``name``: ``shape`` has the hidden size as its input and this
        rank's share of the vocabulary as its output. None leaves it dense."""


@runtime_checkable
class LoadingObserver(Protocol):
    """What a quantization method adds when it has something to say once all layers of a model are loaded."""

    def loading_ended(self) -> None:
        """Called once by the worker; every layer has been processed."""


@runtime_checkable
class PlacingLinearMethod(Protocol):
    """What a linear method adds when its parameters (scales, zero points) are not laid out like a dense weight."""

    def place(self, layer: torch.nn.Module, parameter: str, shard: str | None, weight: Placement) -> Placement:
        """Placement of ``parameter``, given that of the dense weight of the same part."""
