"""Layers of a decoder, which differ in what they normalize.

Legend: T tokens of the step, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch

from hardpoint_models.causal import GatedMLP
from hardpoint_models.decoder_attention import DecoderAttention, Placing, decoder_norm, make_attention
from hardpoint_models.decoder_config import DecoderConfig, NormPlacement
from hardpoint_torch_runtime.layers import LayerToolkit, RotaryEmbedding, ShardedRMSNorm, SiluAndMul
from hardpoint_torch_runtime.lowering import NotStandard, StandardBlock

__all__ = ["LAYER_CLASSES", "DecoderLayer"]


def _activation(config: DecoderConfig, layers: LayerToolkit) -> torch.nn.Module:
    return layers.gelu_tanh_and_mul() if config.activation == "gelu_tanh" else layers.silu_and_mul()


def _feed_forward(name: str, index: int, config: DecoderConfig, layers: LayerToolkit) -> torch.nn.Module:
    experts = config.experts
    if experts is None or not experts.layers[index]:
        return GatedMLP(name, config, layers, _activation(config, layers))
    clamp = experts.clamp
    activation = None if clamp is None else layers.clamped_swiglu(clamp.slope, clamp.limit)
    return layers.mixture_of_experts(name, experts.sizes, experts.routing, activation)


class DecoderLayer(torch.nn.Module):
    """(output to add, residual) to the same; the residual is None before the first layer of the model.

    A placing of None leaves the layer without positions.
    """

    def __init__(self, index: int, config: DecoderConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        self.input_layernorm = decoder_norm(config.hidden_size, config, layers)
        self.self_attn = make_attention(f"{name}.self_attn", config, index, layers)
        self.post_attention_layernorm = decoder_norm(config.hidden_size, config, layers)
        self.mlp = _feed_forward(f"{name}.mlp", index, config, layers)
        self._scale = config.residual_scale

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, placing: Placing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self._scaled(self.self_attn(normed, placing))
        normed, residual = self.post_attention_layernorm.add(attended, residual)
        return self._scaled(self.mlp(normed)), residual

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._scale == 1.0 else output * self._scale

    def describe(self, name: str, rotary: RotaryEmbedding | None) -> StandardBlock | NotStandard:
        """``rotary`` is what the layer is turned by."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(attention, DecoderAttention):
            return NotStandard(f"the attention of {name} is a {type(attention).__name__}")
        if not isinstance(mlp, GatedMLP):
            return NotStandard(f"the feed-forward block of {name} is a {type(mlp).__name__}")
        if rotary is None:
            return NotStandard(f"heads of {name} do not rotate")
        if attention.rotated_norm is not None:
            return NotStandard(f"heads of {name} are normalized after they rotate")
        if isinstance(attention.q_norm, ShardedRMSNorm):
            return NotStandard(f"all heads of {name} are normalized together")
        if self._scale != 1.0:
            return NotStandard(f"{name} scales what it adds to the residual by {self._scale}")
        return StandardBlock(
            name=name,
            input_norm=self.input_layernorm,
            qkv_proj=attention.qkv_proj,
            q_norm=attention.q_norm,
            k_norm=attention.k_norm,
            rotary=rotary,
            attention=attention.attn,
            o_proj=attention.o_proj,
            attention_output_norm=None,
            feed_forward_norm=self.post_attention_layernorm,
            gate_up_proj=mlp.gate_up_proj,
            activation="silu" if isinstance(mlp.activation, SiluAndMul) else "gelu_tanh",
            down_proj=mlp.down_proj,
            feed_forward_output_norm=None,
        )


class SandwichLayer(DecoderLayer):
    """The same with the outputs of attention and feed-forward normalized before they are added."""

    def __init__(self, index: int, config: DecoderConfig, layers: LayerToolkit) -> None:
        super().__init__(index, config, layers)
        self.pre_feedforward_layernorm = decoder_norm(config.hidden_size, config, layers)
        self.post_feedforward_layernorm = decoder_norm(config.hidden_size, config, layers)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, placing: Placing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self._scaled(self.post_attention_layernorm(self.self_attn(normed, placing)))
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self._scaled(self.post_feedforward_layernorm(self.mlp(normed))), residual

    def describe(self, name: str, rotary: RotaryEmbedding | None) -> StandardBlock | NotStandard:
        block = super().describe(name, rotary)
        if isinstance(block, NotStandard):
            return block
        return replace(
            block,
            attention_output_norm=self.post_attention_layernorm,
            feed_forward_norm=self.pre_feedforward_layernorm,
            feed_forward_output_norm=self.post_feedforward_layernorm,
        )


class OutputNormLayer(DecoderLayer):
    """Only outputs are normalized: attention and feed-forward work on the residual stream as it is."""

    def __init__(self, index: int, config: DecoderConfig, layers: LayerToolkit) -> None:
        super().__init__(index, config, layers)
        del self.input_layernorm
        self.post_feedforward_layernorm = decoder_norm(config.hidden_size, config, layers)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, placing: Placing
    ) -> tuple[torch.Tensor, torch.Tensor]:
        stream = hidden if residual is None else residual.add_(hidden)
        stream = stream.add_(self._scaled(self.post_attention_layernorm(self.self_attn(stream, placing))))
        return self._scaled(self.post_feedforward_layernorm(self.mlp(stream))), stream

    def describe(self, name: str, rotary: RotaryEmbedding | None) -> StandardBlock | NotStandard:
        return NotStandard(f"attention of {name} works on hidden states that are not normalized")


LAYER_CLASSES: Mapping[NormPlacement, type[DecoderLayer]] = {
    "before": DecoderLayer,
    "around": SandwichLayer,
    "after": OutputNormLayer,
}
