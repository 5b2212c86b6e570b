"""BERT encoders: learned positions, attention to both sides, norms behind each block. They yield hidden states only.

Legend: T tokens of the step, C hidden size, M intermediate size; H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint.interfaces.kv_cache import KVCacheSpec
from hardpoint.interfaces.model import (
    WHOLE_PROMPTS_CAPABILITY,
    Model,
    ModelContext,
    StageOutput,
    StageRange,
    WeightRule,
)
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.bert_config import BertConfig, PoolingMethod
from hardpoint_models.building import require_toolkit
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["BertEncoder", "create_bert", "create_bert_masked_lm"]

_CAPABILITIES = {"tasks": ["embed"], WHOLE_PROMPTS_CAPABILITY: True}


class BertEmbeddings(torch.nn.Module):
    """Word embeddings [T, C] and positions int64 [T] to the first hidden states [T, C]."""

    def __init__(self, config: BertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        size = config.hidden_size
        self.words = layers.embedding("embeddings.words", config.vocab_size, size)
        self.positions = layers.embedding_table("embeddings.positions", config.max_positions, size)
        self.token_types = layers.embedding_table("embeddings.token_types", config.num_token_types, size)
        self.norm = layers.layer_norm(size, config.norm_eps)

    def forward(self, words: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        # One text has tokens of the first type only.
        return self.norm(self.positions(positions).add_(words).add_(self.token_types.weight[0]))


class BertAttention(torch.nn.Module):
    """[T, C] to [T, C]."""

    def __init__(self, name: str, config: BertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        heads, size = config.num_heads, config.head_size
        self.qkv = layers.qkv_linear(
            f"{name}.qkv", config.hidden_size, num_heads=heads, num_kv_heads=heads, head_size=size, bias=True
        )
        self.attn = layers.attention(
            f"{name}.attn",
            num_heads=self.qkv.num_heads,
            num_kv_heads=self.qkv.num_kv_heads,
            head_size=size,
            scale=size**-0.5,
            kind=AttentionKind.ENCODER_ONLY,
        )
        self.output = layers.row_linear(f"{name}.output", config.hidden_size, config.hidden_size, bias=True)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        query, key, value = self.qkv(hidden).chunk(3, dim=-1)
        return self.output(self.attn(query, key, value))


class BertLayer(torch.nn.Module):
    """[T, C] to [T, C]; ``hidden`` is overwritten."""

    def __init__(self, index: int, config: BertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        name = f"encoder.layer.{index}"
        self.attention = BertAttention(f"{name}.attention", config, layers)
        self.attention_norm = layers.layer_norm(config.hidden_size, config.norm_eps)
        self.intermediate = layers.column_linear(
            f"{name}.intermediate", config.hidden_size, config.intermediate_size, bias=True
        )
        self.activation = layers.activation(config.activation)
        self.output = layers.row_linear(f"{name}.output", config.intermediate_size, config.hidden_size, bias=True)
        self.output_norm = layers.layer_norm(config.hidden_size, config.norm_eps)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        hidden = self.attention_norm.add(self.attention(hidden), hidden)[0]
        return self.output_norm.add(self.output(self.activation(self.intermediate(hidden))), hidden)[0]


class BertStack(torch.nn.Module):
    """The layers of one pipeline stage, keyed by their number in the whole model."""

    def __init__(self, config: BertConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__()
        indices = range(stage.first, stage.last)
        self.layer = torch.nn.ModuleDict({str(index): BertLayer(index, config, layers) for index in indices})

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        for layer in self.layer.values():
            hidden = layer(hidden)
        return hidden


class BertEncoder(torch.nn.Module):
    """Model of one pipeline stage. Between stages travels ``hidden``, [T, C].

    A text must be computed in one step, since its tokens see those behind them. What follows the last layer in a
    checkpoint (pooler, heads) is left out: embeddings are pooled from hidden states.
    """

    def __init__(self, info: ModelInfo, config: BertConfig, layers: LayerToolkit, stage: StageRange | None) -> None:
        super().__init__()
        self._info = info
        self.config = config
        self.stage = stage if stage is not None else StageRange(0, config.num_layers)
        self.embeddings = BertEmbeddings(config, layers) if self.stage.has_embedding else None
        self.encoder = BertStack(config, layers, self.stage)
        self._kv_specs = layers.kv_cache_specs()

    @property
    def info(self) -> ModelInfo:
        return self._info

    @property
    def pooling_method(self) -> PoolingMethod:
        """How the hidden states of a text become its embedding, unless a request says otherwise."""
        return self.config.pooling_method

    @property
    def normalizes(self) -> bool:
        """Whether embeddings have length one, unless a request says otherwise."""
        return self.config.normalizes

    def embed(self, token_ids: torch.Tensor) -> torch.Tensor:
        return self._embeddings().words(token_ids)

    def forward(
        self,
        token_ids: torch.Tensor | None,
        positions: torch.Tensor,
        intermediates: Mapping[str, torch.Tensor] | None = None,
        embeddings: torch.Tensor | None = None,
    ) -> torch.Tensor | StageOutput:
        if intermediates is not None:
            # The layers write into their input, and this one belongs to the caller.
            hidden = self.encoder(intermediates["hidden"].clone())
        elif embeddings is not None:
            hidden = self.encoder(self._embeddings()(embeddings, positions))
        elif token_ids is not None:
            hidden = self.encoder(self._embeddings()(self.embed(token_ids), positions))
        else:
            raise ValueError("one of token_ids, embeddings and intermediates must be given")
        return hidden if self.stage.has_head else StageOutput(intermediates={"hidden": hidden})

    def logits(self, hidden: torch.Tensor) -> torch.Tensor:
        """Raises ``RuntimeError``: there is nothing to sample from."""
        raise RuntimeError(
            f"{self._info.architecture} computes embeddings and no logits, so it cannot generate; ask for the task "
            "'embed'"
        )

    def kv_cache_specs(self) -> Mapping[str, KVCacheSpec]:
        return self._kv_specs

    def named_layers(self) -> Iterable[tuple[str, torch.nn.Module]]:
        for index, layer in self.encoder.layer.items():
            yield f"encoder.layer.{index}", layer

    def weight_rules(self) -> Sequence[WeightRule]:
        heads = ("predictions.bias", "predictions.decoder.*", "predictions.transform.dense.*",
                 "predictions.transform.LayerNorm.*", "seq_relationship.*")  # fmt: skip
        return [
            *(rule for prefix in ("", "bert.") for rule in _stored_under(prefix)),
            *(WeightRule(f"cls.{name}", None) for name in heads),
        ]

    def holds(self, parameter: str) -> bool:
        """False for parameters of the whole model that other stages hold."""
        part, _, rest = parameter.partition(".")
        if part == "embeddings":
            return self.embeddings is not None
        index = rest.removeprefix("layer.").partition(".")[0]
        is_layer = index.isdecimal() and int(index) < self.config.num_layers
        return index in self.encoder.layer or not is_layer

    def _embeddings(self) -> BertEmbeddings:
        if self.embeddings is None:
            raise RuntimeError(f"{self.stage} holds no embedding; hand it intermediates")
        return self.embeddings


def _stored_under(prefix: str) -> Iterator[WeightRule]:
    """Checkpoints of the encoder alone have no prefix, those of a task built on it ``bert.``."""
    stored, held = f"{prefix}encoder.layer.*", "encoder.layer.*"
    for name, part in (("query", "q"), ("key", "k"), ("value", "v")):
        yield WeightRule(f"{stored}.attention.self.{name}.*", f"{held}.attention.qkv.*", part)
    yield WeightRule(f"{stored}.attention.output.dense.*", f"{held}.attention.output.*")
    yield WeightRule(f"{stored}.intermediate.dense.*", f"{held}.intermediate.*")
    yield WeightRule(f"{stored}.output.dense.*", f"{held}.output.*")
    for table, name in (("word", "words"), ("position", "positions"), ("token_type", "token_types")):
        yield WeightRule(f"{prefix}embeddings.{table}_embeddings.weight", f"embeddings.{name}.weight")
    norms = {
        f"{prefix}embeddings.LayerNorm": "embeddings.norm",
        f"{stored}.attention.output.LayerNorm": f"{held}.attention_norm",
        f"{stored}.output.LayerNorm": f"{held}.output_norm",
    }
    for norm, target in norms.items():
        # The oldest checkpoints call them by Greek letters.
        for parameter, letter in (("weight", "gamma"), ("bias", "beta")):
            yield WeightRule(f"{norm}.{parameter}", f"{target}.{parameter}")
            yield WeightRule(f"{norm}.{letter}", f"{target}.{parameter}")
    # Tables of running numbers; and a layer on top of the first token that embeddings do without.
    yield WeightRule(f"{prefix}embeddings.position_ids", None)
    yield WeightRule(f"{prefix}embeddings.token_type_ids", None)
    yield WeightRule(f"{prefix}pooler.dense.*", None)


def _build(ctx: ModelContext) -> Model:
    info, layers = require_toolkit(ctx)
    return BertEncoder(info, BertConfig.read(info.config, info.architecture), layers, ctx.stage)


@plugin("model", capabilities=_CAPABILITIES)
def create_bert(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertModel``: also MiniLM and the sentence encoders saved under that name."""
    del options
    return _build(ctx)


@plugin("model", capabilities=_CAPABILITIES)
def create_bert_masked_lm(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertForMaskedLM``: its encoder; the head that guesses hidden words is not loaded."""
    del options
    return _build(ctx)
