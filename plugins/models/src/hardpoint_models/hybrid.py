"""Decoders whose layers are recurrent (Mamba-2) or attend, followed by a feed-forward block or experts.

Legend: T tokens of the step, C hidden size, V vocabulary, S sampled positions. Parameter names follow Hugging Face
checkpoints of the Llama lineage; ``HybridConfig.rules`` has what others call differently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardpoint.interfaces.model import Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import require_toolkit
from hardpoint_models.causal import CausalModel, GatedMLP, LayerStack, causal_rules
from hardpoint_models.hybrid_config import HybridConfig, read_bamba, read_granite_hybrid, unchanged_rules
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["HybridModel", "create_bamba", "create_granite_hybrid"]

Rotation = tuple[torch.Tensor, torch.Tensor]


class HybridAttention(torch.nn.Module):
    """[T, C] to [T, C], rotated or without positions."""

    def __init__(self, name: str, config: HybridConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.qkv_proj = layers.qkv_linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=config.head_size,
            bias=config.attention_bias,
        )
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = layers.row_linear(
            f"{name}.o_proj", config.num_heads * config.head_size, config.hidden_size, bias=config.attention_bias
        )
        self.rotary = None if config.rope is None else layers.rotary(config.head_size, config.rope)
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=config.head_size,
            scale=config.attention_scale,
        )
        self._parts = (heads, kv_heads, kv_heads)
        self._head_size = config.head_size

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        states = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_size)
        query, key, value = states.split(self._parts, dim=1)
        if self.rotary is not None and rotation is not None:
            # Queries and keys lie next to each other and turn by the same angles: one call.
            self.rotary.rotate_(states[:, : self._parts[0] + self._parts[1]], *rotation)
        return self.o_proj(self.attn(query, key, value))


class HybridLayer(torch.nn.Module):
    """(output to add, residual) to the same; the residual is None before the first layer of a stage."""

    def __init__(self, index: int, config: HybridConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        self.input_layernorm = layers.rms_norm(config.hidden_size, config.norm_eps)
        self.mamba = layers.mamba_mixer(f"{name}.mamba", config.mixer) if config.recurrent[index] else None
        self.self_attn = None if config.recurrent[index] else HybridAttention(f"{name}.self_attn", config, layers)
        self.post_attention_layernorm = layers.rms_norm(config.hidden_size, config.norm_eps)
        experts = config.experts
        self.mlp = (
            GatedMLP(f"{name}.mlp", config, layers, layers.silu_and_mul())
            if experts is None
            else layers.mixture_of_experts(f"{name}.mlp", experts.sizes, experts.routing)
        )
        self._residual_scale = config.residual_scale

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        mixed = self._mix(normed, rotation)
        normed, residual = self.post_attention_layernorm.add(self._scaled(mixed), residual)
        return self._scaled(self.mlp(normed)), residual

    def _mix(self, normed: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        mixed: torch.Tensor = self.mamba(normed) if self.mamba is not None else self._attend(normed, rotation)
        return mixed

    def _attend(self, normed: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        if self.self_attn is None:
            raise RuntimeError("a layer of a hybrid has neither a mixer nor attention")
        attended: torch.Tensor = self.self_attn(normed, rotation)
        return attended

    def _scaled(self, output: torch.Tensor) -> torch.Tensor:
        return output if self._residual_scale == 1.0 else output * self._residual_scale


class HybridStack(LayerStack):
    """Layers that attend with the model's rotation, if it has one, and layers that need none."""

    def __init__(self, config: HybridConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__(
            config,
            layers,
            stage,
            lambda index: HybridLayer(index, config, layers),
            lambda: layers.rms_norm(config.hidden_size, config.norm_eps),
        )
        self.rotary = None if config.rope is None else layers.rotary(config.head_size, config.rope)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]; ``hidden`` is overwritten."""
        rotation = None if self.rotary is None else self.rotary.lookup(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers.values():
            hidden, residual = layer(hidden, residual, rotation)
        return self.finish(hidden, residual)


class HybridModel(CausalModel):
    """Model of one pipeline stage."""

    def __init__(self, info: ModelInfo, config: HybridConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        super().__init__(info, config, layers, stage, lambda held: HybridStack(config, layers, held))
        self.config = config

    def enter(self, embedded: torch.Tensor) -> torch.Tensor:
        return embedded * self.config.embedding_scale

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        return logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)

    def weight_rules(self) -> Sequence[WeightRule]:
        return [*self.config.rules, *causal_rules(self.config), *unchanged_rules()]


def _build(ctx: ModelContext, read: Callable[[Mapping[str, Any], str], HybridConfig]) -> HybridModel:
    """Weights are uninitialized until they are loaded."""
    info, layers = require_toolkit(ctx)
    return HybridModel(info, read(info.config, info.architecture), layers, ctx.stage)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_bamba(ctx: ModelContext, options: NoOptions) -> Model:
    """``BambaForCausalLM``: Mamba-2 layers, and attention in a few of them."""
    del options
    return _build(ctx, read_bamba)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_granite_hybrid(ctx: ModelContext, options: NoOptions) -> Model:
    """``GraniteMoeHybridForCausalLM``: Granite 4, with a shared feed-forward block and perhaps experts."""
    del options
    return _build(ctx, read_granite_hybrid)
