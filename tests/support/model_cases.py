"""The configurations in which each architecture is compared with ``transformers``: a plain and an awkward one.

A new architecture takes one entry here; then ``python tests/support/generate_models_table.py --write``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import LLAMA3, ODD_HEADS, ROUTED, YARN
from hardpoint_testing_torch import ParityCase
from model_cases_classic import CLASSIC_CASES
from model_cases_decoders import DECODER_CASES
from model_cases_encdec import ENCODER_DECODER_CASES
from model_cases_moe import MOE_CASES
from model_cases_pooling import POOLING_CASES
from model_cases_recurrent import JAMBA_CASES, MAMBA2_CASES, MAMBA_CASES, QWEN3_NEXT_CASES
from model_cases_tiles import TILE_CASES
from model_cases_vision import VISION_CASES

__all__ = ["BAMBA", "CASES", "GRANITE"]

_GEMMA3: Mapping[str, Any] = {
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
}
_TWO_ROTATIONS: Mapping[str, Any] = {
    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
}
_QWEN3_MOE: Mapping[str, Any] = {
    "num_experts": 6,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 32,
    "head_dim": 16,
}
_DEEPSEEK: Mapping[str, Any] = {
    "num_key_value_heads": 4,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "n_shared_experts": 2,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
_MIXER: Mapping[str, Any] = {"mamba_n_heads": 6, "mamba_d_state": 8, "num_hidden_layers": 3}
BAMBA: Mapping[str, Any] = {**_MIXER, "attn_layer_indices": [1]}
GRANITE: Mapping[str, Any] = {
    **_MIXER,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_local_experts": 4,
    "shared_intermediate_size": 32,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "attention_multiplier": 0.3,
    "logits_scaling": 5.0,
}
_KEEPS_STATES: Mapping[str, Any] = {"prefix": {"worker": {"torch": {"recurrent_states": "align"}}}}
"""Without states kept at the ends of blocks no prefix can be found again."""

_LISTED: tuple[ParityCase, ...] = (
    *DECODER_CASES,
    ParityCase("BambaForCausalLM", BAMBA, plugins=_KEEPS_STATES),
    ParityCase(
        "BambaForCausalLM",
        {
            **BAMBA,
            "attn_layer_indices": [0, 2],
            "mamba_n_heads": 12,
            "mamba_n_groups": 2,
            "mamba_d_state": 5,
            "mamba_d_conv": 3,
            "mamba_proj_bias": True,
            "mamba_conv_bias": False,
            "attention_bias": True,
            "mlp_bias": True,
            "tie_word_embeddings": True,
            "time_step_limit": (0.01, 0.9),
        },
        "odd states, groups, biases, tied, limited time steps",
        plugins=_KEEPS_STATES,
    ),
    ParityCase(
        "BertForMaskedLM",
        {
            "hidden_size": 36,
            "num_attention_heads": 12,
            "intermediate_size": 42,
            "vocab_size": 97,
            "type_vocab_size": 3,
            "hidden_act": "relu",
        },
        "odd sizes",
    ),
    ParityCase("BertModel"),
    ParityCase(
        "DeepseekV2ForCausalLM",
        {**_DEEPSEEK, "topk_method": "greedy", "n_group": None, "topk_group": None},
        limits=ROUTED,
    ),
    ParityCase(
        "DeepseekV3ForCausalLM",
        {**_DEEPSEEK, "n_group": 4, "topk_group": 2},
        # Whole groups of experts are at stake; transformers computing in bfloat16 itself is as far off.
        limits={"bfloat16": 0.4},
    ),
    ParityCase(
        "DeepseekV3ForCausalLM",
        {
            **_DEEPSEEK,
            "q_lora_rank": None,
            "num_attention_heads": 6,
            "num_key_value_heads": 6,
            "kv_lora_rank": 18,
            "qk_nope_head_dim": 12,
            "qk_rope_head_dim": 6,
            "v_head_dim": 20,
            "n_group": 4,
            "topk_group": 2,
            "attention_bias": True,
            "tie_word_embeddings": True,
            "norm_topk_prob": False,
            "rope_parameters": {**YARN, "mscale": 0.707, "mscale_all_dim": 0.9},
        },
        "odd sizes, queries whole, biases, tied, YaRN",
        limits={"bfloat16": 0.4},
    ),
    ParityCase("Gemma3ForCausalLM", _GEMMA3),
    ParityCase(
        "Gemma3ForCausalLM",
        {
            **_GEMMA3,
            "layer_types": None,
            "num_hidden_layers": 7,
            "num_key_value_heads": 1,
            "final_logit_softcapping": 6.0,
            "rope_parameters": _TWO_ROTATIONS,
        },
        "one full layer in six, one KV head, capped logits, two rotations",
        limits={"bfloat16": 0.1},
    ),
    ParityCase("GraniteMoeHybridForCausalLM", GRANITE, plugins=_KEEPS_STATES, limits=ROUTED),
    ParityCase(
        "GraniteMoeHybridForCausalLM",
        {
            **GRANITE,
            "num_local_experts": 0,
            "position_embedding_type": "rope",
            "mamba_n_groups": 2,
            "mamba_expand": 1,
            "num_key_value_heads": 1,
            "attention_bias": True,
            "tie_word_embeddings": True,
        },
        "no experts, rotation, groups, one KV head, biases, tied",
        plugins=_KEEPS_STATES,
    ),
    *JAMBA_CASES,
    ParityCase("LlamaForCausalLM"),
    ParityCase(
        "LlamaForCausalLM",
        {**ODD_HEADS, "rope_parameters": LLAMA3, "tie_word_embeddings": True, "attention_bias": True, "mlp_bias": True},
        "odd heads, Llama 3 rotation, tied, biases",
    ),
    *MAMBA2_CASES,
    *MAMBA_CASES,
    ParityCase("MistralForCausalLM", {"sliding_window": None, "head_dim": 32}),
    ParityCase("MistralForCausalLM", {"sliding_window": 7, "num_key_value_heads": 1}, "windows of 7, one KV head"),
    ParityCase("MixtralForCausalLM", {"num_local_experts": 4}, limits=ROUTED),
    ParityCase(
        "MixtralForCausalLM",
        {"num_local_experts": 5, "num_experts_per_tok": 1, "sliding_window": 7, "head_dim": 32},
        "one expert per token, windows of 7",
        # Another choice replaces the whole layer.
        limits={"bfloat16": 0.5},
    ),
    ParityCase("Qwen2ForCausalLM"),
    ParityCase(
        "Qwen2ForCausalLM",
        {
            "use_sliding_window": True,
            "sliding_window": 9,
            "max_window_layers": 1,
            "tie_word_embeddings": True,
            "rope_parameters": YARN,
        },
        "upper layers with windows, tied, YaRN",
    ),
    ParityCase("Qwen3ForCausalLM", {"head_dim": 16}),
    ParityCase("Qwen3ForCausalLM", {**ODD_HEADS, "attention_bias": True}, "odd heads, biases", block_size=16),
    ParityCase("Qwen3MoeForCausalLM", _QWEN3_MOE, limits=ROUTED),
    ParityCase(
        "Qwen3MoeForCausalLM",
        {**_QWEN3_MOE, "mlp_only_layers": [1], "norm_topk_prob": True, "tie_word_embeddings": True},
        "one dense layer, renormalized, tied",
        limits=ROUTED,
    ),
    *ENCODER_DECODER_CASES,
    *CLASSIC_CASES,
    *MOE_CASES,
    *POOLING_CASES,
    *QWEN3_NEXT_CASES,
    *TILE_CASES,
    *VISION_CASES,
)

CASES = tuple(sorted(_LISTED, key=lambda case: case.architecture))
"""In the order of the table; the configurations of an architecture stay as they are listed."""
