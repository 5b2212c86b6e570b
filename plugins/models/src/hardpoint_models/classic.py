"""Decoder-only transformers of the older kind: layer norms, plain feed-forward blocks, and positions that are learned,
rotated or slopes on the scores.

Legend: T tokens of the step, C hidden size, E size of token embeddings; H query and K KV heads of this rank, D head
size. Parameters have the names that the Llama lineage gives them, as far as it has them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model import Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.building import require_toolkit
from hardpoint_models.causal import CausalModel, LayerStack
from hardpoint_models.classic_config import ClassicConfig, LearnedPositions
from hardpoint_torch_runtime.layers import LayerNorm, LayerToolkit

__all__ = ["ClassicModel", "build_classic"]

Rotation = tuple[torch.Tensor, torch.Tensor]
ENTRY = ("model.positions.", "model.project_in.", "model.embedding_norm.")
"""Parameters of the stage that holds the embedding."""


def _norm(config: ClassicConfig, layers: LayerToolkit) -> LayerNorm:
    return layers.layer_norm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class PositionTable(torch.nn.Module):
    """int64 [T] below the table's count to the rows [T, C] that were learned for these positions."""

    def __init__(self, positions: LearnedPositions, config: ClassicConfig, layers: LayerToolkit) -> None:
        super().__init__()
        rows = positions.count + positions.offset
        self.table = layers.embedding_table("model.positions.table", rows, config.hidden_size)
        self._offset = positions.offset

    def forward(self, positions: torch.Tensor) -> torch.Tensor:
        rows: torch.Tensor = self.table(positions + self._offset if self._offset else positions)
        return rows


class ClassicAttention(torch.nn.Module):
    """[T, C] to [T, C]; in a parallel layer this rank's part of the sum."""

    def __init__(self, name: str, index: int, config: ClassicConfig, layers: LayerToolkit) -> None:
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
            f"{name}.o_proj",
            config.num_heads * size,
            config.hidden_size,
            bias=config.output_bias,
            reduce=config.flow != "parallel",
        )
        self.rotary = None if config.rope is None else layers.rotary(size, config.rope)
        first = layers.parallel.rank * heads
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=heads,
            num_kv_heads=kv_heads,
            head_size=size,
            scale=config.attention_scales[index],
            sliding_window=config.windows[index] if config.windows else None,
            alibi_slopes=config.alibi_slopes[first : first + heads] or None,
        )
        self._num_heads, self._num_rotated = heads, heads + kv_heads
        self._head_size = size
        self._clip = config.qkv_clip

    def forward(self, hidden: torch.Tensor, rotation: Rotation | None) -> torch.Tensor:
        states = self.qkv_proj(hidden).view(hidden.shape[0], -1, self._head_size)
        if self._clip is not None:
            states = states.clamp_(-self._clip, self._clip)
        if self.rotary is not None and rotation is not None:
            # Queries and keys lie next to each other and turn by the same angles: one call.
            self.rotary.rotate_(states[:, : self._num_rotated], *rotation)
        key, value = states[:, self._num_heads : self._num_rotated], states[:, self._num_rotated :]
        return self.o_proj(self.attn(states[:, : self._num_heads], key, value))


