"""Heads of labels, of encoders and of decoders: what they compute, and what configurations may say of them."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models import bert, modernbert, pooled_decoders, roberta
from hardpoint_models.bert_config import BertConfig, BertVariant
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.label_head import num_labels, score_activation
from hardpoint_models.modernbert_config import ModernBertConfig
from hardpoint_testing_torch import (
    LocalDriver,
    StateDictLoader,
    TinyModel,
    build_model,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)
from reward_models import make_reward_model

MAX_RELATIVE_ERROR = 1e-5
CASES: dict[str, tuple[Any, str, dict[str, Any]]] = {
    "BertForSequenceClassification": (bert.create_bert_sequence_classification, "cls", {"sep_token_id": 5}),
    "BertForTokenClassification": (bert.create_bert_token_classification, "token_embed", {"sep_token_id": 5}),
    "RobertaForSequenceClassification": (roberta.create_roberta_sequence_classification, "cls", {}),
    "XLMRobertaForSequenceClassification": (roberta.create_xlm_roberta_sequence_classification, "cls", {}),
    "ModernBertForSequenceClassification": (
        modernbert.create_modernbert_sequence_classification,
        "mean",
        {"classifier_pooling": "mean", "norm_bias": True},
    ),
    "ModernBertForTokenClassification": (
        modernbert.create_modernbert_token_classification,
        "token_embed",
        {"classifier_bias": True},
    ),
    "LlamaForSequenceClassification": (pooled_decoders.create_llama_sequence_classification, "last", {}),
    "MistralForSequenceClassification": (
        pooled_decoders.create_mistral_sequence_classification,
        "last",
        {"sliding_window": 5},
    ),
    "Qwen2ForTokenClassification": (pooled_decoders.create_qwen2_token_classification, "token_embed", {}),
    "Qwen3ForSequenceClassification": (
        pooled_decoders.create_qwen3_sequence_classification,
        "last",
        {"head_dim": 20, "tie_word_embeddings": True},
    ),
}
POOLED = {"cls": lambda one: one[:1], "last": lambda one: one[-1:], "mean": lambda one: one.mean(0, keepdim=True)}


def built(tiny: TinyModel, create: Any, tensors: dict[str, torch.Tensor] | None = None) -> tuple[Any, LocalDriver]:
    loader = StateDictLoader(tiny.tensors() if tensors is None else tensors)
    model, toolkit = build_model(create, loader, worker_config(tiny.info), ReferenceBackend())
    return model, LocalDriver(model, toolkit)


@pytest.mark.parametrize("architecture", CASES)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_are_those_of_the_reference(architecture: str, labels: int, tmp_path: Path) -> None:
    create, method, changes = CASES[architecture]
    tiny = make_tiny_model(architecture, tmp_path, num_labels=labels, **changes)
    model, driver = built(tiny, create)
    assert (model.pooling_method, model.score_head.num_labels) == (method, labels)
    assert model.score_head.activation == ("sigmoid" if labels == 1 else "softmax")
    # Separators twice, so that tokens are of both types.
    prompts = {"a": [9, 3, 5, 14, 15, 5, 8], "b": [35], "c": [8, 5, 7, 9, 3, 2, 3, 8]}
    for name, states in driver.step(prompts).items():
        pooled = POOLED[method](states) if method in POOLED else states
        found = model.score_head(pooled.float())
        expected = tiny.scores(prompts[name]).reshape(found.shape)
        # Absolutely: scores are about 1, and some of them nearly 0.
        assert float((found - expected).abs().max()) <= MAX_RELATIVE_ERROR, name


def test_files_of_decoders_that_embed_have_shorter_names(tmp_path: Path) -> None:
    """Saved by itself the decoder knows no model around it; a head that predicts tokens is not needed."""
    tiny = make_tiny_model("Qwen3Model", tmp_path, head_dim=16)
    tensors = tiny.tensors()
    assert "layers.0.self_attn.q_proj.weight" in tensors
    model, driver = built(tiny, pooled_decoders.create_qwen3_model)
    prompt = [5, 9, 3, 3, 8]
    assert relative_error(driver.step({"a": prompt})["a"], tiny.logits(prompt)) <= MAX_RELATIVE_ERROR
    longer = {f"model.{name}": tensor for name, tensor in tensors.items()} | {"lm_head.weight": torch.zeros(160, 48)}
    again, _ = built(tiny, pooled_decoders.create_qwen3_model, longer)
    for name, parameter in again.state_dict().items():
        assert torch.equal(parameter, model.state_dict()[name]), name
    assert (model.pooling_method, model.normalizes, model.score_head) == ("last", True, None)
    with pytest.raises(RuntimeError, match="Qwen3Model holds no head that predicts tokens"):
        model.logits(torch.zeros(1, 48))


@pytest.mark.parametrize(
    ("architecture", "create", "method", "labels"),
    [
        ("Qwen2ForRewardModel", pooled_decoders.create_qwen2_reward, "last", 1),
        ("Qwen2ForProcessRewardModel", pooled_decoders.create_qwen2_process_reward, "token_embed", 2),
    ],
)
@pytest.mark.parametrize("config", [{}, {"num_key_value_heads": 1, "tie_word_embeddings": True}], ids=["plain", "odd"])
def test_rewards_are_those_of_two_layers(
    architecture: str, create: Any, method: str, labels: int, config: dict[str, Any], tmp_path: Path
) -> None:
    made = make_reward_model(architecture, tmp_path, labels, **config)
    model, toolkit = build_model(create, installed_loader("safetensors"), worker_config(made.info), ReferenceBackend())
    assert isinstance(model, DecoderModel)
    assert (model.pooling_method, model.score_head is not None) == (method, True)
    prompt = [9, 3, 5, 14, 15, 5, 8]
    states = LocalDriver(model, toolkit).step({"a": prompt})["a"]
    assert model.score_head is not None
    found, expected = model.score_head(states.float()), made.scores(prompt)
    assert float((found - expected).abs().max()) <= MAX_RELATIVE_ERROR


def fields(**config: Any) -> ConfigFields:
    return ConfigFields(config, "Judge")


@pytest.mark.parametrize(
    ("config", "count"), [({}, 2), ({"num_labels": 5}, 5), ({"id2label": {"0": "no", "1": "maybe", "2": "yes"}}, 3)]
)
def test_how_many_labels_there_are(config: dict[str, Any], count: int) -> None:
    assert num_labels(fields(**config)) == count


@pytest.mark.parametrize(
    ("config", "labels", "activation"),
    [
        ({}, 1, "sigmoid"),
        ({}, 2, "softmax"),
        ({"problem_type": "regression"}, 1, "none"),
        ({"problem_type": "multi_label_classification"}, 4, "sigmoid"),
        ({"sbert_ce_default_activation_function": "torch.nn.modules.linear.Identity"}, 1, "none"),
        ({"sentence_transformers": {"activation_fn": "torch.nn.modules.activation.Sigmoid"}}, 3, "sigmoid"),
    ],
)
def test_what_scores_go_through(config: dict[str, Any], labels: int, activation: str) -> None:
    assert score_activation(fields(**config), labels) == activation


@pytest.mark.parametrize(
    ("config", "kind", "message"),
    [
        ({"id2label": ["no", "yes"]}, ModelFormatError, "'id2label' is .*; an object with a name for each label"),
        ({"id2label": {}}, ModelFormatError, "'id2label' is {}"),
        ({"num_labels": 0}, ModelFormatError, "'num_labels' is 0"),
        ({"problem_type": "ranking"}, UnsupportedModelError, "'problem_type' is 'ranking'; supported"),
        (
            {"sbert_ce_default_activation_function": "my.Tanh"},
            UnsupportedModelError,
            "activation of scores is 'my.Tanh'; supported: Identity, Sigmoid, Softmax",
        ),
    ],
)
def test_what_says_nothing_of_labels_is_refused(
    config: dict[str, Any], kind: type[HardpointError], message: str
) -> None:
    with pytest.raises(kind, match=message):
        score_activation(fields(**config), num_labels(fields(**config)))


SIZES: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}


@pytest.mark.parametrize("separator", [100, -1, "[SEP]", True])
def test_both_texts_of_a_pair_must_be_told_apart(separator: Any) -> None:
    """Unless tokens are all of one type."""
    judges = BertVariant(head="text")
    with pytest.raises(UnsupportedModelError, match="neither the config field 'sep_token_id' nor the tokenizer"):
        BertConfig.read(SIZES, "Judge", judges)
    with pytest.raises(ModelFormatError, match="'sep_token_id' is .*; a token below 100 is needed"):
        BertConfig.read({**SIZES, "sep_token_id": separator}, "Judge", judges)
    assert BertConfig.read({**SIZES, "type_vocab_size": 1}, "Judge", judges).separator_id is None
    assert BertConfig.read({**SIZES, "sep_token_id": 7}, "Judge", judges).separator_id == 7
    assert BertConfig.read(SIZES, "Embeds").separator_id is None


def test_modernbert_pools_for_its_head_in_two_ways() -> None:
    with pytest.raises(UnsupportedModelError, match="'classifier_pooling' is 'max'; supported: 'cls', 'mean'"):
        ModernBertConfig.read({**SIZES, "classifier_pooling": "max"}, "Judge", "text")
    with pytest.raises(UnsupportedModelError, match="'classifier_activation' is 'swishy'"):
        ModernBertConfig.read({**SIZES, "classifier_activation": "swishy"}, "Judge", "tokens")
