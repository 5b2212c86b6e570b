"""Class 8: whatever a configuration says, families read it or refuse it, field by field and in one short line."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.bert_config import BertConfig
from hardpoint_models.bloom import read_bloom, read_mpt
from hardpoint_models.deepseek_config import read_deepseek_v2, read_deepseek_v3
from hardpoint_models.falcon import read_falcon
from hardpoint_models.gemma3_config import read_gemma2, read_gemma3
from hardpoint_models.gpt2 import read_gpt2, read_gpt_bigcode
from hardpoint_models.gpt_neox import read_gpt_neox
from hardpoint_models.gpt_oss import read_gpt_oss
from hardpoint_models.granite import read_granite, read_granite_moe
from hardpoint_models.hybrid_config import read_bamba, read_granite_hybrid
from hardpoint_models.jamba import read_jamba
from hardpoint_models.llama4 import read_llama4
from hardpoint_models.mamba_config import read_mamba, read_mamba2
from hardpoint_models.moe import read_mixtral, read_qwen2_moe, read_qwen3_moe
from hardpoint_models.olmo import read_olmo2, read_olmo3
from hardpoint_models.opt import read_opt
from hardpoint_models.phi3 import read_phi3
from hardpoint_models.qwen3_next import read_qwen3_next
from hardpoint_models.smollm3 import read_smollm3
from hardpoint_models.starcoder2 import read_phi, read_starcoder2
from hardpoint_torch_runtime.layers import RopeParameters

Reader = Callable[[Mapping[str, Any], str], Any]
DENSE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "max_position_embeddings": 256,
    "hidden_act": "silu",
    "rms_norm_eps": 1e-5,
    "tie_word_embeddings": False,
    "rope_theta": 1e4,
    "partial_rotary_factor": 0.5,
    "attention_bias": False,
}
LATENT: dict[str, Any] = {
    **DENSE,
    "moe_intermediate_size": 20,
    "q_lora_rank": 24,
    "kv_lora_rank": 16,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 16,
    "n_shared_experts": 2,
    "num_experts_per_tok": 4,
    "n_group": 4,
    "topk_group": 2,
    "first_k_dense_replace": 1,
    "num_nextn_predict_layers": 1,
    "routed_scaling_factor": 2.5,
}
MIXER: dict[str, Any] = {
    **DENSE,
    "mamba_n_heads": 6,
    "mamba_d_head": 16,
    "mamba_expand": 2,
    "mamba_n_groups": 1,
    "mamba_d_state": 8,
    "mamba_d_conv": 4,
    "mamba_conv_bias": True,
    "time_step_limit": [0.01, 0.9],
}
RECURRENT: dict[str, Any] = {
    **{name: DENSE[name] for name in ("hidden_size", "num_hidden_layers", "vocab_size", "tie_word_embeddings")},
    **{"state_size": 8, "conv_kernel": 4, "expand": 2, "use_bias": False, "use_conv_bias": True},
    **{"layer_norm_epsilon": 1e-5, "residual_in_fp32": True},
}
CLASSIC: dict[str, Any] = {
    **{name: DENSE[name] for name in ("hidden_size", "intermediate_size", "num_hidden_layers", "vocab_size")},
    **{name: DENSE[name] for name in ("max_position_embeddings", "rope_theta", "tie_word_embeddings")},
    "num_attention_heads": 4,
    "hidden_act": "gelu",
    "layer_norm_eps": 1e-5,
    "layer_norm_epsilon": 1e-5,
}
GPT2: dict[str, Any] = {
    **{"n_embd": 48, "n_layer": 3, "n_head": 4, "n_inner": 80, "n_positions": 64, "vocab_size": 100},
    **{"activation_function": "gelu_new", "scale_attn_weights": True, "add_cross_attention": False},
}
KINDS = ["sliding_attention", "full_attention", "sliding_attention"]
FACTORS: dict[str, Any] = {
    "attention_multiplier": 0.3,
    "embedding_multiplier": 3.0,
    "residual_multiplier": 0.4,
    "logits_scaling": 5.0,
}
FAMILIES: Mapping[str, tuple[Reader, dict[str, Any]]] = {
    "DeepSeek-V2": (read_deepseek_v2, {**LATENT, "topk_method": "group_limited_greedy"}),
    "DeepSeek-V3": (read_deepseek_v3, {**LATENT, "rope_interleave": True, "norm_topk_prob": True}),
    "Bamba": (read_bamba, {**MIXER, "attn_layer_indices": [1], "mlp_bias": False}),
    "Granite": (
        read_granite_hybrid,
        {
            **MIXER,
            "layer_types": ["mamba", "attention", "mamba"],
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "shared_intermediate_size": 32,
            **FACTORS,
            "position_embedding_type": "rope",
        },
    ),
    "Jamba": (
        read_jamba,
        {
            **{**MIXER, "attn_layer_period": 3, "attn_layer_offset": 1, "expert_layer_period": 2},
            **{"expert_layer_offset": 1, "num_experts": 4, "num_experts_per_tok": 2, "mamba_dt_rank": 3},
        },
    ),
    "Mamba": (read_mamba, {**RECURRENT, "intermediate_size": 96, "time_step_rank": "auto", "hidden_act": "silu"}),
    "Mamba-2": (
        read_mamba2,
        {**RECURRENT, "num_heads": 6, "head_dim": 16, "n_groups": 2, "time_step_limit": [0.01, 0.9]},
    ),
    "Qwen3-Next": (
        read_qwen3_next,
        {
            **DENSE,
            **dict.fromkeys(("head_dim", "linear_key_head_dim", "linear_value_head_dim"), 4),
            **{"linear_num_key_heads": 2, "linear_num_value_heads": 4, "linear_conv_kernel_dim": 4},
            **{"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
            **{"shared_expert_intermediate_size": 24, "decoder_sparse_step": 1, "mlp_only_layers": [1]},
            "layer_types": ["linear_attention", "full_attention", "linear_attention"],
        },
    ),
    "GPT-OSS": (
        read_gpt_oss,
        {
            **DENSE,
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "layer_types": KINDS,
            "sliding_window": 7,
            "swiglu_alpha": 1.7,
            "swiglu_limit": 7.0,
            "rope_parameters": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
            "quantization_config": {"quant_method": "fp8"},
        },
    ),
    "Llama 4": (
        read_llama4,
        {
            **DENSE,
            "intermediate_size_mlp": 80,
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "moe_layers": [1],
            "interleave_moe_layer_step": 2,
            "no_rope_layers": [1, 0, 1],
            "no_rope_layer_interval": 2,
            "attention_chunk_size": 8,
            "layer_types": ["chunked_attention", "full_attention", "chunked_attention"],
            "use_qk_norm": True,
            "attn_temperature_tuning": True,
            "floor_scale": 8,
            "attn_scale": 0.1,
        },
    ),
    "Mixtral": (read_mixtral, {**DENSE, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 7}),
    "Qwen2-MoE": (
        read_qwen2_moe,
        {
            **DENSE,
            "num_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "shared_expert_intermediate_size": 40,
            "use_sliding_window": True,
            "sliding_window": 7,
            "max_window_layers": 2,
            "qkv_bias": True,
        },
    ),
    "Qwen3-MoE": (
        read_qwen3_moe,
        {**DENSE, "num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "mlp_only_layers": [1]},
    ),
    "Gemma 3": (
        read_gemma3,
        {
            **DENSE,
            "layer_types": KINDS,
            "sliding_window": 7,
            "query_pre_attn_scalar": 24,
            "final_logit_softcapping": 6.0,
            "rope_local_base_freq": 200.0,
        },
    ),
    "Gemma 2": (
        read_gemma2,
        {**DENSE, "layer_types": KINDS, "sliding_window": 7, "query_pre_attn_scalar": 24, "attn_logit_softcapping": 6},
    ),
    "Granite 3": (read_granite, {**DENSE, **FACTORS, "mlp_bias": True}),
    "Granite 3 with experts": (
        read_granite_moe,
        {**DENSE, **FACTORS, "num_local_experts": 4, "num_experts_per_tok": 2},
    ),
    "OLMo 2": (read_olmo2, DENSE),
    "OLMo 3": (read_olmo3, {**DENSE, "layer_types": KINDS, "sliding_window": 7, "rope_scaling": {"factor": 2.0}}),
    "Phi-3": (
        read_phi3,
        {
            **DENSE,
            "sliding_window": 7,
            "original_max_position_embeddings": 64,
            "rope_scaling": {"type": "su", "short_factor": [1.0] * 3, "long_factor": [2.0] * 3},
        },
    ),
    "SmolLM3": (
        read_smollm3,
        {
            **DENSE,
            "no_rope_layers": [1, 0, 1],
            "no_rope_layer_interval": 2,
            "use_sliding_window": True,
            "sliding_window": 7,
            "layer_types": KINDS,
        },
    ),
    "BLOOM": (
        read_bloom,
        {"n_layer": 3, "n_head": 4, "apply_residual_connection_post_layernorm": False, "hidden_size": 48, **CLASSIC},
    ),
    "Falcon": (
        read_falcon,
        {
            **CLASSIC,
            "new_decoder_architecture": True,
            "num_kv_heads": 2,
            "num_ln_in_parallel_attn": 2,
            "parallel_attn": True,
            "multi_query": True,
            "ffn_hidden_size": 80,
            "activation": "gelu",
            "bias": False,
        },
    ),
    "Falcon with slopes": (read_falcon, {**CLASSIC, "alibi": True, "multi_query": False, "n_head": 4}),
    "GPT-2": (read_gpt2, {**GPT2, "scale_attn_by_inverse_layer_idx": True}),
    "GPT-BigCode": (read_gpt_bigcode, {**GPT2, "multi_query": True}),
    "GPT-NeoX": (
        read_gpt_neox,
        {**CLASSIC, "rotary_pct": 0.5, "rotary_emb_base": 1e4, "use_parallel_residual": True, "attention_bias": True},
    ),
    "MPT": (
        read_mpt,
        {
            **{"d_model": 48, "n_layers": 3, "n_heads": 4, "vocab_size": 100, "no_bias": True, "logit_scale": None},
            "attn_config": {"clip_qkv": 6.0, "softmax_scale": 0.3, "alibi_bias_max": 8},
        },
    ),
    "OPT": (
        read_opt,
        {
            **CLASSIC,
            "ffn_dim": 80,
            "word_embed_proj_dim": 28,
            "do_layer_norm_before": True,
            "_remove_final_layer_norm": False,
            "enable_bias": True,
            "activation_function": "relu",
        },
    ),
    "Phi": (read_phi, {**CLASSIC, "num_key_value_heads": 2, "partial_rotary_factor": 0.5, "qk_layernorm": False}),
    "StarCoder2": (
        read_starcoder2,
        {
            **CLASSIC,
            "num_key_value_heads": 2,
            "head_dim": 16,
            "sliding_window": 7,
            "use_bias": True,
            "norm_epsilon": 1e-5,
        },
    ),
    "BERT": (
        BertConfig.read,
        {
            **{name: DENSE[name] for name in ("hidden_size", "intermediate_size", "num_attention_heads")},
            **{name: DENSE[name] for name in ("num_hidden_layers", "vocab_size", "max_position_embeddings")},
            "hidden_act": "gelu",
            "type_vocab_size": 2,
            "layer_norm_eps": 1e-12,
            "sentence_embedding": {"pooling_method": "mean", "normalizes": True},
        },
    ),
}
ENDLESS = 10**400
"""As large as JSON allows, and more than a float holds."""
VALUES: tuple[Any, ...] = (
    *(None, -1, 0, 7, 2**31, 2**63, ENDLESS, -1.5, 0.5, 1e300, float("nan"), float("inf")),
    *(True, "x", "", [], [1], [None], [-5], [[1]], KINDS * 50, {}, {"a": 1}, {"rope_type": []}),
)
ROPE: dict[str, Any] = {
    "rope_theta": 1e4,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "short_factor": [1.0] * 4,
    "long_factor": [2.0] * 4,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
    "attention_factor": 1.0,
    "mrope_section": [2, 1, 1],
    "mrope_interleaved": True,
    "truncate": True,
    "partial_rotary_factor": 0.5,
}


def changed(base: Mapping[str, Any]) -> Iterator[dict[str, Any]]:
    for name in base:
        yield {key: value for key, value in base.items() if key != name}
        yield from ({**base, name: value} for value in VALUES)


def refusal(read: Reader, config: dict[str, Any]) -> str:
    """What is said against the configuration; nothing where it is read."""
    try:
        read(config, "TestForCausalLM")
    except (ModelFormatError, UnsupportedModelError) as error:
        return str(error)
    return ""


def require_read_or_refused(read: Reader, config: dict[str, Any]) -> None:
    said = refusal(read, config)
    assert len(said) < 500
    assert "\n" not in said


@pytest.mark.parametrize("family", FAMILIES)
def test_every_field_is_read_or_refused(family: str) -> None:
    read, base = FAMILIES[family]
    read(base, "TestForCausalLM")
    for config in changed(base):
        require_read_or_refused(read, config)


@pytest.mark.parametrize("rope_type", ["default", "linear", "dynamic", "llama3", "yarn", "longrope", "mrope"])
def test_every_rotary_setting_is_read_or_refused(rope_type: str) -> None:
    for settings in changed({**ROPE, "rope_type": rope_type}):
        require_read_or_refused(lambda config, _: RopeParameters.from_config(config), {"rope_parameters": settings})
        require_read_or_refused(read_deepseek_v3, {**LATENT, "rope_parameters": settings})


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("DeepSeek-V3", {"num_nextn_predict_layers": 10**9}, "'num_nextn_predict_layers' is 1000000000; .* at most"),
        ("DeepSeek-V3", {"first_k_dense_replace": False}, "'first_k_dense_replace' is False"),
        ("DeepSeek-V3", {"num_hidden_layers": 10**9}, "'num_hidden_layers' is 1000000000; .* at most"),
        ("DeepSeek-V3", {"rms_norm_eps": -1e-6}, "'rms_norm_eps' is -1e-06; it must not be below 0"),
        ("BERT", {"layer_norm_eps": -1}, "'layer_norm_eps' is -1.0; it must not be below 0"),
        ("BERT", {"sentence_embedding": "mean"}, "'sentence_embedding' is 'mean'; an object is needed"),
        ("BERT", {"sentence_embedding": {"pooling_method": "cls", "other_modules": 5}}, "lists 5 behind the encoder"),
        ("Bamba", {"attn_layer_indices": 0}, "'attn_layer_indices' is 0; a list of layer numbers"),
        ("Bamba", {"attn_layer_indices": False}, "'attn_layer_indices' is False; a list of layer numbers"),
        ("Gemma 3", {"query_pre_attn_scalar": 0}, "'query_pre_attn_scalar' is 0.0; it must be above 0"),
        ("Qwen3-MoE", {"head_dim": 2**31}, "'head_dim' is 2147483648; .* at most 2147483647"),
        ("GPT-NeoX", {"rotary_pct": 1.5}, r"partial_rotary_factor: 1.5 is not in \(0, 1\]"),
        ("MPT", {"attn_config": {"softmax_scale": 0}}, "attn_config: config field 'softmax_scale' is 0.0; it must be"),
        ("Falcon", {"num_ln_in_parallel_attn": True}, "'num_ln_in_parallel_attn' is True"),
        ("Mixtral", {"rope_scaling": {"rope_type": ["yarn"]}}, r"rope_type \['yarn'\] .* is not supported"),
        ("Mixtral", {"rope_scaling": {"rope_type": "yarn", "factor": 2, "truncate": "no"}}, "'truncate' .* is 'no'"),
        ("Mixtral", {"rope_scaling": {"mrope_section": [1.5, 1, 1]}}, r"'mrope_section' .* is \[1.5, 1, 1\]; whole"),
        (
            "DeepSeek-V3",
            {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "mscale_all_dim": 1e300}},
            r"mscale_all_dim=1e\+300 makes scores infinite",
        ),
    ],
)
def test_what_must_not_pass(family: str, changes: dict[str, Any], message: str) -> None:
    read, base = FAMILIES[family]
    with pytest.raises(HardpointError, match=message):
        read({**base, **changes}, "TestForCausalLM")
