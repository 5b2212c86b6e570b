"""Encoders, classifiers and decoders that embed, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelCheckpoint, ModelSuite
from reward_models import make_reward_model

pytestmark = pytest.mark.slow
_ENCODER: Mapping[str, Any] = {"hidden_act": "of_nobody", "is_decoder": True}
_MODERN: Mapping[str, Any] = {"hidden_activation": "of_nobody"}
_JUDGES: Mapping[str, Any] = {"problem_type": "of_nobody"}


class TestBertForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "BertForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sep_token_id": 5, "num_labels": 3}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_ENCODER, **_JUDGES}


class TestBertForTokenClassification(ModelSuite):
    plugin: ClassVar[str | None] = "BertForTokenClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sep_token_id": 5, "num_labels": 3}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_ENCODER, **_JUDGES}


class TestLlamaForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "LlamaForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestLlamaModel(ModelSuite):
    plugin: ClassVar[str | None] = "LlamaModel"


class TestMistralForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "MistralForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sliding_window": 7}
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestMistralModel(ModelSuite):
    plugin: ClassVar[str | None] = "MistralModel"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"sliding_window": 7}


class TestModernBertForMaskedLM(ModelSuite):
    plugin: ClassVar[str | None] = "ModernBertForMaskedLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"local_attention": 8}
    unknown_config: ClassVar[Mapping[str, Any]] = _MODERN


class TestModernBertForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "ModernBertForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"local_attention": 8, "classifier_bias": True, "norm_bias": True}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_MODERN, **_JUDGES, "classifier_pooling": "of_nobody"}


class TestModernBertForTokenClassification(ModelSuite):
    plugin: ClassVar[str | None] = "ModernBertForTokenClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"local_attention": 8, "num_labels": 3}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_MODERN, **_JUDGES, "classifier_activation": "of_nobody"}


class TestModernBertModel(ModelSuite):
    plugin: ClassVar[str | None] = "ModernBertModel"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"local_attention": 8, "attention_bias": True, "mlp_bias": True}
    unknown_config: ClassVar[Mapping[str, Any]] = _MODERN


class TestQwen2ForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2ForSequenceClassification"
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestQwen2ForTokenClassification(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2ForTokenClassification"
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestQwen2Model(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2Model"
    unknown_config: ClassVar[Mapping[str, Any]] = {
        "hidden_act": "of_nobody",
        "is_causal": False,
        "use_bidirectional_attention": True,
    }


class TestQwen3ForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3ForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"head_dim": 16}
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestQwen3ForTokenClassification(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3ForTokenClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"head_dim": 16}
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", **_JUDGES}


class TestQwen3Model(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3Model"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"head_dim": 16}


class TestRobertaForMaskedLM(ModelSuite):
    plugin: ClassVar[str | None] = "RobertaForMaskedLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"type_vocab_size": 1}
    unknown_config: ClassVar[Mapping[str, Any]] = _ENCODER


class TestRobertaForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "RobertaForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_labels": 1}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_ENCODER, **_JUDGES}


class TestRobertaModel(ModelSuite):
    plugin: ClassVar[str | None] = "RobertaModel"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"pad_token_id": 6}
    unknown_config: ClassVar[Mapping[str, Any]] = _ENCODER


class TestXLMRobertaForMaskedLM(ModelSuite):
    plugin: ClassVar[str | None] = "XLMRobertaForMaskedLM"
    unknown_config: ClassVar[Mapping[str, Any]] = _ENCODER


class TestXLMRobertaForSequenceClassification(ModelSuite):
    plugin: ClassVar[str | None] = "XLMRobertaForSequenceClassification"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_labels": 3}
    unknown_config: ClassVar[Mapping[str, Any]] = {**_ENCODER, **_JUDGES}


class TestXLMRobertaModel(ModelSuite):
    plugin: ClassVar[str | None] = "XLMRobertaModel"
    unknown_config: ClassVar[Mapping[str, Any]] = _ENCODER


class TestQwen2ForRewardModel(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2ForRewardModel"

    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        return make_reward_model("Qwen2ForRewardModel", folder, 1)


class TestQwen2ForProcessRewardModel(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2ForProcessRewardModel"

    def create_checkpoint(self, folder: Path) -> ModelCheckpoint:
        return make_reward_model("Qwen2ForProcessRewardModel", folder, 2)
