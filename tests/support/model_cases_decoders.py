"""Cases of decoders whose layers differ from Llama's in norms, factors, windows or rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_testing_torch import ParityCase

__all__ = ["DECODER_CASES"]

_LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
_YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
_ODD: Mapping[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}
_NO_IDS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""The usual ones are beyond a tiny vocabulary."""
_GEMMA2: Mapping[str, Any] = {"sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 24}
_SHARP: Mapping[str, float] = {"bfloat16": 0.06}
"""Transformers computing in bfloat16 itself is off by 0.045 to 0.056: scaled embeddings make attention sharp."""
_GRANITE: Mapping[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}
_ROUTED: Mapping[str, float] = {"bfloat16": 0.25}
"""Rounding may choose another expert, which changes all that follows."""
_OLMO3: Mapping[str, Any] = {
    **_NO_IDS,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

DECODER_CASES: tuple[ParityCase, ...] = (
    ParityCase("Gemma2ForCausalLM", _GEMMA2, limits=_SHARP),
    ParityCase(
        "Gemma2ForCausalLM",
        {
            **_GEMMA2,
            **_ODD,
            "attn_logit_softcapping": 3.0,
            "final_logit_softcapping": 6.0,
            "attention_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
        },
        "odd heads, low caps, biases, untied, linear rotation",
    ),
    ParityCase("GraniteForCausalLM", _GRANITE),
    ParityCase(
        "GraniteForCausalLM",
        {
            **_GRANITE,
            **_ODD,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3,
        },
        "odd heads, Llama 3 rotation, tied, biases",
    ),
    ParityCase("GraniteMoeForCausalLM", {**_GRANITE, "num_local_experts": 6}, limits=_ROUTED),
    ParityCase(
        "GraniteMoeForCausalLM",
        {
            **_GRANITE,
            **_ODD,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _YARN,
        },
        "odd heads, three of five experts, YaRN, tied, biases",
        limits=_ROUTED,
    ),
    ParityCase("Olmo2ForCausalLM", _NO_IDS),
    ParityCase(
        "Olmo2ForCausalLM",
        {
            **_NO_IDS,
            **_ODD,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": _LLAMA3,
        },
        "odd heads, one KV head, Llama 3 rotation, tied, biases",
    ),
    ParityCase("Olmo3ForCausalLM", _OLMO3),
    ParityCase(
        "Olmo3ForCausalLM",
        {
            **_OLMO3,
            **_ODD,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": _YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
        "odd heads, full layers with YaRN, tied, biases",
    ),
    ParityCase("Phi3ForCausalLM", _NO_IDS),
    ParityCase(
        "Phi3ForCausalLM",
        {
            **_NO_IDS,
            "num_attention_heads": 6,
            "num_key_value_heads": 1,
            "tie_word_embeddings": True,
            "original_max_position_embeddings": 200,
            "rope_parameters": {
                "rope_type": "longrope",
                "rope_theta": 10000.0,
                "partial_rotary_factor": 0.75,
                "short_factor": [1.0, 1.7, 2.9],
                "long_factor": [2.0, 5.0, 11.0],
            },
        },
        "three quarters of a head rotate, LongRoPE, one KV head, tied",
    ),
    ParityCase("Phi3ForCausalLM", {**_NO_IDS, **_ODD, "sliding_window": 7}, "odd heads, windows of 7"),
    ParityCase("SmolLM3ForCausalLM", {**_NO_IDS, "num_hidden_layers": 4}),
    ParityCase(
        "SmolLM3ForCausalLM",
        {
            **_NO_IDS,
            **_ODD,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": _YARN,
        },
        "odd heads, windows where nothing rotates, YaRN, untied, biases",
    ),
)
