"""The method ``gguf``: weights stay in memory as the blocks that a GGUF file holds, mapped from it where they can be.

Torch unpacks them anew in every call, a few rows at a time: exact and slow. Kernels take the blocks over.
"""

from __future__ import annotations

import functools
from typing import Literal

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import plugin
from hardpoint.interfaces.quantization import LinearMethod, LinearShape, QuantizationMethod
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_quantization.gguf_blocks import BLOCK_TYPES
from hardpoint_quantization.gguf_linear import GGUFLinear
from hardpoint_quantization.online import ABSORBED
from hardpoint_quantization.selection import Selection

__all__ = ["GGUFMethod", "GGUFOptions", "create"]

LOADER = "gguf"


class GGUFOptions(BaseModel):
    """Options under ``plugins.quantization.gguf``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    activations: Literal["int8", "float"] = Field(
        default="int8", description="what products are taken over: activations rounded in groups of 32, or as they are"
    )
    ignore: tuple[str, ...] = Field(
        default=(), description="names and patterns (fnmatch) of layers to unpack, as in model.layers.0.mlp.*"
    )


class GGUFMethod(QuantizationMethod):
    """Every linear and the vocabulary as stored; what is not stored in blocks stays dense."""

    name = "gguf"
    accepts_packed = frozenset(f"gguf.{kind.lower()}" for kind in BLOCK_TYPES)

    def __init__(self, options: GGUFOptions, ctx: WorkerContext) -> None:
        self._options = options
        self._device = ctx.device or torch.device("cpu")
        self.selection = Selection(self.name, options.ignore, ctx.logger)

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        del device_type
        if info.loader == LOADER:
            return None
        return (
            f"its weights are read by the loader {info.loader!r}, and only GGUF files hold blocks; take int8 or int4, "
            "which quantize while they load"
        )

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        del shape
        if layer_name.rpartition(".")[2] in ABSORBED:
            self.selection.leave(layer_name, "absorbed into attention, which needs it dense")
            return None
        return self._method(layer_name)

    def table_method(self, name: str, shape: LinearShape) -> LinearMethod | None:
        """See ``TableQuantization``."""
        del shape
        return self._method(name)

    def loading_ended(self) -> None:
        """See ``LoadingObserver``."""
        self.selection.report()

    def _method(self, name: str) -> LinearMethod | None:
        if self.selection.is_ignored(name):
            return None
        on_dense = functools.partial(self.selection.leave, name)
        return GGUFLinear(self._device, on_dense, int8_activations=self._options.activations == "int8")


@plugin("quantization", options=GGUFOptions)
def create(ctx: WorkerContext, options: GGUFOptions) -> QuantizationMethod:
    return GGUFMethod(options, ctx)
