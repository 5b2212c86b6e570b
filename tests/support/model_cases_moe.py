"""Configurations of mixtures of experts that are more than experts in place of the feed-forward."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import LLAMA3, ROUTED, YARN
from hardpoint_testing_torch import ParityCase

__all__ = ["MOE_CASES"]

_QWEN2_MOE: Mapping[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 40,
}
_GPT_OSS: Mapping[str, Any] = {
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
    "intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 7,
    # Short enough for some pairs to be stretched and others not.
    "rope_parameters": {**YARN, "rope_theta": 150000.0, "truncate": False},
}
_LLAMA4: Mapping[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 4,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "head_dim": 16,
    "attention_chunk_size": 12,
    "floor_scale": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}

MOE_CASES: tuple[ParityCase, ...] = (
    ParityCase("GptOssForCausalLM", _GPT_OSS, limits=ROUTED),
    ParityCase(
        "GptOssForCausalLM",
        {
            **_GPT_OSS,
            "num_attention_heads": 6,
            "head_dim": 20,
            "num_hidden_layers": 4,
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention", "full_attention"],
            "num_experts_per_tok": 1,
            "swiglu_alpha": 1.1,
            "swiglu_limit": 0.6,
            "attention_bias": False,
            "tie_word_embeddings": True,
        },
        "odd heads, one expert per token, narrow gates, no biases in attention, tied",
        # Another choice replaces the whole layer.
        limits={"bfloat16": 0.5},
    ),
    ParityCase("Llama4ForCausalLM", _LLAMA4, limits=ROUTED),
    ParityCase(
        "Llama4ForCausalLM",
        {
            **_LLAMA4,
            "num_attention_heads": 6,
            "head_dim": 20,
            "num_experts_per_tok": 2,
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1, 1],
            "attention_chunk_size": 8,
            "attn_scale": 0.4,
            "use_qk_norm": False,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        "odd heads, two experts in every other layer, chunks of 8, biases, tied, Llama 3 rotation",
        limits=ROUTED,
    ),
    ParityCase("Qwen2MoeForCausalLM", _QWEN2_MOE, limits=ROUTED),
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
            "rope_parameters": YARN,
        },
        "odd heads, one dense layer, windows of 7, renormalized, no biases, tied, YaRN",
        limits=ROUTED,
    ),
)