class PlainMLP(torch.nn.Module):
    """[T, C] to [T, C] without a gate; in a parallel layer this rank's part of the sum."""

    def __init__(self, name: str, config: ClassicConfig, layers: LayerToolkit) -> None:
        super().__init__()
        sizes, bias = (config.hidden_size, config.intermediate_size), config.mlp_bias
        self.up_proj = layers.column_linear(f"{name}.up_proj", *sizes, bias=bias)
        self.activation = layers.activation(config.activation)
        self.down_proj = layers.row_linear(
            f"{name}.down_proj", *reversed(sizes), bias=bias, reduce=config.flow != "parallel"
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down_proj(self.activation(self.up_proj(hidden)))


class ClassicLayer(torch.nn.Module):
    """(output to add, residual) to the same; the residual is None before the first layer of a stage."""

    def __init__(self, index: int, config: ClassicConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"model.layers.{index}"
        self.input_layernorm = _norm(config, layers)
        self.self_attn = ClassicAttention(f"{name}.self_attn", index, config, layers)
        self.post_attention_layernorm = _norm(config, layers) if config.has_second_norm else None
        self.mlp = PlainMLP(f"{name}.mlp", config, layers)

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        normed, residual = self._second.add(self.self_attn(normed, rotation), residual)
        return self.mlp(normed), residual

    @property
    def _second(self) -> LayerNorm:
        if self.post_attention_layernorm is None:
            raise RuntimeError("only blocks that work side by side can share a norm")
        return self.post_attention_layernorm


class ParallelLayer(ClassicLayer):
    """Attention and feed-forward block work on the same stream. Ranks exchange the sum of both, once."""

    def __init__(self, index: int, config: ClassicConfig, layers: LayerToolkit) -> None:
        super().__init__(index, config, layers)
        self._parallel = layers.parallel

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        normed, residual = self.input_layernorm.add(hidden, residual)
        second = self.post_attention_layernorm
        output = self.mlp(normed if second is None else second(residual)) + self.self_attn(normed, rotation)
        return self._parallel.all_reduce(output), residual


class PostNormLayer(ClassicLayer):
    """What a block gives is added and the sum normalized, which then is the stream: there is no residual."""

    def forward(
        self, hidden: torch.Tensor, residual: torch.Tensor | None, rotation: Rotation | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        hidden = self.input_layernorm.add(self.self_attn(hidden, rotation), hidden)[0]
        return self._second.add(self.mlp(hidden), hidden)[0], residual


LAYERS: Mapping[str, type[ClassicLayer]] = {
    "sequential": ClassicLayer,
    "parallel": ParallelLayer,
    "post_norm": PostNormLayer,
}


class ClassicStack(LayerStack):
    """Positions and the norm of embeddings come before the first layer of the model, projections from and to the size
    of embeddings before and behind all of them."""

    def __init__(self, config: ClassicConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__(
            config,
            layers,
            stage,
            lambda index: LAYERS[config.flow](index, config, layers),
            lambda: _norm(config, layers) if config.has_final_norm else None,
            embedding_size=config.embedding_size,
        )
        sizes = (config.embedding_size, config.hidden_size)
        is_projected = config.embedding_size != config.hidden_size
        self.project_in = self.project_out = self.positions = self.embedding_norm = None
        if is_projected and stage.has_embedding:
            self.project_in = layers.column_linear("model.project_in", *sizes, gather_output=True)
        if is_projected and stage.has_head:
            self.project_out = layers.column_linear("model.project_out", *reversed(sizes), gather_output=True)
        if config.positions is not None and stage.has_embedding:
            self.positions = PositionTable(config.positions, config, layers)
        if config.has_embedding_norm and stage.has_embedding:
            self.embedding_norm = _norm(config, layers)
        self.rotary = None if config.rope is None else layers.rotary(config.head_size, config.rope)

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        embedded = super().embed(token_ids)
        return embedded if self.project_in is None else self.project_in(embedded)

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        """[T, C] to [T, C], behind a projection [T, E]; ``hidden`` is overwritten."""
        if self.positions is not None:
            hidden = hidden.add_(self.positions(positions))
        if self.embedding_norm is not None:
            hidden = self.embedding_norm(hidden)
        rotation = None if self.rotary is None else self.rotary.lookup(positions)
        residual: torch.Tensor | None = None
        for layer in self.layers.values():
            hidden, residual = layer(hidden, residual, rotation)
        hidden = self.finish(hidden, residual)
        return hidden if self.project_out is None else self.project_out(hidden)


class ClassicModel(CausalModel):
    """Model of one pipeline stage."""

    def __init__(self, info: ModelInfo, config: ClassicConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        """Raises ``ConfigError`` where sequences may become longer than there are positions."""
        longest, positions = layers.config.max_model_len, config.positions
        if positions is not None and longest > positions.count:
            raise ConfigError(
                f"max_model_len {longest} is more than the {positions.count} positions {info.artifact.name!r} has "
                f"learned; set --max-model-len to at most {positions.count}"
            )
        super().__init__(
            info,
            config,
            layers,
            stage,
            lambda held: ClassicStack(config, layers, held),
            embedding_size=config.embedding_size,
            head_bias=config.head_bias,
        )
        self.config = config

    def weight_rules(self) -> Sequence[WeightRule]:
        return self.config.rules

    def holds(self, parameter: str) -> bool:
        return self.stage.has_embedding if parameter.startswith(ENTRY) else super().holds(parameter)


def build_classic(ctx: ModelContext, read: Callable[[Mapping[str, Any], str], ClassicConfig]) -> Model:
    """``read`` makes the family's record of a model's configuration and its architecture.

    Weights are uninitialized until they are loaded.
    """
    info, layers = require_toolkit(ctx)
    return ClassicModel(info, read(info.config, info.architecture), layers, ctx.stage)
