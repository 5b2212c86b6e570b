"""Mixtures of experts against Hugging Face on tiny random weights: logits, greedy tokens, every stored layout."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.moe import create_mixtral, create_qwen2_moe, create_qwen3_moe
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    worker_config,
)
from hardpoint_testing_torch.local_driver import ModelFactory
from hardpoint_testing_torch.tiny_models import TinyModel

MIXTRAL: dict[str, Any] = {"num_local_experts": 4, "num_hidden_layers": 2}
QWEN3_MOE: dict[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "num_hidden_layers": 2,
    "head_dim": 16,
}
QWEN2_MOE: dict[str, Any] = {**QWEN3_MOE, "shared_expert_intermediate_size": 40}
FAMILIES = [
    pytest.param("MixtralForCausalLM", create_mixtral, MIXTRAL, id="mixtral"),
    pytest.param("Qwen2MoeForCausalLM", create_qwen2_moe, QWEN2_MOE, id="qwen2-moe"),
    pytest.param("Qwen3MoeForCausalLM", create_qwen3_moe, QWEN3_MOE, id="qwen3-moe"),
]
VARIANTS = [
    pytest.param("MixtralForCausalLM", create_mixtral, {"sliding_window": 7, "num_hidden_layers": 3}, id="windows"),
    pytest.param("MixtralForCausalLM", create_mixtral, {"num_experts_per_tok": 1, "head_dim": 32}, id="one-expert"),
    pytest.param("MixtralForCausalLM", create_mixtral, {"num_experts_per_tok": 4}, id="all-experts"),
    pytest.param(
        "Qwen2MoeForCausalLM",
        create_qwen2_moe,
        {
            "num_hidden_layers": 4,
            "decoder_sparse_step": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "qkv_bias": False,
        },
        id="qwen2-every-other-windows",
    ),
    pytest.param("Qwen3MoeForCausalLM", create_qwen3_moe, {"norm_topk_prob": True}, id="renormalized"),
    pytest.param(
        "Qwen3MoeForCausalLM", create_qwen3_moe, {"num_hidden_layers": 4, "decoder_sparse_step": 2}, id="every-other"
    ),
    pytest.param(
        "Qwen3MoeForCausalLM",
        create_qwen3_moe,
        {"num_hidden_layers": 3, "mlp_only_layers": [1], "tie_word_embeddings": True, "attention_bias": True},
        id="one-dense-tied-biases",
    ),
    pytest.param(
        "Qwen3MoeForCausalLM", create_qwen3_moe, {"use_sliding_window": True, "sliding_window": 9}, id="qwen3-windows"
    ),
]


def tiny_model(architecture: str, folder: Path, **config: Any) -> TinyModel:
    base = {"MixtralForCausalLM": MIXTRAL, "Qwen2MoeForCausalLM": QWEN2_MOE, "Qwen3MoeForCausalLM": QWEN3_MOE}
    return make_tiny_model(architecture, folder, **{**base[architecture], **config})


@pytest.mark.parametrize(("architecture", "factory", "config"), FAMILIES)
def test_prefill_chunks_decode_mixed_batches_and_greedy_tokens(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    check_parity(tiny_model(architecture, tmp_path, **config), factory, ReferenceBackend())


@pytest.mark.slow
@pytest.mark.parametrize(("architecture", "factory", "config"), VARIANTS)
def test_members_of_the_families(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    check_parity(tiny_model(architecture, tmp_path, **config), factory, ReferenceBackend())


@pytest.mark.parametrize(("architecture", "factory", "config"), FAMILIES)
def test_experts_stored_as_stacks(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    """The layout that Hugging Face computes with, which it saves when told not to restore the original one."""
    tiny = tiny_model(architecture, tmp_path, **config)
    apart = set(tiny.tensors())
    tiny.oracle.save_pretrained(tmp_path, save_original_format=False)
    stacked = tiny.tensors()
    assert stacked["model.layers.1.mlp.experts.gate_up_proj"].dim() == 3
    assert len(stacked) < len(apart)
    assert ParityHarness(tiny, factory, ReferenceBackend()).prefill() < 1e-4


def test_the_parameters_of_both_layouts_are_equal(tmp_path: Path) -> None:
    tiny = tiny_model("MixtralForCausalLM", tmp_path)
    models = [load(tiny, create_mixtral)]
    tiny.oracle.save_pretrained(tmp_path, save_original_format=False)
    models.append(load(tiny, create_mixtral))
    apart, stacked = (dict(model.named_parameters()) for model in models)
    assert apart.keys() == stacked.keys()
    assert all(torch.equal(parameter, stacked[name]) for name, parameter in apart.items())


def load(tiny: TinyModel, factory: ModelFactory) -> torch.nn.Module:
    model, _ = build_model(factory, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend())
    assert isinstance(model, torch.nn.Module)
    return model
