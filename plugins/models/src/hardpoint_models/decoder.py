"""Decoder-only transformer: pre-norm, rotary positions, grouped-query attention, gated feed-forward or experts.

Windows, rotations, norms, activation, scales and caps are the configuration's choice, layer by layer where it matters.

Legend: T tokens of the step, C hidden size, V vocabulary, S sampled positions; H query and K KV heads of this rank,
D head size. Parameter names follow Hugging Face checkpoints but for the fused ``qkv_proj`` and ``gate_up_proj``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch

from hardpoint.interfaces.model import StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.causal import LAYER, CausalModel, GatedMLP, LayerStack, causal_rules, gated_rules
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_torch_runtime.layers import LayerToolkit, RMSNorm, RotaryEmbedding, SiluAndMul
from hardpoint_torch_runtime.lowering import NotStandard, StandardBlock, StandardStack

__all__ = ["DecoderModel"]

Rotation = tuple[torch.Tensor, torch.Tensor]


def _norm(size: int, config: DecoderConfig, layers: LayerToolkit) -> RMSNorm:
    return layers.rms_norm(size, config.norm_eps, weight_offset=config.norm_offset)


def _rotary(config: DecoderConfig, layers: LayerToolkit) -> RotaryEmbedding:
    return layers.rotary(config.head_size, config.rope, pairs_are_neighbors=config.pairs_are_neighbors)


def _activation(config: DecoderConfig, layers: LayerToolkit) -> torch.nn.Module:
    return layers.gelu_tanh_and_mul() if config.activation == "gelu_tanh" else layers.silu_and_mul()


class DecoderAttention(torch.nn.Module):
    """[T, C] to [T, C]."""

    def __init__(self, name: str, config: DecoderConfig, window: int | None, layers: LayerToolkit) -> None:
        super().__init__()
        size = config.head_size
        self.qkv_proj = layers.qkv_linear(
            f"{name}.qkv_proj",
            config.hidden_size,
            num_heads=config.num_heads,
            num_kv_heads=config.num_kv_heads,
            head_size=size,
            bias=config.qkv_bias,
        )
        heads, kv_heads = self.qkv_proj.num_heads, self.qkv_proj.num_kv_heads
        self.o_proj = layers.row_linear(
            f"{name}.o_proj", config.num_heads * size, config.hidden_size, bias=config.output_bias
        )
        self.q_norm = _norm(size, config, layers) if config.qk_norm else None
        self.k_norm = _norm(size, config, layers) if config.qk_norm else None
        self.rotary = _rotary(config, layers)
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            scale=config.attention_scale,
            sliding_window=window,
            logits_soft_cap=config.attention_soft_cap,
        )
        self._num_heads = heads
        self._num_rotated = heads + kv_heads
        self._head_size = size

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        states = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_size)
        query, key = states[:, : self._num_heads], states[:, self._num_heads : self._num_rotated]
        if self.q_norm is not None and self.k_norm is not None:
            query.copy_(self.q_norm(query))
            key.copy_(self.k_norm(key))
        # Queries and keys lie next to each other in the fused projection and turn by the same angles: one call.
        self.rotary.rotate_(states[:, : self._num_rotated], *rotation)
        return self.o_proj(self.attn(query, key, states[:, self._num_rotated :]))


def _attention(name: str, config: DecoderConfig, window: int | None, layers: LayerToolkit) -> torch.nn.Module:
    latent = config.latent
    if latent is None:
        return DecoderAttention(name, config, window, layers)
    return layers.latent_attention(
        name,
        latent.sizes,
        rotary=_rotary(config, layers),
        scale=config.attention_scale,
        norm_eps=config.norm_eps,
        bias=config.qkv_bias,
    )


def _feed_forward(name: str, index: int, config: DecoderConfig, layers: LayerToolkit) -> torch.nn.Module:
    experts = config.experts
    if experts is None or not experts.layers[index]:
        return GatedMLP(name, config, layers, _activation(config, layers))
    return layers.mixture_of_experts(name, experts.sizes, experts.routing)


class DecoderLayer(torch.nn.Module):
    """(output to add, residual) to the same; the residual is None before the first layer of the model."""

    def __init__(self, index: int, config: DecoderConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name, window = f"model.layers.{index}", config.windows[index]
        self.input_layernorm = _norm(config.hidden_size, config, layers)
        self.self_attn = _attention(f"{name}.self_attn", config, window, layers)
        self.post_attention_layernorm = _norm(config.hidden_size, config, layers)
        self.mlp = _feed_forward(f"{name}.mlp", index, config, layers)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        normed, residual = self.post_attention_layernorm.add(self.self_attn(normed, rotation), residual)
        return self.mlp(normed), residual

    def describe(self, name: str, rotary: RotaryEmbedding) -> StandardBlock | NotStandard:
        """``rotary`` is what the layer is turned by."""
        attention, mlp = self.self_attn, self.mlp
        if not isinstance(attention, DecoderAttention):
            return NotStandard(f"the attention of {name} is a {type(attention).__name__}")
        if not isinstance(mlp, GatedMLP):
            return NotStandard(f"the feed-forward block of {name} is a {type(mlp).__name__}")
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
        self.pre_feedforward_layernorm = _norm(config.hidden_size, config, layers)
        self.post_feedforward_layernorm = _norm(config.hidden_size, config, layers)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation
    ) -> tuple[torch.Tensor, torch.Tensor]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        attended = self.post_attention_layernorm(self.self_attn(normed, rotation))
        normed, residual = self.pre_feedforward_layernorm.add(attended, residual)
        return self.post_feedforward_layernorm(self.mlp(normed)), residual

    def describe(self, name: str, rotary: RotaryEmbedding) -> StandardBlock | NotStandard:
        block = super().describe(name, rotary)
        if isinstance(block, NotStandard):
            return block
        return replace(
            block,
            attention_output_norm=self.post_attention_layernorm,
            feed_forward_norm=self.pre_feedforward_layernorm,
            feed_forward_output_norm=self.post_feedforward_layernorm,
        )


class DecoderStack(LayerStack):
    """Layers that all have the rotation of the model, or the local one."""

    def __init__(self, config: DecoderConfig, layers: LayerToolkit, stage: StageRange) -> None:
        layer_class = SandwichLayer if config.is_sandwiched else DecoderLayer
        super().__init__(
            config,
            layers,
            stage,
            lambda index: layer_class(index, config, layers),
            lambda: _norm(config.hidden_size, config, layers),
        )
        self.rotary = _rotary(config, layers)
        local = config.local_rope
        self.local_rotary = None if local is None else layers.rotary(config.head_size, local)
        is_local = [local is not None and config.local_layers[index] for index in range(stage.first, stage.last)]
        self._in_order = tuple(zip(self.layers.values(), is_local, strict=True))
        # Rounded as the embeddings are.
        scale = config.embedding_scale
        self._embedding_scale = None if scale is None else float(torch.tensor(scale, dtype=layers.dtype))

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(token_ids)
        return embedded if self._embedding_scale is None else embedded * self._embedding_scale

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]; ``hidden`` is overwritten."""
        if self.lowered is not None and (lowered := self.lowered(hidden, positions)) is not None:
            return lowered
        rotation = self.rotary.lookup(positions)
        local_rotation = rotation if self.local_rotary is None else self.local_rotary.lookup(positions)
        residual: torch.Tensor | None = None
        for layer, is_local in self._in_order:
            hidden, residual = layer(hidden, residual, local_rotation if is_local else rotation)
        return self.finish(hidden, residual)

    def describe(self) -> StandardStack | NotStandard:
        blocks: list[StandardBlock] = []
        for index, (layer, is_local) in zip(self.layers, self._in_order, strict=True):
            rotary = self.local_rotary if is_local and self.local_rotary is not None else self.rotary
            if not isinstance(layer, DecoderLayer):
                return NotStandard(f"layer {index} is a {type(layer).__name__}")
            block = layer.describe(f"model.layers.{index}", rotary)
            if isinstance(block, NotStandard):
                return block
            blocks.append(block)
        return StandardStack(tuple(blocks), self.norm)


