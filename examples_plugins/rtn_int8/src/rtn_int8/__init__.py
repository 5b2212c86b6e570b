"""Round-to-nearest INT8: weights of linear layers are rounded to eight bits while the model loads.

Each output row has one scale, its largest magnitude over 127. Activations stay in the compute dtype; the product is
taken with the weight cast back, and each output is scaled once. A quarter of float32's memory, half of bfloat16's.
"""

from __future__ import annotations

import torch
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces import LinearMethod, LinearShape, ModelInfo, QuantizationMethod, WorkerContext, plugin

LARGEST = 127


class Options(BaseModel):
    """Options under ``plugins.quantization.rtn_int8``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    skip: tuple[str, ...] = Field(default=("lm_head",), description="parts of names of layers that stay as they are")


class RtnInt8Linear(LinearMethod):
    """Loads the dense weight through the usual path, then keeps int8 [output, input] and float32 scales [output, 1]."""

    def __init__(self, device: torch.device) -> None:
        self._device = device

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None:
        dense = torch.empty(shape.output_size, shape.input_size, dtype=getattr(torch, shape.dtype), device=self._device)
        layer.register_parameter("weight", torch.nn.Parameter(dense, requires_grad=False))

    def process_after_loading(self, layer: torch.nn.Module) -> None:
        weight = layer.get_parameter("weight")
        if weight.dtype == torch.int8:
            return
        dense = weight.float()
        # A row of zeros has no largest magnitude; any scale will do for it.
        scale = (dense.abs().amax(dim=1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
        rounded = (dense / scale).round_().clamp_(-LARGEST, LARGEST).to(torch.int8)
        layer.register_parameter("weight", torch.nn.Parameter(rounded, requires_grad=False))
        layer.register_parameter("weight_scale", torch.nn.Parameter(scale, requires_grad=False))

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """[..., input] to [..., output] in ``x``'s dtype."""
        weight, scale = layer.get_parameter("weight"), layer.get_parameter("weight_scale")
        output = torch.nn.functional.linear(x, weight.to(x.dtype)) * scale.squeeze(1).to(x.dtype)
        return output if bias is None else output + bias


class RtnInt8(QuantizationMethod):
    name = "rtn_int8"

    def __init__(self, options: Options, device: torch.device) -> None:
        self._options = options
        self._device = device

    def refuse(self, info: ModelInfo, device_type: str) -> str | None:
        stored = info.config.get("quantization_config")
        return f"the checkpoint is quantized already: {stored!r}" if stored else None

    def linear_method(self, layer_name: str, shape: LinearShape) -> LinearMethod | None:
        if any(part in layer_name for part in self._options.skip):
            return None
        return RtnInt8Linear(self._device)


@plugin("quantization", options=Options)
def create(ctx: WorkerContext, options: Options) -> QuantizationMethod:
    return RtnInt8(options, ctx.device or torch.device("cpu"))
