"""The method ``int4``: weights are rounded to four bits while they load, with a scale and a minimum per group.

Torch turns them back into floats in every call, a few rows at a time.
Legend: O output size, I input size, G inputs per group.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import torch
from pydantic import Field

from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_quantization.grouped import product_of_pieces
from hardpoint_quantization.int8 import Int8Linear
from hardpoint_quantization.online import OnlineMethod, OnlineOptions, target_rows
from hardpoint_quantization.rounding import CHUNK_WEIGHTS
from hardpoint_torch_runtime.layers import NIBBLE_RUN, GroupedInt4Weight, Placement

__all__ = ["Int4Linear", "Int4Method", "Int4Options", "create", "int4_groups", "int4_values"]

LARGEST_INT4 = 15
LARGEST_HALF = 65504.0
SMALLEST_SCALE = 2.0**-12
"""Of the loudest group: what float16 then rounds away of the softest is nothing beside a step of the loudest."""


class Int4Options(OnlineOptions):
    """Options under ``plugins.quantization.int4``."""

    group_size: Literal[32, 64, 128] = Field(default=32, description="weights of a row that share a scale and minimum")
    activations: Literal["int8", "float"] = Field(
        default="int8", description="what products are taken over: activations rounded in groups of 32, or as they are"
    )


def int4_groups(weight: torch.Tensor, group_size: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values uint8 [O, I / 2], scales and minimums float32 [O, I / G] of ``weight`` [O, I], as ``GroupedInt4Weight``
    has them. Each group's range is cut into 15 equal steps; scales and minimums are numbers that float16 has, wherever
    it has them well enough, so that kernels may keep them in two bytes."""
    groups = weight.float().unflatten(1, (-1, group_size))
    mins, highest = groups.aminmax(dim=2)
    scales, mins = _as_halves((highest - mins) / LARGEST_INT4, mins)
    divisors = torch.where(scales > 0, scales, 1.0)
    rounded = ((groups - mins.unsqueeze(2)) / divisors.unsqueeze(2)).round_().clamp_(0, LARGEST_INT4)
    runs = rounded.to(torch.uint8).view(len(weight), -1, 2, NIBBLE_RUN // 2)
    return (runs[:, :, 0] | runs[:, :, 1] << 4).flatten(1), scales, mins


def _as_halves(scales: torch.Tensor, mins: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Rounded to float16, unless its range is too narrow for them: then they stay as they are."""
    if not scales.numel() or not SMALLEST_SCALE <= float(scales.max()) < LARGEST_HALF > float(mins.abs().max()):
        return scales, mins
    return scales.half().float(), mins.half().float()


def int4_values(values: torch.Tensor, scales: torch.Tensor, mins: torch.Tensor) -> torch.Tensor:
    """float32 [O, I] of what :func:`int4_groups` gives."""
    runs = values.unflatten(1, (-1, NIBBLE_RUN // 2))
    numbers = torch.cat((runs & 15, runs >> 4), dim=2).view(len(values), scales.shape[1], -1)
    return (numbers * scales.unsqueeze(2) + mins.unsqueeze(2)).flatten(1)


class Int4Linear(LinearMethod):
    """``weight`` uint8 [O, I / 2], ``weight_scale`` and ``weight_min`` float32 [O, I / G], filled row by row."""

    def __init__(self, group_size: int, device: torch.device, *, int8_activations: bool) -> None:
        self._group_size = group_size
        self._device = device
        self._int8_activations = int8_activations
        self._is_loaded = False

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        outputs, groups = shape.output_size, shape.input_size // self._group_size
        values = torch.zeros(outputs, shape.input_size // 2, dtype=torch.uint8, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(values, requires_grad=False))
        for name in ("weight_scale", "weight_min"):
            layer.register_buffer(name, torch.zeros(outputs, groups, device=self._device))

    def load_dense(self, layer: torch.nn.Module, placement: Placement, values: torch.Tensor) -> None:
        """See ``StreamingLinearMethod``."""
        kept = self._kept(layer)
        for rows, piece in target_rows(placement, values):
            for target, source in zip(kept, int4_groups(piece, self._group_size), strict=True):
                target[rows].copy_(source)

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        del layer
        self._is_loaded = True

    def _kept(self, layer: torch.nn.Module) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        return layer.get_parameter("weight"), layer.get_buffer("weight_scale"), layer.get_buffer("weight_min")

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        size = len(layer.get_parameter("weight"))
        return product_of_pieces(x, self._pieces(layer), bias, size, int8_activations=self._int8_activations)

    def _pieces(self, layer: torch.nn.Module) -> Iterator[torch.Tensor]:
        values, scales, mins = self._kept(layer)
        step = max(1, CHUNK_WEIGHTS // (2 * values.shape[1]))
        for first in range(0, len(values), step):
            rows = slice(first, first + step)
            yield int4_values(values[rows], scales[rows], mins[rows])

    def stored(self, layer: torch.nn.Module) -> GroupedInt4Weight:
        """See ``StoredLinearMethod``."""
        values, scales, mins = self._kept(layer)
        if not self._is_loaded or not values.numel():
            raise RuntimeError("the layer keeps no weight: it is not loaded yet, or was released to a kernel")
        return GroupedInt4Weight(values, scales, mins, self._group_size, self._int8_activations)

    def release(self, layer: torch.nn.Module) -> None:
        """See ``StoredLinearMethod``."""
        nothing = torch.empty(0, dtype=torch.uint8, device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(nothing, requires_grad=False))
        for name in ("weight_scale", "weight_min"):
            layer.register_buffer(name, torch.empty(0, device=self._device))


class Int4Method(OnlineMethod):
    """Every linear whose inputs make whole groups in int4, experts of mixtures included; the vocabulary in int8."""

    name = "int4"

    def __init__(self, options: Int4Options, ctx: WorkerContext) -> None:
        super().__init__(options, ctx.device or torch.device("cpu"), ctx.logger)
        self._group_size = options.group_size
        self._int8_activations = options.activations == "int8"

    def _linear(self, name: str, shape: LinearShape) -> LinearMethod | None:
        if shape.input_size % self._group_size:
            self.selection.leave(
                name, f"{shape.input_size} inputs make no whole groups of {self._group_size} (option group_size)"
            )
            return None
        return Int4Linear(self._group_size, self._device, int8_activations=self._int8_activations)

    def _vocabulary(self, shape: LinearShape) -> LinearMethod:
        del shape
        return Int8Linear(self._device, int8_activations=self._int8_activations)


@plugin("quantization", options=Int4Options)
def create(ctx: WorkerContext, options: Int4Options) -> QuantizationMethod:
    return Int4Method(options, ctx)
