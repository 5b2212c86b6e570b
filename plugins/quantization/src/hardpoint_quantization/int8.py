"""The method ``int8``: weights are rounded to eight bits while they load, one scale per output.

By default activations are rounded too, each row by itself with its own scale, and the product is taken over whole
numbers. Legend: T tokens, I input size, O output size.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_quantization.grouped import product_of_pieces
from hardpoint_quantization.online import OnlineMethod, OnlineOptions, target_rows
from hardpoint_quantization.rounding import CHUNK_WEIGHTS, int8_rows, integer_product
from hardpoint_torch_runtime.layers import ChannelInt8Weight, Placement

__all__ = ["Int8Linear", "Int8Method", "Int8Options", "create"]


class Int8Options(OnlineOptions):
    """Options under ``plugins.quantization.int8``."""

    activations: Literal["int8", "float"] = Field(
        default="int8", description="what the product is taken over: rounded activations, or weights turned back"
    )


class Int8Linear(LinearMethod):
    """``weight`` int8 [O, I] and ``weight_scale`` float32 [O], filled row by row: there is never a dense weight."""

    def __init__(self, device: torch.device, *, int8_activations: bool) -> None:
        self._device = device
        self._int8_activations = int8_activations
        self._is_loaded = False
        self._dtype = torch.float32

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        # Zeros, since the rows that only fill up a rank's share of a vocabulary are never loaded.
        values = torch.zeros(shape.output_size, shape.input_size, dtype=torch.int8, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(values, requires_grad=False))
        layer.register_buffer("weight_scale", torch.zeros(shape.output_size, device=self._device))
        self._dtype = getattr(torch, shape.dtype)

    def load_dense(self, layer: torch.nn.Module, placement: Placement, values: torch.Tensor) -> None:
        """See ``StreamingLinearMethod``."""
        weight, scale = layer.get_parameter("weight"), layer.get_buffer("weight_scale")
        for rows, piece in target_rows(placement, values):
            rounded, scales = int8_rows(piece)
            weight[rows].copy_(rounded)
            scale[rows].copy_(scales)

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        del layer
        self._is_loaded = True

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        weight, scale = layer.get_parameter("weight"), layer.get_buffer("weight_scale")
        if not self._int8_activations:
            pieces = _unpacked(weight, scale)
            return product_of_pieces(x, pieces, bias, len(weight), int8_activations=False)
        rounded, scales = int8_rows(x)
        flat = rounded.reshape(math.prod(x.shape[:-1]), x.shape[-1])
        product = integer_product(flat, weight).view(*x.shape[:-1], len(weight))
        output = product * (scales.unsqueeze(-1) * scale)
        return (output if bias is None else output + bias).to(x.dtype)

    def look_up(self, layer: torch.nn.Module, rows: torch.Tensor) -> torch.Tensor:
        """See ``TableLinearMethod``."""
        weight, scale = layer.get_parameter("weight"), layer.get_buffer("weight_scale")
        return (weight[rows].float() * scale[rows].unsqueeze(-1)).to(self._dtype)

    def stored(self, layer: torch.nn.Module) -> ChannelInt8Weight:
        """See ``StoredLinearMethod``."""
        weight = layer.get_parameter("weight")
        if not self._is_loaded or not weight.numel():
            raise RuntimeError("the layer keeps no weight: it is not loaded yet, or was released to a kernel")
        return ChannelInt8Weight(weight, layer.get_buffer("weight_scale"), self._int8_activations)

    def release(self, layer: torch.nn.Module) -> None:
        """See ``StoredLinearMethod``."""
        nothing = torch.empty(0, dtype=torch.int8, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(nothing, requires_grad=False))
        layer.register_buffer("weight_scale", torch.empty(0, device=self._device))


def _unpacked(weight: torch.Tensor, scale: torch.Tensor) -> Iterator[torch.Tensor]:
    """float32 rows [some of O, I], in order."""
    step = max(1, CHUNK_WEIGHTS // weight.shape[1])
    for first in range(0, len(weight), step):
        yield weight[first : first + step].float() * scale[first : first + step].unsqueeze(1)


class Int8Method(OnlineMethod):
    """Every linear in int8, experts of mixtures included, and the vocabulary unless told otherwise."""

    name = "int8"

    def __init__(self, options: Int8Options, ctx: WorkerContext) -> None:
        super().__init__(options, ctx.device or torch.device("cpu"), ctx.logger)
        self._int8_activations = options.activations == "int8"

    def _linear(self, name: str, shape: LinearShape) -> LinearMethod | None:
        del name, shape
        return Int8Linear(self._device, int8_activations=self._int8_activations)

    def _vocabulary(self, shape: LinearShape) -> LinearMethod:
        del shape
        return Int8Linear(self._device, int8_activations=self._int8_activations)


@plugin("quantization", options=Int8Options)
def create(ctx: WorkerContext, options: Int8Options) -> QuantizationMethod:
    return Int8Method(options, ctx)
