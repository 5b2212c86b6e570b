"""Decoders of the Llama lineage that generate nothing: embedders, classifiers, and reward models.

They are causal, so their last token alone has seen the whole text; a head for each token judges what stands before it.
"""

from __future__ import annotations

from collections.abc import Callable

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import require_toolkit
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant
from hardpoint_models.ending import Ending
from hardpoint_models.label_head import LabelShape, num_labels, score_activation
from hardpoint_models.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from hardpoint_models.text_pooling import TextPooling

__all__ = [
    "create_llama_model",
    "create_llama_sequence_classification",
    "create_mistral_model",
    "create_mistral_sequence_classification",
    "create_qwen2_model",
    "create_qwen2_process_reward",
    "create_qwen2_reward",
    "create_qwen2_sequence_classification",
    "create_qwen2_token_classification",
    "create_qwen3_model",
    "create_qwen3_sequence_classification",
    "create_qwen3_token_classification",
]

_EMBEDS = {"tasks": ["embed"]}
_JUDGES = {"tasks": ["embed", "classify"]}


def _bare(fields: ConfigFields) -> Ending:
    return Ending(TextPooling.read(fields, method="last", normalizes=True))


def _of_text(fields: ConfigFields) -> Ending:
    count = num_labels(fields)
    labels = LabelShape(count, score_activation(fields, count), bias=False)
    return Ending(TextPooling("last", normalizes=True), labels)


def _of_tokens(fields: ConfigFields) -> Ending:
    count = num_labels(fields)
    labels = LabelShape(count, score_activation(fields, count), bias=True)
    return Ending(TextPooling("token_embed", normalizes=True), labels)


def _reward(fields: ConfigFields) -> Ending:
    """One number of any size; it is no share of anything."""
    del fields
    return Ending(TextPooling("last", normalizes=True), LabelShape(1, "none", dense="relu"))


def _process_reward(fields: ConfigFields) -> Ending:
    """Shares of wrong and right."""
    del fields
    return Ending(TextPooling("token_embed", normalizes=True), LabelShape(2, "softmax", dense="relu"))


def _build(ctx: ModelContext, variant: DecoderVariant, ending: Callable[[ConfigFields], Ending]) -> Model:
    info, layers = require_toolkit(ctx)
    fields = ConfigFields(info.config, info.architecture)
    # Some were trained on to look both ways, under the same name.
    fields.require("is_causal", (True,), True)
    fields.require("use_bidirectional_attention", (False,), False)
    config = DecoderConfig.read(info.config, info.architecture, variant)
    return DecoderModel(info, config, layers, ctx.stage, ending(fields))


@plugin("model", capabilities=_EMBEDS)
def create_llama_model(ctx: ModelContext, options: NoOptions) -> Model:
    """``LlamaModel``: embeddings alone."""
    del options
    return _build(ctx, LLAMA, _bare)


@plugin("model", capabilities=_JUDGES)
def create_llama_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``LlamaForSequenceClassification``: also reward models, whose one score is of the whole conversation."""
    del options
    return _build(ctx, LLAMA, _of_text)


@plugin("model", capabilities=_EMBEDS)
def create_mistral_model(ctx: ModelContext, options: NoOptions) -> Model:
    """``MistralModel``: embeddings alone; E5-Mistral and the like."""
    del options
    return _build(ctx, MISTRAL, _bare)


@plugin("model", capabilities=_JUDGES)
def create_mistral_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``MistralForSequenceClassification``."""
    del options
    return _build(ctx, MISTRAL, _of_text)


@plugin("model", capabilities=_EMBEDS)
def create_qwen2_model(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2Model``: embeddings alone."""
    del options
    return _build(ctx, QWEN2, _bare)


@plugin("model", capabilities=_JUDGES)
def create_qwen2_reward(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForRewardModel``: one score of the whole conversation, by two layers; Qwen2.5-Math-RM."""
    del options
    return _build(ctx, QWEN2, _reward)


@plugin("model", capabilities=_JUDGES)
def create_qwen2_process_reward(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForProcessRewardModel``: whether what ends with a token is right, by two layers; Qwen2.5-Math-PRM."""
    del options
    return _build(ctx, QWEN2, _process_reward)


@plugin("model", capabilities=_JUDGES)
def create_qwen2_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForSequenceClassification``."""
    del options
    return _build(ctx, QWEN2, _of_text)


@plugin("model", capabilities=_JUDGES)
def create_qwen2_token_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForTokenClassification``: scores of each token, such as rewards of the steps that they end."""
    del options
    return _build(ctx, QWEN2, _of_tokens)


@plugin("model", capabilities=_EMBEDS)
def create_qwen3_model(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3Model``: embeddings alone; Qwen3-Embedding where its head is not stored."""
    del options
    return _build(ctx, QWEN3, _bare)


@plugin("model", capabilities=_JUDGES)
def create_qwen3_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3ForSequenceClassification``: also Qwen3-Reranker where it was converted to a head of labels."""
    del options
    return _build(ctx, QWEN3, _of_text)


@plugin("model", capabilities=_JUDGES)
def create_qwen3_token_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3ForTokenClassification``: scores of each token, such as rewards of the steps that they end."""
    del options
    return _build(ctx, QWEN3, _of_tokens)
