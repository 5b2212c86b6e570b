"""RoBERTa and ModernBERT encoders against Hugging Face, and what their configurations may say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.kv_cache_specs import EncoderOnlyAttentionSpec
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models import modernbert, roberta
from hardpoint_models.bert_config import BertConfig, BertVariant
from hardpoint_models.modernbert_config import ModernBertConfig
from hardpoint_models.text_positions import num_separators_before, positions_behind_padding
from hardpoint_testing_torch import ParityHarness, check_parity, installed_loader, make_tiny_model, relative_error

MAX_RELATIVE_ERROR = 1e-5
MODERN: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "max_position_embeddings": 64,
}
ROBERTA: dict[str, Any] = {**MODERN, "type_vocab_size": 1}
CREATE = {
    "RobertaModel": roberta.create_roberta,
    "RobertaForMaskedLM": roberta.create_roberta_masked_lm,
    "XLMRobertaModel": roberta.create_xlm_roberta,
    "ModernBertModel": modernbert.create_modernbert,
    "ModernBertForMaskedLM": modernbert.create_modernbert_masked_lm,
}


def read_modern(**changes: Any) -> ModernBertConfig:
    return ModernBertConfig.read({**MODERN, **changes}, "ModernBertModel")


def read_roberta(**changes: Any) -> BertConfig:
    variant = BertVariant(follows_roberta=True, default_padding=1)
    return BertConfig.read({**ROBERTA, **changes}, "RobertaModel", variant)


@pytest.mark.parametrize("architecture", CREATE)
def test_hidden_states_are_those_of_the_reference(architecture: str, tmp_path: Path) -> None:
    """Through the loader of files, in steps of mixed lengths with padding behind them, and with padding's own token
    among those of a text."""
    changes: dict[str, Any] = {"local_attention": 8} if architecture.startswith("Modern") else {}
    tiny = make_tiny_model(architecture, tmp_path, **changes)
    loader = installed_loader("safetensors")
    check_parity(tiny, CREATE[architecture], ReferenceBackend(), loader=loader)
    harness = ParityHarness(tiny, CREATE[architecture], ReferenceBackend(), loader=loader)
    prompts = {f"{index}": harness.prompt(length) for index, length in enumerate((1, 7, 30, 18, 61))}
    prompts["padding"] = [9, 1, 1, 8, 0, 1, 7]
    found = harness.driver.step(prompts, num_padding=3)
    errors = {name: relative_error(found[name], tiny.logits(prompt)) for name, prompt in prompts.items()}
    assert max(errors.values()) <= MAX_RELATIVE_ERROR, errors
    assert {type(spec) for spec in harness.model.kv_cache_specs().values()} == {EncoderOnlyAttentionSpec}


def test_positions_begin_behind_the_padding_in_every_text() -> None:
    positions = torch.tensor([0, 1, 2, 3, 0, 1, 0])
    token_ids = torch.tensor([9, 2, 9, 2, 2, 9, 2])
    assert positions_behind_padding(positions, token_ids, 2).tolist() == [3, 2, 4, 2, 2, 3, 2]
    assert positions_behind_padding(positions, None, 2).tolist() == [3, 4, 5, 6, 3, 4, 3]


def test_separators_are_counted_text_by_text() -> None:
    """What lies behind the last text has positions of no meaning, and must not reach beyond the step."""
    positions = torch.tensor([0, 1, 2, 3, 4, 0, 1, 2, 40])
    token_ids = torch.tensor([1, 5, 9, 5, 9, 5, 9, 9, 5])
    assert num_separators_before(positions, token_ids, 5).tolist()[:8] == [0, 0, 1, 1, 2, 0, 1, 1]


def test_what_modernbert_says_by_leaving_it_out() -> None:
    config = read_modern()
    assert config.is_local == (False, True, True, False, True)
    assert config.windows == (None, 65, 65, None, 65)
    assert (config.rope.theta, config.local_rope.theta) == (160_000.0, 10_000.0)
    assert (config.norm_bias, config.attention_bias, config.mlp_bias, config.labels) == (False, False, False, None)
    assert (config.pooling.method, config.pooling.normalizes) == ("cls", False)


def test_older_and_newer_spellings_of_modernbert() -> None:
    older = read_modern(global_attn_every_n_layers=2, global_rope_theta=5e4, local_rope_theta=300.0, local_attention=11)
    newer = read_modern(
        layer_types=["full_attention", "sliding_attention"] * 2 + ["full_attention"],
        local_attention=11,
        rope_parameters={
            "full_attention": {"rope_type": "default", "rope_theta": 5e4},
            "sliding_attention": {"rope_type": "default", "rope_theta": 300.0},
        },
    )
    assert older == newer
    assert older.windows == (None, 6, None, 6, None)


def test_what_roberta_says_by_leaving_it_out() -> None:
    assert (read_roberta().padding_id, read_roberta(pad_token_id=7).padding_id) == (1, 7)
    assert read_roberta().separator_id is None


@pytest.mark.parametrize(
    ("changes", "kind", "message"),
    [
        ({"hidden_activation": "swishy"}, UnsupportedModelError, "'hidden_activation' is 'swishy'; supported"),
        ({"num_attention_heads": 7}, ModelFormatError, "hidden_size=48 is no multiple of num_attention_heads=7"),
        ({"layer_types": ["full_attention"]}, ModelFormatError, "'layer_types' must list 5 layers"),
        ({"layer_types": ["chunked"] * 5}, UnsupportedModelError, "'layer_types' holds 'chunked'"),
        ({"local_attention": 0}, ModelFormatError, "'local_attention' is 0"),
        ({"local_rope_theta": -1.0}, ModelFormatError, "'local_rope_theta' is -1.0"),
        ({"norm_bias": "no"}, ModelFormatError, "'norm_bias' is 'no'; true or false is needed"),
        ({"matryoshka_dimensions": [64]}, ModelFormatError, "'matryoshka_dimensions' is .64.; .* from 1 to 48"),
        ({"matryoshka_dimensions": []}, ModelFormatError, "'matryoshka_dimensions' is"),
        ({"rope_parameters": {"full_attention": {"rope_type": "spiral"}}}, UnsupportedModelError, "'spiral'"),
    ],
)
def test_what_modernbert_refuses(changes: dict[str, Any], kind: type[HardpointError], message: str) -> None:
    with pytest.raises(kind, match=message):
        read_modern(**changes)


@pytest.mark.parametrize("padding", [-1, 63, "one", True, 2.0])
def test_roberta_needs_positions_behind_the_padding(padding: Any) -> None:
    with pytest.raises(ModelFormatError, match=r"'pad_token_id' is .*; it must be from 0 to 62"):
        read_roberta(pad_token_id=padding)


def test_sizes_to_cut_embeddings_to() -> None:
    assert read_modern(matryoshka_dimensions=[8, 48]).pooling.dimensions == (8, 48)
