"""DeepSeek V2 and V3 against Hugging Face on tiny random weights, every feature of the family on and off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.kv_cache_specs import MLASpec
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.deepseek import create_deepseek_v2, create_deepseek_v3
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory
from hardpoint_testing_torch.tiny_models import TinyModel

TINY: dict[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_group": 4,
    "topk_group": 2,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
YARN: dict[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "mscale": 0.707,
    "mscale_all_dim": 0.9,
}
AWKWARD: dict[str, Any] = {
    "q_lora_rank": None,
    "num_attention_heads": 5,
    "num_key_value_heads": 5,
    "kv_lora_rank": 18,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 6,
    "v_head_dim": 20,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "norm_topk_prob": False,
    "rope_parameters": YARN,
}
"""Sizes of a head that differ, none of them a power of two, and queries without compression."""

V2, V3 = ("DeepseekV2ForCausalLM", create_deepseek_v2), ("DeepseekV3ForCausalLM", create_deepseek_v3)
PLAIN_V2 = {"topk_method": "greedy", "n_group": None, "topk_group": None}
CASES = [
    pytest.param(*V3, AWKWARD, id="v3-awkward"),
    pytest.param(*V3, {}, id="v3", marks=pytest.mark.slow),
    pytest.param(
        *V3, {"rope_interleave": False, "n_group": 1, "topk_group": 1}, id="v3-halves", marks=pytest.mark.slow
    ),
    pytest.param(*V3, {"first_k_dense_replace": 3}, id="v3-dense", marks=pytest.mark.slow),
    pytest.param(
        *V3,
        {"first_k_dense_replace": 0, "n_shared_experts": 1, "num_attention_heads": 1, "num_key_value_heads": 1},
        id="v3-one-head",
        marks=pytest.mark.slow,
    ),
    pytest.param(*V2, PLAIN_V2, id="v2-greedy", marks=pytest.mark.slow),
    pytest.param(
        *V2,
        {"topk_method": "group_limited_greedy", "routed_scaling_factor": 16.0, "q_lora_rank": None},
        id="v2-groups",
        marks=pytest.mark.slow,
    ),
    pytest.param(
        *V2, {**PLAIN_V2, "rope_parameters": {**YARN, "mscale_all_dim": 0.707}}, id="v2-yarn", marks=pytest.mark.slow
    ),
]


def tiny_model(folder: Path, architecture: str = V3[0], **config: Any) -> TinyModel:
    return make_tiny_model(architecture, folder, **{**TINY, **config})


@pytest.mark.parametrize(("architecture", "factory", "config"), CASES)
def test_every_way_of_computing_and_greedy_tokens(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    check_parity(tiny_model(tmp_path, architecture, **config), factory, ReferenceBackend())


@pytest.mark.slow
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    check_parity(tiny_model(tmp_path, **AWKWARD), create_deepseek_v3, ReferenceBackend(), block_size=block_size)


@pytest.mark.slow
def test_experts_stored_as_stacks(tmp_path: Path) -> None:
    tiny = tiny_model(tmp_path)
    tiny.oracle.save_pretrained(tmp_path, save_original_format=False)
    assert tiny.tensors()["model.layers.1.mlp.experts.gate_up_proj"].dim() == 3
    assert ParityHarness(tiny, create_deepseek_v3, ReferenceBackend()).prefill() < 1e-4


def test_one_vector_per_token_and_layer_is_cached(tmp_path: Path) -> None:
    tiny = tiny_model(tmp_path)
    model, _ = build_model(
        create_deepseek_v3, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend()
    )
    assert model.kv_cache_specs() == {
        f"model.layers.{layer}.self_attn.attn": MLASpec(block_size=4, num_kv_heads=1, head_size=24, dtype="float32")
        for layer in range(3)
    }


def test_layers_that_predict_further_tokens_stay_in_the_file(tmp_path: Path) -> None:
    """Of real checkpoints: one layer more than are counted, with projections and a head of its own."""
    tiny = tiny_model(tmp_path)
    extra = {
        name.replace("layers.2.", "layers.3."): tensor
        for name, tensor in tiny.tensors().items()
        if name.startswith("model.layers.2.")
    }
    for name in ("embed_tokens", "enorm", "hnorm", "eh_proj", "shared_head.norm", "shared_head.head"):
        extra[f"model.layers.3.{name}.weight"] = torch.zeros(2, 2)
    assert any(name.endswith("experts.7.down_proj.weight") for name in extra)
    stored = {**tiny.tensors(), **extra}
    model, toolkit = build_model(
        create_deepseek_v3, StateDictLoader(stored), worker_config(tiny.info), ReferenceBackend()
    )
    prompt = [3, 1, 4, 1, 5]
    assert relative_error(LocalDriver(model, toolkit).step({"a": prompt})["a"], tiny.logits(prompt)) < 1e-4
    stored["model.layers.4.enorm.weight"] = torch.zeros(2)
    with pytest.raises(ModelFormatError, match=r"model\.layers\.4\.enorm\.weight"):
        build_model(create_deepseek_v3, StateDictLoader(stored), worker_config(tiny.info), ReferenceBackend())


def test_computing_in_bfloat16_stays_near(tmp_path: Path) -> None:
    """All experts are chosen, since rounding may choose others; gates are computed in float32 all the same."""
    tiny = tiny_model(tmp_path, dtype=torch.bfloat16, num_experts_per_tok=8, n_group=1, topk_group=1)
    config = worker_config(tiny.info, dtype="bfloat16")
    model, toolkit = build_model(create_deepseek_v3, StateDictLoader(tiny.tensors()), config, ReferenceBackend())
    wide = [name for name, p in model.named_parameters() if p.dtype == torch.float32]  # type: ignore[attr-defined]
    assert {name.rpartition("mlp.")[2] for name in wide} == {"gate.weight", "gate.e_score_correction_bias"}
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = LocalDriver(model, toolkit).step({"a": prompt})["a"].float()
    error = (logits - tiny.logits(prompt)).norm() / tiny.logits(prompt).norm()
    assert error < 0.05
