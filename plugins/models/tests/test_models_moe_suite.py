"""The mixtures of experts, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow


class TestGptOss(ModelSuite):
    plugin: ClassVar[str | None] = "GptOssForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 3,
        "num_experts_per_tok": 2,
        "head_dim": 16,
        "sliding_window": 5,
        "swiglu_limit": 0.8,
    }


class TestLlama4(ModelSuite):
    plugin: ClassVar[str | None] = "Llama4ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_local_experts": 3,
        "intermediate_size_mlp": 80,
        "head_dim": 16,
        "moe_layers": [1],
        "no_rope_layers": [1, 0, 1],
        "attention_chunk_size": 8,
        "floor_scale": 4,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
    }


class TestMixtral(ModelSuite):
    plugin: ClassVar[str | None] = "MixtralForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {"num_local_experts": 3, "num_hidden_layers": 2}


class TestQwen2Moe(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2MoeForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "shared_expert_intermediate_size": 40,
        "mlp_only_layers": [1],
    }


class TestQwen3Moe(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen3MoeForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "num_experts": 4,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
        "mlp_only_layers": [1],
    }
