"""ModernBERT encoders: rotary positions, windows in most layers, gated feed-forward, norms before each block.

Legend: T tokens of the step, C hidden size, M intermediate size of this rank; H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Literal

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint.interfaces.model import Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.bert import CAPABILITIES, JUDGES
from hardpoint_models.building import require_toolkit
from hardpoint_models.encoder import EncoderEmbeddings, EncoderModel, EncoderStack
from hardpoint_models.modernbert_config import ModernBertConfig
from hardpoint_torch_runtime.layers import LayerNorm, LayerToolkit

__all__ = [
    "ModernBertEncoder",
    "create_modernbert",
    "create_modernbert_masked_lm",
    "create_modernbert_sequence_classification",
    "create_modernbert_token_classification",
]

Rotation = tuple[torch.Tensor, torch.Tensor]


def _norm(config: ModernBertConfig, layers: LayerToolkit) -> LayerNorm:
    return layers.layer_norm(config.hidden_size, config.norm_eps, bias=config.norm_bias)


class ModernBertEmbeddings(EncoderEmbeddings):
    """Word embeddings [T, C] to the first hidden states [T, C]; positions come in by rotation alone."""

    def __init__(self, config: ModernBertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        self.words = layers.embedding("embeddings.words", config.vocab_size, config.hidden_size)
        self.norm = _norm(config, layers)

    def forward(self, words: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        del positions, token_ids
        return self.norm(words)


class ModernBertAttention(torch.nn.Module):
    """[T, C] to [T, C]."""

    def __init__(self, name: str, config: ModernBertConfig, index: int, layers: LayerToolkit) -> None:
        super().__init__()
        heads, size, bias = config.num_heads, config.head_size, config.attention_bias
        self.qkv = layers.qkv_linear(
            f"{name}.qkv", config.hidden_size, num_heads=heads, num_kv_heads=heads, head_size=size, bias=bias
        )
        rope = config.local_rope if config.is_local[index] else config.rope
        self.rotary = layers.rotary(size, rope)
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_size=size,
            scale=size**-0.5,
            sliding_window=config.windows[index],
            kind=AttentionKind.ENCODER_ONLY,
        )
        self.output = layers.row_linear(f"{name}.output", config.hidden_size, config.hidden_size, bias=bias)
        self._num_rotated, self._head_size = 2 * self.qkv.num_heads, size

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        states = self.qkv(hidden).view(hidden.shape[0], -1, self._head_size)
        query_and_key = self.rotary.rotate_(states[:, : self._num_rotated], *rotation)
        query, key = query_and_key.chunk(2, dim=1)
        return self.output(self.attn(query, key, states[:, self._num_rotated :]))


class ModernBertMLP(torch.nn.Module):
    """[T, C] to [T, C]. The halves of the first projection lie behind one another, the activated one first."""

    def __init__(self, name: str, config: ModernBertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        parts = {"gate": config.intermediate_size, "up": config.intermediate_size}
        self.gate_up = layers.merged_column_linear(f"{name}.gate_up", config.hidden_size, parts, bias=config.mlp_bias)
        self.activation = layers.activation(config.activation)
        self.output = layers.row_linear(
            f"{name}.output", config.intermediate_size, config.hidden_size, bias=config.mlp_bias
        )

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        gate, up = self.gate_up(hidden).chunk(2, dim=-1)
        return self.output(self.activation(gate).mul_(up))


class ModernBertLayer(torch.nn.Module):
    """[T, C] to [T, C]; ``hidden`` is overwritten. The first layer of the model sees normalized embeddings and has no
    norm of its own before attention."""

    def __init__(self, index: int, config: ModernBertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"encoder.layer.{index}"
        self.is_local = config.is_local[index]
        self.attention_norm = _norm(config, layers) if index else None
        self.attention = ModernBertAttention(f"{name}.attention", config, index, layers)
        self.mlp_norm = _norm(config, layers)
        self.mlp = ModernBertMLP(f"{name}.mlp", config, layers)

    def forward(self, hidden: torch.Tensor, rotation: Rotation) -> torch.Tensor:
        normed = hidden if self.attention_norm is None else self.attention_norm(hidden)
        normed, hidden = self.mlp_norm.add(self.attention(normed, rotation), hidden)
        return hidden.add_(self.mlp(normed))


class ModernBertStack(EncoderStack):
    """Layers that all have the rotation of the model, or the local one; and the last norm where the model ends."""

    def __init__(self, config: ModernBertConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__(stage, lambda index: ModernBertLayer(index, config, layers))
        self.rotary = layers.rotary(config.head_size, config.rope)
        self.local_rotary = layers.rotary(config.head_size, config.local_rope)
        self.norm = _norm(config, layers) if stage.has_head else None

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        rotation, local_rotation = self.rotary.lookup(positions), self.local_rotary.lookup(positions)
        for layer in self.layer.values():
            hidden = layer(hidden, local_rotation if layer.is_local else rotation)
        return hidden if self.norm is None else self.norm(hidden)


class ModernBertEncoder(EncoderModel):
    """Model of one pipeline stage. Checkpoints of the encoder alone have no ``model.`` before the names of their
    weights, those of a task built on it have."""

    def __init__(
        self, info: ModelInfo, config: ModernBertConfig, layers: LayerToolkit, stage: StageRange | None
    ) -> None:
        super().__init__(
            info,
            config,
            layers,
            stage,
            lambda: ModernBertEmbeddings(config, layers),
            lambda held: ModernBertStack(config, layers, held),
            config.labels,
        )
        self.config = config

    def weight_rules(self) -> Sequence[WeightRule]:
        if self.config.labels is None:
            heads = [WeightRule(name, None) for name in _GUESSING_HEAD]
        else:
            stored = {"head.dense": "labels.dense", "head.norm": "labels.norm", "classifier": "labels.scores"}
            heads = [WeightRule(f"{name}.*", f"{target}.*") for name, target in stored.items()]
        return [*heads, *(rule for prefix in ("", "model.") for rule in _stored_under(prefix))]


_GUESSING_HEAD = tuple(
    f"{part}.{name}" for part in ("head.dense", "head.norm", "decoder") for name in ("weight", "bias")
)
"""What guesses hidden words."""


def _stored_under(prefix: str) -> Iterator[WeightRule]:
    stored, held = f"{prefix}layers.*", "encoder.layer.*"
    yield WeightRule(f"{prefix}embeddings.tok_embeddings.weight", "embeddings.words.weight")
    yield WeightRule(f"{prefix}embeddings.norm.*", "embeddings.norm.*")
    yield WeightRule(f"{prefix}final_norm.*", "encoder.norm.*")
    names = {
        "attn_norm": "attention_norm",
        "attn.Wqkv": "attention.qkv",
        "attn.Wo": "attention.output",
        "mlp_norm": "mlp_norm",
        "mlp.Wi": "mlp.gate_up",
        "mlp.Wo": "mlp.output",
    }
    for name, target in names.items():
        yield WeightRule(f"{stored}.{name}.*", f"{held}.{target}.*")


def _build(ctx: ModelContext, head: Literal["none", "text", "tokens"]) -> Model:
    info, layers = require_toolkit(ctx)
    return ModernBertEncoder(info, ModernBertConfig.read(info.config, info.architecture, head), layers, ctx.stage)


@plugin("model", capabilities=CAPABILITIES)
def create_modernbert(ctx: ModelContext, options: NoOptions) -> Model:
    """``ModernBertModel``: also the sentence encoders saved under that name."""
    del options
    return _build(ctx, "none")


@plugin("model", capabilities=CAPABILITIES)
def create_modernbert_masked_lm(ctx: ModelContext, options: NoOptions) -> Model:
    """``ModernBertForMaskedLM``: its encoder; the head that guesses hidden words is not loaded."""
    del options
    return _build(ctx, "none")


@plugin("model", capabilities=JUDGES)
def create_modernbert_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``ModernBertForSequenceClassification``: scores of a text, or of a pair as cross-encoders take it."""
    del options
    return _build(ctx, "text")


@plugin("model", capabilities=JUDGES)
def create_modernbert_token_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``ModernBertForTokenClassification``: scores of each token."""
    del options
    return _build(ctx, "tokens")
