"""Configurations of mixtures of experts that are more than experts in place of the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_testing_torch import ParityCase

__all__ = ["MOE_CASES"]

_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_QWEN2_MOE: Mapping[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_ROUTED: Mapping[str, float] = {"bfloat16": 0.25}
"""Rounding may choose another expert, which changes all that follows."""

MOE_CASES: tuple[ParityCase, ...] = (
    ParityCase("Qwen2MoeForCausalLM", _QWEN2_MOE, limits=_ROUTED),
    ParityCase(
        "Qwen2MoeForCausalLM",
        {
            **_QWEN2_MOE,
            "num_attention_heads": 6,
            "num_key_value_heads": 2,
            "head_dim": 20,
            "num_hidden_layers": 4,
            "mlp_only_layers": [1],
            "norm_topk_prob": True,
            "qkv_bias": False,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 3,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "odd heads, one dense layer, windows of 7, renormalized, no biases, tied, YaRN",
        limits=_ROUTED,
    ),
)
