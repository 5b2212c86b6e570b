"""Decoders whose layers are recurrent (Mamba, gated delta nets) or attend, followed by a feed-forward block or experts.

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
from hardpoint_torch_runtime.layers import DeltaSizes, LayerToolkit, RMSNorm, SelectiveSizes

__all__ = ["HybridModel", "build_hybrid", "create_bamba", "create_granite_hybrid"]

Rotation = tuple[torch.Tensor, torch.Tensor]


def _norm(size: int, config: HybridConfig, layers: LayerToolkit) -> RMSNorm:
    return layers.rms_norm(size, config.norm_eps, weight_offset=config.norm_offset)


def _mixer(name: str, config: HybridConfig, layers: LayerToolkit) -> torch.nn.Module:
    sizes = config.mixer
    if isinstance(sizes, DeltaSizes):
        return layers.delta_mixer(name, sizes)
    return layers.selective_mixer(name, sizes) if isinstance(sizes, SelectiveSizes) else layers.mamba_mixer(name, sizes)


def _feed_forward(name: str, index: int, config: HybridConfig, layers: LayerToolkit) -> torch.nn.Module:
    experts = config.experts
    if experts is None or not experts.layers[index]:
        return GatedMLP(name, config, layers, layers.silu_and_mul())
    return layers.mixture_of_experts(name, experts.sizes, experts.routing)


class HybridAttention(torch.nn.Module):
    """[T, C] to [T, C], rotated or without positions.

    Where outputs are gated, checkpoints have the query and the gate of each head next to each other.
    """

    def __init__(self, name: str, config: HybridConfig, layers: LayerToolkit) -> None:
        super().__init__()
        size, per_head = config.head_size, 2 if config.gates_output else 1
        heads = layers.parallel.divide(config.num_heads, f"{name}: number of query heads")
        self.qkv_proj = layers.qkv_linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            num_heads=config.num_heads * per_head,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            bias=config.attention_bias,
        )
        kv_heads = self.qkv_proj.num_kv_heads
        self.o_proj = layers.row_linear(
            f"{name}.o_proj", config.num_heads * size, config.hidden_size, bias=config.attention_bias
        )
        self.q_norm = _norm(size, config, layers) if config.qk_norm else None
        self.k_norm = _norm(size, config, layers) if config.qk_norm else None
        self.rotary = None if config.rope is None else layers.rotary(size, config.rope)
        self.attn = layers.attention(
            f"{name}.attn", num_heads=heads, num_kv_heads=kv_heads, head_size=size, scale=config.attention_scale
        )
        self._parts = (heads * per_head, kv_heads, kv_heads)
        self._gates_output = config.gates_output
        self._head_size = size

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        states = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_size)
        query, key, value = states.split(self._parts, dim=1)
        turned, gate = states[:, : self._parts[0] + self._parts[1]], None
        if self._gates_output:
            query, gate = query[:, ::2], query[:, 1::2]
            turned = torch.cat((query, key), dim=1)
            query, key = turned.split((query.shape[1], key.shape[1]), dim=1)
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            key.copy_(self.k_norm(key))
        if self.rotary is not None and rotation is not None:
            # Queries and keys lie next to each other and turn by the same angles: one call.
            self.rotary.rotate_(turned, *rotation)
        attended = self.attn(query, key, value)
        return self.o_proj(attended if gate is None else attended * gate.flatten(1).sigmoid())


class HybridLayer(torch.nn.Module):
    """(output to add, residual) to the same; the residual is None before the first layer of a stage."""

    def __init__(self, index: int, config: HybridConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        is_recurrent = config.recurrent[index]
        self.input_layernorm = _norm(config.hidden_size, config, layers)
        self.mixer = _mixer(f"{name}.mixer", config, layers) if is_recurrent else None
        self.self_attn = None if is_recurrent else HybridAttention(f"{name}.self_attn", config, layers)
        self.post_attention_layernorm = _norm(config.hidden_size, config, layers)
        self.mlp = _feed_forward(f"{name}.mlp", index, config, layers)
        self._residual_scale = config.residual_scale

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        mixed = self._mix(normed, rotation)
        normed, residual = self.post_attention_layernorm.add(self._scaled(mixed), residual)
        return self._scaled(self.mlp(normed)), residual

    def _mix(self, normed: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        mixed: torch.Tensor = self.mixer(normed) if self.mixer is not None else self._attend(normed, rotation)
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
            lambda: _norm(config.hidden_size, config, layers),
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
        experts = self.config.experts
        return [
            *self.config.rules,
            *(experts.rules if experts is not None else ()),
            *causal_rules(self.config),
            *unchanged_rules(),
        ]


def build_hybrid(ctx: ModelContext, read: Callable[[Mapping[str, Any], str], HybridConfig]) -> HybridModel:
    """Weights are uninitialized until they are loaded."""
    info, layers = require_toolkit(ctx)
    return HybridModel(info, read(info.config, info.architecture), layers, ctx.stage)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_bamba(ctx: ModelContext, options: NoOptions) -> Model:
    """``BambaForCausalLM``: Mamba-2 layers, and attention in a few of them."""
    del options
    return build_hybrid(ctx, read_bamba)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_granite_hybrid(ctx: ModelContext, options: NoOptions) -> Model:
    """``GraniteMoeHybridForCausalLM``: Granite 4, with a shared feed-forward block and perhaps experts."""
    del options
    return build_hybrid(ctx, read_granite_hybrid)
