"""Plugin kind ``quantization``: how a linear layer stores and applies its weight."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.interfaces.model_source import ModelInfo

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class LinearShape:
    """Local (already sharded) sizes of one linear; ``output_sizes`` lists the parts of a fused layer."""

    input_size: int
    output_sizes: tuple[int, ...]
    dtype: str

    @property
    def output_size(self) -> int:
        return sum(self.output_sizes)


class LinearMethod(ABC):
    """Weights and arithmetic of one linear layer. The layer module holds the parameters this method creates."""

    @abstractmethod
    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        """Register parameters on ``layer``."""

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        """Repack once all tensors are in."""

    @abstractmethod
    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., input_size] to [..., output_size]."""


class QuantizationMethod(ABC):
    """What the plugin's factory returns. ``accepts_packed`` lists weight formats it wants undequantized."""

    name: str
    accepts_packed: frozenset[str] = frozenset()

    @abstractmethod
    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        """Reason why the model cannot be run this way, or None."""

    @abstractmethod
    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        """Method for this layer; None leaves it unquantized."""
