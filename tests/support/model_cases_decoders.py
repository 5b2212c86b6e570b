"""Cases of decoders whose layers differ from Llama's in norms, factors, windows or rotation."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import LLAMA3, NO_IDS, ODD_HEADS, ROUTED, YARN
from hardpoint_testing_torch import ParityCase

__all__ = ["DECODER_CASES"]

_GEMMA2: Mapping[str, Any] = {"sliding_window": 7, "head_dim": 16, "query_pre_attn_scalar": 24}
_SHARP: Mapping[str, float] = {"bfloat16": 0.06}
"""Transformers computing in bfloat16 itself is off by 0.045 to 0.056: scaled embeddings make attention sharp."""
_GRANITE: Mapping[str, Any] = {
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}
_OLMO3: Mapping[str, Any] = {
    **NO_IDS,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
}

DECODER_CASES: tuple[ParityCase, ...] = (
    ParityCase("Gemma2ForCausalLM", _GEMMA2, limits=_SHARP),
    ParityCase(
        "Gemma2ForCausalLM",
        {
            **_GEMMA2,
            **ODD_HEADS,
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
            **ODD_HEADS,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        "odd heads, Llama 3 rotation, tied, biases",
    ),
    ParityCase("GraniteMoeForCausalLM", {**_GRANITE, "num_local_experts": 6}, limits=ROUTED),
    ParityCase(
        "GraniteMoeForCausalLM",
        {
            **_GRANITE,
            **ODD_HEADS,
            "num_local_experts": 5,
            "num_experts_per_tok": 3,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
        "odd heads, three of five experts, YaRN, tied, biases",
        limits=ROUTED,
    ),
    ParityCase("Olmo2ForCausalLM", NO_IDS),
    ParityCase(
        "Olmo2ForCausalLM",
        {
            **NO_IDS,
            **ODD_HEADS,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": LLAMA3,
        },
        "odd heads, one KV head, Llama 3 rotation, tied, biases",
    ),
    ParityCase("Olmo3ForCausalLM", _OLMO3),
    ParityCase(
        "Olmo3ForCausalLM",
        {
            **_OLMO3,
            **ODD_HEADS,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "rope_parameters": {
                "full_attention": YARN,
                "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
            },
        },
        "odd heads, full layers with YaRN, tied, biases",
    ),
    ParityCase("Phi3ForCausalLM", NO_IDS),
    ParityCase(
        "Phi3ForCausalLM",
        {
            **NO_IDS,
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
    ParityCase("Phi3ForCausalLM", {**NO_IDS, **ODD_HEADS, "sliding_window": 7}, "odd heads, windows of 7"),
    ParityCase("SmolLM3ForCausalLM", {**NO_IDS, "num_hidden_layers": 4}),
    ParityCase(
        "SmolLM3ForCausalLM",
        {
            **NO_IDS,
            **ODD_HEADS,
            "no_rope_layers": [1, 0, 1],
            "use_sliding_window": True,
            "sliding_window": 7,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": False,
            "rope_parameters": YARN,
        },
        "odd heads, windows where nothing rotates, YaRN, untied, biases",
    ),
)
