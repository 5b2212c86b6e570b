"""Configurations in which encoders, classifiers and decoders that embed are compared: a plain and an awkward one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import ODD_HEADS, YARN
from hardpoint_testing_torch import ParityCase

__all__ = ["POOLING_CASES"]

_LABELS: Mapping[str, Any] = {"num_labels": 3, "sep_token_id": 5}
_ODD: Mapping[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 12,
    "intermediate_size": 42,
    "vocab_size": 97,
    "hidden_act": "relu",
}
_MODERN: Mapping[str, Any] = {"local_attention": 8}
_MODERN_ODD: Mapping[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 6,
    "intermediate_size": 26,
    "vocab_size": 97,
    "num_hidden_layers": 5,
    "local_attention": 11,
    "layer_types": ["sliding_attention", "full_attention", *["sliding_attention"] * 3],
    "rope_parameters": {
        "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
        "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
    },
    "norm_bias": True,
    "attention_bias": True,
    "mlp_bias": True,
    "hidden_activation": "gelu_pytorch_tanh",
    "classifier_bias": True,
    "classifier_activation": "silu",
    "classifier_pooling": "mean",
}
_YARN: Mapping[str, Any] = {"rope_parameters": YARN}

POOLING_CASES: tuple[ParityCase, ...] = (
    ParityCase("BertForSequenceClassification", _LABELS),
    ParityCase("BertForSequenceClassification", {**_ODD, "num_labels": 1, "sep_token_id": 7}, "odd sizes, one label"),
    ParityCase("BertForTokenClassification", _LABELS),
    ParityCase("BertForTokenClassification", {**_ODD, "num_labels": 7, "sep_token_id": 7}, "odd sizes, seven labels"),
    ParityCase("LlamaForSequenceClassification", {"num_labels": 1}),
    ParityCase(
        "LlamaForSequenceClassification", {**ODD_HEADS, **_YARN, "attention_bias": True}, "odd heads, YaRN, biases"
    ),
    ParityCase("LlamaModel"),
    ParityCase("LlamaModel", {**ODD_HEADS, "mlp_bias": True}, "odd heads, biases"),
    ParityCase("MistralForSequenceClassification", {"num_labels": 3}),
    ParityCase("MistralForSequenceClassification", {"sliding_window": 7, "num_key_value_heads": 1}, "windows of 7"),
    ParityCase("MistralModel"),
    ParityCase("MistralModel", {"sliding_window": 7, "num_key_value_heads": 1}, "windows of 7, one KV head"),
    ParityCase("ModernBertForMaskedLM", _MODERN),
    ParityCase("ModernBertForMaskedLM", _MODERN_ODD, "odd sizes, biases, other layers and rotations"),
    ParityCase("ModernBertForSequenceClassification", {**_MODERN, "num_labels": 3}),
    ParityCase(
        "ModernBertForSequenceClassification", {**_MODERN_ODD, "num_labels": 1}, "odd sizes, biases, by the mean"
    ),
    ParityCase("ModernBertForTokenClassification", {**_MODERN, "num_labels": 3}),
    ParityCase("ModernBertForTokenClassification", {**_MODERN_ODD, "num_labels": 5}, "odd sizes, biases"),
    ParityCase("ModernBertModel", _MODERN),
    ParityCase("ModernBertModel", _MODERN_ODD, "odd sizes, biases, other layers and rotations"),
    ParityCase("Qwen2ForSequenceClassification", {"num_labels": 3}),
    ParityCase(
        "Qwen2ForSequenceClassification", {"num_labels": 1, "num_key_value_heads": 1, **_YARN}, "one KV head, YaRN"
    ),
    ParityCase("Qwen2ForTokenClassification", {"num_labels": 2}),
    ParityCase(
        "Qwen2ForTokenClassification",
        {"use_sliding_window": True, "sliding_window": 7, "max_window_layers": 1, "num_labels": 3},
        "upper layers with windows",
    ),
    ParityCase("Qwen2Model"),
    ParityCase("Qwen2Model", {"num_key_value_heads": 1, **_YARN}, "one KV head, YaRN"),
    ParityCase("Qwen3ForSequenceClassification", {"head_dim": 16, "num_labels": 3}),
    ParityCase(
        "Qwen3ForSequenceClassification", {**ODD_HEADS, "attention_bias": True, "num_labels": 1}, "odd heads, biases"
    ),
    ParityCase("Qwen3ForTokenClassification", {"head_dim": 16, "num_labels": 2}),
    ParityCase(
        "Qwen3ForTokenClassification", {**ODD_HEADS, "attention_bias": True, "num_labels": 3}, "odd heads, biases"
    ),
    ParityCase("Qwen3Model", {"head_dim": 16}),
    ParityCase("Qwen3Model", {**ODD_HEADS, "attention_bias": True}, "odd heads, biases"),
    ParityCase("RobertaForMaskedLM"),
    ParityCase("RobertaForMaskedLM", {**_ODD, "pad_token_id": 6, "type_vocab_size": 1}, "odd sizes, other padding"),
    ParityCase("RobertaForSequenceClassification", {"num_labels": 3}),
    ParityCase(
        "RobertaForSequenceClassification", {**_ODD, "num_labels": 1, "pad_token_id": 6}, "odd sizes, one label"
    ),
    ParityCase("RobertaModel"),
    ParityCase("RobertaModel", {**_ODD, "pad_token_id": 6, "type_vocab_size": 1}, "odd sizes, other padding"),
    ParityCase("XLMRobertaForMaskedLM"),
    ParityCase("XLMRobertaForMaskedLM", {**_ODD, "pad_token_id": 6}, "odd sizes, other padding"),
    ParityCase("XLMRobertaForSequenceClassification", {"num_labels": 3}),
    ParityCase("XLMRobertaForSequenceClassification", {**_ODD, "num_labels": 1}, "odd sizes, one label"),
    ParityCase("XLMRobertaModel"),
    ParityCase("XLMRobertaModel", {**_ODD, "pad_token_id": 6}, "odd sizes, other padding"),
)
