"""Architectures without a plugin of their own compute what ``transformers`` computes, step by step and from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from case_parts import LLAMA3, ODD_HEADS, YARN
from fallback_survey import RUNS, tiny_fields_of, written_outcomes
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec, SlidingWindowSpec
from hardpoint_testing_torch import (
    PlainAttentionBackend,
    check_parity,
    create_model,
    installed_loader,
    make_tiny_model,
    worker_config,
)
from hardpoint_torch_runtime.layers import ParallelLinear, VocabEmbedding
from hardpoint_transformers_models.model import create_transformers

TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOWS: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
QUICK = ("GemmaForCausalLM", "OlmoeForCausalLM")
RUNNING = sorted(written_outcomes(RUNS))


@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in RUNNING]
)
def test_logits_and_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Whole prompts, chunks, single tokens, mixed batches, shared prefixes and prompts computed again."""
    tiny = make_tiny_model(architecture, tmp_path, **tiny_fields_of(architecture))
    check_parity(tiny, create_transformers, PlainAttentionBackend(), loader=installed_loader("safetensors"))


ONE_KV_HEAD: Mapping[str, Any] = {"num_attention_heads": 5, "num_key_value_heads": 1, "head_dim": 28}
LINEAR: Mapping[str, Any] = {"rope_type": "linear", "factor": 4.0, "rope_theta": 10000.0}
TIED, UNTIED = {"tie_word_embeddings": True}, {"tie_word_embeddings": False}
AWKWARD: Mapping[str, Mapping[str, Any]] = {
    "ApertusForCausalLM": {**ODD_HEADS, **TIED, "rope_parameters": LLAMA3},
    "ArceeForCausalLM": {**ODD_HEADS, **TIED, "rope_parameters": YARN, "mlp_bias": True, "attention_bias": True},
    "Cohere2ForCausalLM": {**ONE_KV_HEAD, **UNTIED, **WINDOWS, "num_hidden_layers": 4},
    "DeepseekV3ForCausalLM": {
        **{"num_attention_heads": 5, "num_key_value_heads": 5, "qk_nope_head_dim": 10, "v_head_dim": 6},
        **{"rope_parameters": YARN, **TIED},
    },
    "Ernie4_5ForCausalLM": {**ODD_HEADS, **UNTIED, "use_bias": True, "rope_parameters": LLAMA3},
    "Exaone4ForCausalLM": {**ODD_HEADS, **TIED, **WINDOWS, "num_hidden_layers": 4, "rope_parameters": LLAMA3},
    "GPTJForCausalLM": {"hidden_size": 60, "num_attention_heads": 6, "rotary_dim": 6},
    "GemmaForCausalLM": {**ONE_KV_HEAD, **UNTIED, "rope_parameters": YARN},
    "Glm4ForCausalLM": {
        **{**ODD_HEADS, **TIED, "attention_bias": True, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}
    },
    "Glm4MoeForCausalLM": {
        **{**ODD_HEADS, **TIED, "use_qk_norm": True, "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.5}}
    },
    "GptOssForCausalLM": {**ODD_HEADS, **TIED, "sliding_window": 7},
    "LlamaForCausalLM": {**TIED, "attention_bias": True},
    "NemotronForCausalLM": {**ODD_HEADS, **TIED, "attention_bias": True, "mlp_bias": True},
    "OlmoForCausalLM": {**TIED, "clip_qkv": 0.5},
    "OlmoeForCausalLM": {
        **{"hidden_size": 60, "num_attention_heads": 6, "norm_topk_prob": True, "clip_qkv": 2.0},
        **{**TIED, "rope_parameters": LLAMA3},
    },
    "SeedOssForCausalLM": {**ONE_KV_HEAD, **TIED, "rope_parameters": YARN},
    "StableLmForCausalLM": {
        **{"hidden_size": 60, "num_attention_heads": 5, "num_key_value_heads": 5, "use_qkv_bias": True},
        **{**TIED, "qk_layernorm": True, "use_parallel_residual": True},
        "rope_parameters": {**LINEAR, "partial_rotary_factor": 0.34},
    },
    "VaultGemmaForCausalLM": {
        **{**ODD_HEADS, **WINDOWS, "num_hidden_layers": 4, "query_pre_attn_scalar": 20},
        **{"attn_logit_softcapping": 3.0, "final_logit_softcapping": 4.0},
    },
}
"""Heads of other sizes than hidden size and number say, few keys for many queries, scaled rotations, ties that are
unusual for the family, biases, norms, caps."""


@pytest.mark.slow
@pytest.mark.parametrize("architecture", AWKWARD)
def test_awkward_configurations_come_to_the_same(architecture: str, tmp_path: Path) -> None:
    tiny = make_tiny_model(architecture, tmp_path, **{**tiny_fields_of(architecture), **AWKWARD[architecture]})
    check_parity(tiny, create_transformers, PlainAttentionBackend(), loader=installed_loader("safetensors"))


def test_each_layer_keeps_what_its_own_window_needs(tmp_path: Path) -> None:
    tiny = make_tiny_model("Cohere2ForCausalLM", tmp_path, **TOKENS, **WINDOWS, num_hidden_layers=4)
    model, toolkit = create_model(create_transformers, worker_config(tiny.info), PlainAttentionBackend())
    specs = list(model.kv_cache_specs().values())
    assert [type(spec) for spec in specs] == [SlidingWindowSpec, FullAttentionSpec] * 2
    assert [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)] == [7, 7]
    assert [name for name, _ in model.named_layers()] == [f"model.layers.{index}" for index in range(4)]
    assert list(toolkit.attention_layers) == list(model.kv_cache_specs())


def test_linear_layers_table_and_head_are_the_workers(tmp_path: Path) -> None:
    """So that they are quantized and divided as anywhere else."""
    tiny = make_tiny_model("CohereForCausalLM", tmp_path, **TOKENS)
    model, _ = create_model(create_transformers, worker_config(tiny.info), PlainAttentionBackend())
    assert isinstance(model, torch.nn.Module)
    parts = list(model.modules())
    assert not [part for part in parts if isinstance(part, torch.nn.Linear | torch.nn.Embedding)]
    assert sum(isinstance(part, ParallelLinear) for part in parts) == 7 * 3
    assert sum(isinstance(part, VocabEmbedding) for part in parts) == 1


def test_models_in_one_process_do_not_disturb_one_another(tmp_path: Path) -> None:
    """The functions that layers call are registered once, for all models there are, those of the oracle included."""
    folders = [tmp_path / name for name in "ab"]
    first, second = (
        make_tiny_model("CohereForCausalLM", folder, seed=index, **TOKENS) for index, folder in enumerate(folders)
    )
    for tiny in (first, second, first):
        check_parity(tiny, create_transformers, PlainAttentionBackend())
