"""DeepSeek V2 and V3, as they are installed, pass the conformance suite of their kind."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow

TINY: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 12,
    "qk_rope_head_dim": 8,
    "v_head_dim": 20,
    "n_routed_experts": 6,
    "num_experts_per_tok": 2,
    "n_group": 3,
    "topk_group": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}


ROUTED_ERROR = 0.5
"""In bfloat16 rounding may choose another expert, which changes all that follows."""


class TestDeepseekV3(ModelSuite):
    plugin: ClassVar[str | None] = "DeepseekV3ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = TINY
    max_bfloat16_error: ClassVar[float] = ROUTED_ERROR


class TestTiedDeepseekV3WithoutQueryCompression(ModelSuite):
    plugin: ClassVar[str | None] = "DeepseekV3ForCausalLM"
    max_bfloat16_error: ClassVar[float] = ROUTED_ERROR
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **TINY,
        "q_lora_rank": None,
        "tie_word_embeddings": True,
        "attention_bias": True,
        "num_hidden_layers": 2,
        "rope_parameters": {
            "rope_type": "yarn",
            "rope_theta": 10000.0,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
            "mscale_all_dim": 1.0,
            "mscale": 1.0,
        },
    }


class TestDeepseekV2(ModelSuite):
    plugin: ClassVar[str | None] = "DeepseekV2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {**TINY, "topk_method": "group_limited_greedy"}
    max_bfloat16_error: ClassVar[float] = ROUTED_ERROR
    unknown_config: ClassVar[Mapping[str, Any]] = {"hidden_act": "of_nobody", "topk_method": "of_nobody"}
