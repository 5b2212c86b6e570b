"""Cases of models with recurrent layers beyond Mamba-2 hybrids; see ``model_cases``."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import ROUTED
from hardpoint_testing_torch import ParityCase

__all__ = [
    "AWKWARD_JAMBA",
    "AWKWARD_MAMBA",
    "AWKWARD_MAMBA2",
    "AWKWARD_QWEN3_NEXT",
    "JAMBA",
    "JAMBA_CASES",
    "MAMBA",
    "MAMBA2",
    "MAMBA2_CASES",
    "MAMBA_CASES",
    "QWEN3_NEXT",
    "QWEN3_NEXT_CASES",
]

_KEEPS_STATES: Mapping[str, Any] = {"prefix": {"worker": {"torch": {"recurrent_states": "align"}}}}
"""Without states kept at the ends of blocks no prefix can be found again."""
_ATTENDS_NOT: Mapping[str, Any] = {
    "num_attention_heads": None,
    "num_key_value_heads": None,
    "max_position_embeddings": None,
    "head_dim": None,
}
"""As in real configurations, which have none of these fields."""
MAMBA: Mapping[str, Any] = {**_ATTENDS_NOT, "intermediate_size": 96, "state_size": 8}
AWKWARD_MAMBA: Mapping[str, Any] = {
    **MAMBA,
    "intermediate_size": 84,
    "state_size": 5,
    "conv_kernel": 3,
    "time_step_rank": 7,
    "use_bias": True,
    "use_conv_bias": False,
    "tie_word_embeddings": False,
    "layer_norm_epsilon": 1e-3,
}
MAMBA2: Mapping[str, Any] = {
    **{**_ATTENDS_NOT, "head_dim": 16},
    "num_heads": 6,
    "n_groups": 1,
    "state_size": 8,
    "chunk_size": 16,
}
AWKWARD_MAMBA2: Mapping[str, Any] = {
    **MAMBA2,
    "num_heads": 12,
    "head_dim": 4,
    "expand": 1,
    "n_groups": 2,
    "state_size": 5,
    "conv_kernel": 3,
    "use_bias": True,
    "use_conv_bias": False,
    "tie_word_embeddings": True,
    "time_step_limit": (0.01, 0.9),
}
JAMBA: Mapping[str, Any] = {
    "attn_layer_period": 3,
    "attn_layer_offset": 1,
    "expert_layer_period": 2,
    "expert_layer_offset": 0,
    "num_experts": 4,
    "mamba_d_state": 8,
}
AWKWARD_JAMBA: Mapping[str, Any] = {
    **JAMBA,
    "attn_layer_offset": 0,
    "expert_layer_period": 3,
    "num_attention_heads": 6,
    "head_dim": 20,
    "num_experts": 5,
    "num_experts_per_tok": 3,
    "mamba_d_state": 5,
    "mamba_d_conv": 3,
    "mamba_dt_rank": 7,
    "mamba_expand": 1,
    "mamba_proj_bias": True,
    "mamba_conv_bias": False,
    "tie_word_embeddings": True,
}
QWEN3_NEXT: Mapping[str, Any] = {
    # Where random queries and keys are nearly orthogonal a head yields next to nothing, and its norm blows up what
    # rounding left of it. With 1e-6 here, changing weights by half of their last bit moves the logits of transformers
    # by 2e-4.
    "rms_norm_eps": 1e-2,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 12,
    "linear_value_head_dim": 8,
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 24,
}
AWKWARD_QWEN3_NEXT: Mapping[str, Any] = {
    **QWEN3_NEXT,
    # Two recurrent layers in a row magnify more: with 1e-2, rounding to float32 what any one linear layer below them
    # yields moves single logits by up to 4e-5, whoever computes them.
    "rms_norm_eps": 4e-2,
    "layer_types": ["full_attention", "linear_attention", "linear_attention"],
    "num_attention_heads": 6,
    "head_dim": 20,
    "linear_num_value_heads": 6,
    "linear_key_head_dim": 7,
    "linear_value_head_dim": 10,
    "linear_conv_kernel_dim": 3,
    "mlp_only_layers": [1],
    "norm_topk_prob": False,
    "attention_bias": True,
    "tie_word_embeddings": True,
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 64,
        "partial_rotary_factor": 0.4,
    },
}

JAMBA_CASES: tuple[ParityCase, ...] = (
    ParityCase("JambaForCausalLM", JAMBA, plugins=_KEEPS_STATES, limits=ROUTED),
    ParityCase(
        "JambaForCausalLM",
        AWKWARD_JAMBA,
        "odd heads, states and rank of steps, three of five experts, biases, tied",
        plugins=_KEEPS_STATES,
        limits=ROUTED,
    ),
)
MAMBA2_CASES: tuple[ParityCase, ...] = (
    ParityCase("Mamba2ForCausalLM", MAMBA2, plugins=_KEEPS_STATES),
    ParityCase(
        "Mamba2ForCausalLM",
        AWKWARD_MAMBA2,
        "not expanded, groups, odd states, biases, tied, limited time steps",
        plugins=_KEEPS_STATES,
    ),
)
MAMBA_CASES: tuple[ParityCase, ...] = (
    # transformers computing in bfloat16 itself is twice as far off.
    ParityCase("MambaForCausalLM", MAMBA, plugins=_KEEPS_STATES, limits={"bfloat16": 0.1}),
    ParityCase(
        "MambaForCausalLM",
        AWKWARD_MAMBA,
        "odd inner size, states and rank of steps, biases, untied",
        plugins=_KEEPS_STATES,
        limits={"bfloat16": 0.05},
    ),
)
# transformers sums the decays of a chunk in float32 and takes differences of the sums, which leaves its logits off by
# up to 2e-4 of its own in float64. Summed in float64, and all else as it is, they are within 2e-5.
QWEN3_NEXT_CASES: tuple[ParityCase, ...] = (
    ParityCase("Qwen3NextForCausalLM", QWEN3_NEXT, plugins=_KEEPS_STATES, limits=ROUTED, double_oracle=True),
    ParityCase(
        "Qwen3NextForCausalLM",
        AWKWARD_QWEN3_NEXT,
        "odd heads, three values per key, one dense layer, biases, tied, YaRN",
        plugins=_KEEPS_STATES,
        limits=ROUTED,
        double_oracle=True,
    ),
)
