"""BERT encoders: learned positions, attention to both sides, norms behind each block.

Legend: T tokens of the step, C hidden size, M intermediate size; H heads of this rank, D head size.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import torch

from hardpoint.interfaces.attention import AttentionKind
from hardpoint.interfaces.model import WHOLE_PROMPTS_CAPABILITY, Model, ModelContext, StageRange, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.bert_config import BertConfig, BertVariant
from hardpoint_models.building import require_toolkit
from hardpoint_models.encoder import EncoderEmbeddings, EncoderModel, EncoderStack
from hardpoint_models.text_positions import num_separators_before, positions_behind_padding
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = [
    "CAPABILITIES",
    "JUDGES",
    "BertEncoder",
    "build_bert",
    "create_bert",
    "create_bert_masked_lm",
    "create_bert_sequence_classification",
    "create_bert_token_classification",
]

CAPABILITIES = {"tasks": ["embed"], WHOLE_PROMPTS_CAPABILITY: True}
JUDGES = {**CAPABILITIES, "tasks": ["embed", "classify"]}
"""Of models with a head of labels."""


class BertEmbeddings(EncoderEmbeddings):
    """Word embeddings [T, C] and positions int64 [T] to the first hidden states [T, C]."""

    def __init__(self, config: BertConfig, layers: LayerToolkit) -> None:
        super().__init__()
        size = config.hidden_size
        self.words = layers.embedding("embeddings.words", config.vocab_size, size)
        self.positions = layers.embedding_table("embeddings.positions", config.max_positions, size)
        self.token_types = layers.embedding_table("embeddings.token_types", config.num_token_types, size)
        self.norm = layers.layer_norm(size, config.norm_eps)
        self._padding_id, self._separator_id = config.padding_id, config.separator_id

    def forward(self, words: torch.Tensor, positions: torch.Tensor, token_ids: torch.Tensor | None) -> torch.Tensor:
        places = positions
        if self._padding_id is not None:
            places = positions_behind_padding(positions, token_ids, self._padding_id)
        # One text has tokens of the first type only.
        types = self.token_types.weight[0]
        if self._separator_id is not None and token_ids is not None:
            types = self.token_types(num_separators_before(positions, token_ids, self._separator_id).clamp_(max=1))
        return self.norm(self.positions(places).add_(words).add_(types))


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


class BertStack(EncoderStack):
    """[T, C] to [T, C]; ``hidden`` is overwritten."""

    def __init__(self, config: BertConfig, layers: LayerToolkit, stage: StageRange) -> None:
        super().__init__(stage, lambda index: BertLayer(index, config, layers))

    def forward(self, hidden: torch.Tensor, positions: torch.Tensor) -> torch.Tensor:
        del positions
        for layer in self.layer.values():
            hidden = layer(hidden)
        return hidden


class BertEncoder(EncoderModel):
    """Model of one pipeline stage. Checkpoints of the encoder alone have no ``prefix`` before the names of their
    weights; those of a task built on it mostly have one."""

    def __init__(
        self, info: ModelInfo, config: BertConfig, layers: LayerToolkit, stage: StageRange | None, variant: BertVariant
    ) -> None:
        super().__init__(
            info,
            config,
            layers,
            stage,
            lambda: BertEmbeddings(config, layers),
            lambda held: BertStack(config, layers, held),
            config.labels,
        )
        self.config = config
        self._variant = variant

    def weight_rules(self) -> Sequence[WeightRule]:
        variant = self._variant
        prefix = "roberta." if variant.follows_roberta else "bert."
        return [
            *_label_rules(variant, prefix),
            *(rule for stored in ("", prefix) for rule in _stored_under(stored)),
            *(WeightRule(name, None) for name in _GUESSING_HEADS),
        ]


_GUESSING_HEADS = (
    "cls.predictions.bias", "cls.predictions.decoder.*", "cls.predictions.transform.dense.*",
    "cls.predictions.transform.LayerNorm.*", "cls.seq_relationship.*",
    "lm_head.bias", "lm_head.dense.weight", "lm_head.dense.bias", "lm_head.layer_norm.weight",
    "lm_head.layer_norm.bias", "lm_head.decoder.weight", "lm_head.decoder.bias",
)  # fmt: skip
"""What guesses hidden words and following sentences."""


def _label_rules(variant: BertVariant, prefix: str) -> Iterator[WeightRule]:
    if variant.head == "text":
        dense, scores = f"{prefix}pooler.dense.*", "classifier.*"
        if variant.follows_roberta:
            dense, scores = "classifier.dense.*", "classifier.out_proj.*"
        yield WeightRule(dense, "labels.dense.*")
        yield WeightRule(scores, "labels.scores.*")
    elif variant.head == "tokens":
        yield WeightRule("classifier.*", "labels.scores.*")


def _stored_under(prefix: str) -> Iterator[WeightRule]:
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


def build_bert(ctx: ModelContext, variant: BertVariant) -> Model:
    """What ``variant`` of the family the architecture is. Raises what :meth:`BertConfig.read` raises."""
    info, layers = require_toolkit(ctx)
    config = BertConfig.read(info.config, info.architecture, variant)
    return BertEncoder(info, config, layers, ctx.stage, variant)


@plugin("model", capabilities=CAPABILITIES)
def create_bert(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertModel``: also MiniLM and the sentence encoders saved under that name."""
    del options
    return build_bert(ctx, BertVariant())


@plugin("model", capabilities=CAPABILITIES)
def create_bert_masked_lm(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertForMaskedLM``: its encoder; the head that guesses hidden words is not loaded."""
    del options
    return build_bert(ctx, BertVariant())


@plugin("model", capabilities=JUDGES)
def create_bert_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertForSequenceClassification``: scores of a text, or of a pair as cross-encoders take it."""
    del options
    return build_bert(ctx, BertVariant(head="text"))


@plugin("model", capabilities=JUDGES)
def create_bert_token_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``BertForTokenClassification``: scores of each token."""
    del options
    return build_bert(ctx, BertVariant(head="tokens"))
