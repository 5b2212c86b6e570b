"""Decoders whose layers are recurrent (Mamba-2) or attend, followed by a feed-forward block or experts.

Legend: T tokens of the step, C hidden size, V vocabulary, S sampled positions. Parameter names follow Hugging Face
checkpoints of the Llama lineage; ``HybridConfig.rules`` has what others call differently.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch

from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import Model, ModelContext, StageOutput, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import require_toolkit
from hardpoint_models.hybrid_config import LAYER, HybridConfig, read_bamba, read_granite_hybrid, unchanged_rules
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


class HybridMLP(torch.nn.Module):
    """[T, C] to [T, C]."""

    def __init__(self, name: str, config: HybridConfig, layers: LayerToolkit) -> None:
        super().__init__()
        parts = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.gate_up_proj = layers.merged_column_linear(
            f"{name}.gate_up_proj", config.hidden_size, parts, bias=config.mlp_bias
        )
        self.down_proj = layers.row_linear(
            f"{name}.down_proj", config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )
        self.activation = layers.silu_and_mul()

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.gate_up_proj(hidden)))


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
            HybridMLP(f"{name}.mlp", config, layers)
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


class HybridStack(torch.nn.Module):
    """The layers of one pipeline stage, with embedding and final norm where the stage has them."""

    def __init__(self, config: HybridConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__()
        needs_embedding = stage.has_embedding or (stage.has_head and config.is_tied)
        self.embed_tokens = (
            layers.embedding("model.embed_tokens", config.vocab_size, config.hidden_size) if needs_embedding else None
        )
        # Keyed by the number in the whole model, so that names agree over stages.
        self.layers = torch.nn.ModuleDict(
            {str(index): HybridLayer(index, config, layers) for index in range(stage.first, stage.last)}
        )
        self.norm = layers.rms_norm(config.hidden_size, config.norm_eps) if stage.has_head else None
        self.rotary = None if config.rope is None else layers.rotary(config.head_size, config.rope)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C]; ``hidden`` is overwritten."""
        rotation = None if self.rotary is None else self.rotary.lookup(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers.values():
            hidden, residual = layer(hidden, residual, rotation)
        if self.norm is not None:
            return self.norm.add(hidden, residual)[0]
        return hidden if residual is None else residual.add_(hidden)


class HybridModel(torch.nn.Module):
    """Model of one pipeline stage. Between stages travels ``hidden``, the sum of output and residual, [T, C]."""

    def __init__(self, info: ModelInfo, config: HybridConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        super().__init__()
        self._info = info
        self.config = config
        self.stage = stage if stage is not None else StageRange(0, config.num_layers)
        self.model = HybridStack(config, layers, self.stage)
        tied_to = self.model.embed_tokens if config.is_tied else None
        self.lm_head = (
            layers.lm_head("lm_head", config.vocab_size, config.hidden_size, tied_to=tied_to)
            if self.stage.has_head
            else None
        )
        self._kv_specs = layers.kv_cache_specs()

    @property
    def info(self) -> ModelInfo:
        return self._info

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        if self.model.embed_tokens is None:
            raise RuntimeError(f"{self.stage} holds no embedding; hand it intermediates")
        return self.model.embed_tokens(token_ids)

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        if intermediates is not None:
            # The stack writes into its input, and this one belongs to the caller.
            hidden = intermediates["hidden"].clone()
        elif embeddings is not None:
            hidden = embeddings * self.config.embedding_scale
        elif token_ids is not None:
            hidden = self.embed(token_ids) * self.config.embedding_scale
        else:
            raise ValueError("one of token_ids, embeddings and intermediates must be given")
        hidden = self.model(hidden, positions)
        return hidden if self.stage.has_head else StageOutput(intermediates={"hidden": hidden})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        if self.lm_head is None:
            raise RuntimeError(f"stage {self.stage} holds no head; logits come from the last stage")
        logits = self.lm_head(hidden)
        return logits if self.config.logits_divisor == 1.0 else logits.div_(self.config.logits_divisor)

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for index, layer in self.model.layers.items():
            yield f"model.layers.{index}", layer

    def weight_rules(self) -> Sequence[WeightRule]:
        projections = ((f"{LAYER}.self_attn.{part}_proj.*", part) for part in ("q", "k", "v"))
        return [
            *self.config.rules,
            # Old checkpoints carry frequency tables; they are computed here.
            WeightRule(f"{LAYER}.self_attn.rotary_emb.inv_freq", None),
            WeightRule("lm_head.weight", None if self.config.is_tied else "lm_head.projection.weight"),
            *(WeightRule(pattern, f"{LAYER}.self_attn.qkv_proj.*", part) for pattern, part in projections),
            *unchanged_rules(),
        ]

    def holds(self, parameter: str) -> bool:
        """False for parameters of the whole model that other stages hold."""
        parts = parameter.split(".")
        if parts[:2] == ["model", "layers"]:
            is_layer = parts[2].isdecimal() and int(parts[2]) < self.config.num_layers
            return parts[2] in self.model.layers or not is_layer
        if parts[:2] == ["model", "embed_tokens"]:
            return self.model.embed_tokens is not None
        return self.stage.has_head


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
