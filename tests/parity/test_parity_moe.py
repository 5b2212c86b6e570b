"""Mixtures of experts through the installed loaders, as files hold them, and routing beside that of Hugging Face."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import DeepseekV3Config
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3MoE

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_testing_torch import (
    check_parity,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
)
from hardpoint_torch_runtime.layers import (
    LinearFactory,
    MixtureOfExperts,
    MixtureSizes,
    RoutingParameters,
    SiluAndMul,
    TensorParallel,
    UnquantizedLinearMethod,
)

CPU = torch.device("cpu")
SMALL: dict[str, dict[str, Any]] = {
    "MixtralForCausalLM": {"num_local_experts": 4, "num_hidden_layers": 2},
    "Qwen3MoeForCausalLM": {
        "num_experts": 6,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 32,
        "num_hidden_layers": 2,
        "norm_topk_prob": True,
    },
}


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


@pytest.mark.slow
@pytest.mark.parametrize("is_stacked", [False, True], ids=["apart", "stacked"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("architecture", SMALL)
def test_a_saved_folder_through_the_real_loader(
    architecture: str, dtype: torch.dtype, is_stacked: bool, backend: AttentionBackend, tmp_path: Path
) -> None:
    tiny = make_tiny_model(architecture, tmp_path, dtype=dtype, **SMALL[architecture])
    if is_stacked:
        # A copy is narrowed: the oracle's own tables must keep float32.
        copy.deepcopy(tiny.oracle).to(dtype).save_pretrained(tmp_path, save_original_format=False)
        assert "model.layers.1.mlp.experts.down_proj" in tiny.tensors()
    check_parity(tiny, installed_factory("model", architecture), backend, loader=installed_loader("safetensors"))


def plain(name: str, shape: LinearShape) -> LinearMethod:
    del name, shape
    return UnquantizedLinearMethod(torch.float32, CPU)


@pytest.mark.parametrize("renormalizes", [True, False])
@torch.inference_mode()
def test_grouped_sigmoid_routing_with_shared_experts_is_that_of_deepseek_v3(renormalizes: bool) -> None:
    config = DeepseekV3Config(
        hidden_size=16,
        moe_intermediate_size=12,
        n_routed_experts=8,
        num_experts_per_tok=3,
        n_group=4,
        topk_group=2,
        n_shared_experts=2,
        routed_scaling_factor=2.5,
        norm_topk_prob=renormalizes,
    )
    torch.manual_seed(0)
    oracle: Any = DeepseekV3MoE(config).eval()
    for values in (*oracle.parameters(), oracle.gate.e_score_correction_bias):
        values.copy_(torch.randn(values.shape) * 0.5)
    routing = RoutingParameters(
        8,
        3,
        scoring="sigmoid",
        renormalizes=renormalizes,
        num_groups=4,
        num_kept_groups=2,
        has_correction_bias=True,
        scale=2.5,
        in_float32=True,
    )
    layer = MixtureOfExperts(
        "mlp",
        LinearFactory(plain, TensorParallel(), torch.float32, CPU),
        MixtureSizes(16, 12, shared_size=24),
        routing,
        SiluAndMul(),
    )
    copy_from(oracle, layer)
    hidden = torch.randn(1, 40, 16)
    torch.testing.assert_close(layer(hidden[0]), oracle(hidden)[0], rtol=1e-4, atol=1e-5)


def copy_from(oracle: Any, layer: MixtureOfExperts) -> None:
    stored = {
        "gate.weight": oracle.gate.weight,
        "gate.e_score_correction_bias": oracle.gate.e_score_correction_bias,
        "shared_experts.gate_up_proj.weight": torch.cat(
            [oracle.shared_experts.gate_proj.weight, oracle.shared_experts.up_proj.weight]
        ),
        "shared_experts.down_proj.weight": oracle.shared_experts.down_proj.weight,
    }
    for number in range(len(layer.experts)):
        stored[f"experts.{number}.gate_up_proj.weight"] = oracle.experts.gate_up_proj[number]
        stored[f"experts.{number}.down_proj.weight"] = oracle.experts.down_proj[number]
    layer.load_state_dict(stored)
