"""BERT encoders against Hugging Face: tiny random weights through the real loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.interfaces.kv_cache_specs import EncoderOnlyAttentionSpec
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.bert import BertEncoder, create_bert, create_bert_masked_lm
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    TinyModel,
    build_model,
    check_parity,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)

MAX_RELATIVE_ERROR = 1e-4
ODD: dict[str, Any] = {
    "hidden_size": 36,
    "num_attention_heads": 12,
    "intermediate_size": 41,
    "vocab_size": 97,
    "max_position_embeddings": 61,
    "type_vocab_size": 3,
    "hidden_act": "gelu_new",
    "layer_norm_eps": 1e-5,
}


def loaded(tiny: TinyModel, tensors: dict[str, torch.Tensor] | None = None) -> BertEncoder:
    factory = create_bert if tiny.info.architecture == "BertModel" else create_bert_masked_lm
    stored = tiny.tensors() if tensors is None else tensors
    model, _ = build_model(factory, StateDictLoader(stored), worker_config(tiny.info), ReferenceBackend())
    assert isinstance(model, BertEncoder)
    return model


@pytest.mark.parametrize("config", [{}, ODD], ids=["plain", "odd"])
def test_prompts_alone_and_together(config: dict[str, Any], tmp_path: Path) -> None:
    """Through the loader of files; mixed lengths in one step, with padding behind them."""
    tiny = make_tiny_model("BertModel", tmp_path, **config)
    loader = installed_loader("safetensors")
    report = check_parity(tiny, create_bert, ReferenceBackend(), loader=loader)
    assert sorted(report.by_mode) == ["batch", "prefill"]
    harness = ParityHarness(tiny, create_bert, ReferenceBackend(), loader=loader)
    prompts = {f"{index}": harness.prompt(length) for index, length in enumerate((1, 7, 30, 7, 18, 61))}
    found = harness.driver.step(prompts, num_padding=3)
    errors = {len(prompt): relative_error(found[name], tiny.logits(prompt)) for name, prompt in prompts.items()}
    assert max(errors.values()) <= MAX_RELATIVE_ERROR, errors


def test_the_encoder_of_another_task(tmp_path: Path) -> None:
    tiny = make_tiny_model("BertForMaskedLM", tmp_path, **ODD)
    assert any(name.startswith("bert.encoder.layer.0.") for name in tiny.tensors())
    check_parity(tiny, create_bert_masked_lm, ReferenceBackend(), loader=installed_loader("safetensors"))


def test_names_that_checkpoints_were_given_over_the_years(tmp_path: Path) -> None:
    """Letters for what norms hold, the prefix, tables of running numbers, and heads of every task."""
    tiny = make_tiny_model("BertModel", tmp_path)
    greek = {"LayerNorm.weight": "LayerNorm.gamma", "LayerNorm.bias": "LayerNorm.beta"}
    tensors = {}
    for name, tensor in tiny.tensors().items():
        for now, then in greek.items():
            name = name.replace(now, then)
        tensors[f"bert.{name}"] = tensor
    tensors["bert.embeddings.position_ids"] = torch.arange(256)
    tensors["cls.seq_relationship.weight"] = torch.zeros(2, 48)
    tensors["cls.predictions.transform.LayerNorm.gamma"] = torch.zeros(48)
    model, expected = loaded(tiny, tensors), loaded(tiny).state_dict()
    for name, parameter in model.state_dict().items():
        assert torch.equal(parameter, expected[name]), name


def test_every_token_sees_both_sides_and_no_other_prompt(tmp_path: Path) -> None:
    """R5.46."""
    tiny = make_tiny_model("BertModel", tmp_path)
    harness = ParityHarness(tiny, create_bert, ReferenceBackend())
    first, *_ = harness.prompt(5)
    step = harness.driver.step
    found = step({"a": [first, 8, 9, 1], "b": [first, 8, 9, 2], "c": [first, 8, 9, 1]})
    assert not torch.allclose(found["a"][0], found["b"][0])
    torch.testing.assert_close(found["a"], found["c"])
    torch.testing.assert_close(step({"d": [first, 8, 9, 1]})["d"], found["a"])


def test_layers_keep_nothing(tmp_path: Path) -> None:
    model = loaded(make_tiny_model("BertModel", tmp_path))
    assert {type(spec) for spec in model.kv_cache_specs().values()} == {EncoderOnlyAttentionSpec}


def test_what_a_model_of_embeddings_says_of_itself(tmp_path: Path) -> None:
    model = loaded(make_tiny_model("BertModel", tmp_path))
    assert (model.pooling_method, model.normalizes) == ("cls", False)
    with pytest.raises(RuntimeError, match="BertModel computes embeddings and no logits, .* ask for the task 'embed'"):
        model.logits(torch.zeros(1, 48))
    with pytest.raises(ValueError, match="one of token_ids, embeddings and intermediates"):
        model(None, torch.zeros(1, dtype=torch.int64))