class DecoderModel(CausalModel):
    """Model of one pipeline stage."""

    def __init__(self, info: ModelInfo, config: DecoderConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        super().__init__(info, config, layers, stage, lambda held: DecoderStack(config, layers, held))
        self.config = config

    def finish_logits(self, logits: torch.Tensor) -> torch.Tensor:
        cap = self.config.logits_soft_cap
        return logits if cap is None else logits.div_(cap).tanh_().mul_(cap)

    def weight_rules(self) -> Sequence[WeightRule]:
        unchanged = [
            "model.embed_tokens.weight",
            "model.norm.weight",
            f"{LAYER}.input_layernorm.weight",
            f"{LAYER}.post_attention_layernorm.weight",
            f"{LAYER}.pre_feedforward_layernorm.weight",
            f"{LAYER}.post_feedforward_layernorm.weight",
            f"{LAYER}.self_attn.o_proj.*",
            f"{LAYER}.self_attn.q_norm.weight",
            f"{LAYER}.self_attn.k_norm.weight",
            f"{LAYER}.mlp.down_proj.*",
        ]
        return [
            *self.config.rules,
            *(self.config.latent.rules if self.config.latent is not None else ()),
            *(self.config.experts.rules if self.config.experts is not None else ()),
            *causal_rules(self.config),
            *gated_rules("mlp"),
            *(WeightRule(name, name) for name in unchanged),
        ]
