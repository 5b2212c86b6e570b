"""Encoders that follow RoBERTa: BERT's, whose positions begin behind the padding's id."""

from __future__ import annotations

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.bert import CAPABILITIES, JUDGES, build_bert
from hardpoint_models.bert_config import BertVariant

__all__ = [
    "create_roberta",
    "create_roberta_masked_lm",
    "create_roberta_sequence_classification",
    "create_xlm_roberta",
    "create_xlm_roberta_masked_lm",
    "create_xlm_roberta_sequence_classification",
]

ROBERTA = BertVariant(follows_roberta=True, default_padding=1)
CLASSIFIER = BertVariant(head="text", follows_roberta=True, default_padding=1)


@plugin("model", capabilities=CAPABILITIES)
def create_roberta(ctx: ModelContext, options: NoOptions) -> Model:
    """``RobertaModel``: also the sentence encoders saved under that name."""
    del options
    return build_bert(ctx, ROBERTA)


@plugin("model", capabilities=CAPABILITIES)
def create_roberta_masked_lm(ctx: ModelContext, options: NoOptions) -> Model:
    """``RobertaForMaskedLM``: its encoder; the head that guesses hidden words is not loaded."""
    del options
    return build_bert(ctx, ROBERTA)


@plugin("model", capabilities=JUDGES)
def create_roberta_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``RobertaForSequenceClassification``: scores of a text, or of a pair as cross-encoders take it."""
    del options
    return build_bert(ctx, CLASSIFIER)


@plugin("model", capabilities=CAPABILITIES)
def create_xlm_roberta(ctx: ModelContext, options: NoOptions) -> Model:
    """``XLMRobertaModel``: BGE-M3 and multilingual E5, by their dense embeddings."""
    del options
    return build_bert(ctx, ROBERTA)


@plugin("model", capabilities=CAPABILITIES)
def create_xlm_roberta_masked_lm(ctx: ModelContext, options: NoOptions) -> Model:
    """``XLMRobertaForMaskedLM``: its encoder; the head that guesses hidden words is not loaded."""
    del options
    return build_bert(ctx, ROBERTA)


@plugin("model", capabilities=JUDGES)
def create_xlm_roberta_sequence_classification(ctx: ModelContext, options: NoOptions) -> Model:
    """``XLMRobertaForSequenceClassification``: scores of a text, or of a pair; rerankers such as BGE's."""
    del options
    return build_bert(ctx, CLASSIFIER)
