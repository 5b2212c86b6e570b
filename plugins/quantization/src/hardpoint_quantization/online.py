"""What methods have in common that quantize dense weights while they load.

Legend: I input size, O output size.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint_quantization.rounding import CHUNK_WEIGHTS
from hardpoint_quantization.selection import Selection
from hardpoint_torch_runtime.layers import Placement

__all__ = ["ABSORBED", "OnlineMethod", "OnlineOptions", "target_rows"]

ABSORBED = ("kv_b_proj",)
"""Layers that latent attention unpacks whole when loading ends: quantizing them would only add to the memory."""


class OnlineOptions(BaseModel):
    """What every method of this kind can be told."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    head: Literal["int8", "dense"] = Field(
        default="int8", description="how the vocabulary is kept: the output layer and the embedding, tied or not"
    )
    ignore: tuple[str, ...] = Field(
        default=(), description="names and patterns (fnmatch) of layers that stay dense, as in model.layers.0.mlp.*"
    )


class OnlineMethod(QuantizationMethod):
    """Asks its subclass for the method of each layer that options and sizes do not rule out."""

    def __init__(self, options: OnlineOptions, device: torch.device, logger: logging.Logger) -> None:
        self._options = options
        self._device = device
        self.selection = Selection(self.name, options.ignore, logger)

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        del device_type
        stored = info.config.get("quantization_config")
        if not stored:
            return None
        return f"its checkpoint is quantized already ({stored!r}); take a dense one, or a GGUF file"

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        if self.selection.is_ignored(layer_name):
            return None
        if layer_name == "lm_head":
            return self._head(layer_name, shape)
        if layer_name.rpartition(".")[2] in ABSORBED:
            self.selection.leave(layer_name, "absorbed into attention, which needs it dense")
            return None
        return self._linear(layer_name, shape)

    def table_method(self, name: str, shape: LinearShape) -> LinearMethod | None:
        """See ``TableQuantization``."""
        return None if self.selection.is_ignored(name) else self._head(name, shape)

    def loading_ended(self) -> None:
        """See ``LoadingObserver``."""
        self.selection.report()

    def _head(self, name: str, shape: LinearShape) -> LinearMethod | None:
        if self._options.head == "dense":
            self.selection.leave(name, "head=dense")
            return None
        return self._vocabulary(shape)

    @abstractmethod
    def _linear(self, name: str, shape: LinearShape) -> LinearMethod | None:
        """For an ordinary layer; None after noting why not."""

    @abstractmethod
    def _vocabulary(self, shape: LinearShape) -> LinearMethod:
        """For an output layer or an embedding."""


def target_rows(placement: Placement, values: torch.Tensor) -> list[tuple[slice, torch.Tensor]]:
    """Rows of the layer with the values [rows, I] that belong there, a bounded number of weights at a time."""
    first = placement.target_start if placement.dim == 0 else 0
    step = max(1, CHUNK_WEIGHTS // max(1, values.shape[1]))
    return [
        (slice(first + begin, first + min(begin + step, len(values))), values[begin : begin + step])
        for begin in range(0, len(values), step)
    ]
