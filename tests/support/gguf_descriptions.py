"""What converters say of models in the metadata of GGUF files, from the fields of their configurations."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gguf_writing import Config, Tensors, size_of


def sizes(config: Config) -> dict[str, Any]:
    return {
        "embedding_length": size_of(config, "hidden_size", "n_embd", "d_model"),
        "block_count": size_of(config, "num_hidden_layers", "n_layer", "n_layers"),
        "context_length": size_of(config, "max_position_embeddings", "n_positions", "max_seq_len", "seq_length")
        if any(name in config for name in ("max_position_embeddings", "n_positions", "max_seq_len", "seq_length"))
        else 256,
    }


def heads(config: Config) -> dict[str, Any]:
    return {"attention.head_count": size_of(config, "num_attention_heads", "n_head", "n_heads")}


def decoder(config: Config) -> dict[str, Any]:
    rope = config.get("rope_parameters") or {}
    return {
        **sizes(config),
        **heads(config),
        "feed_forward_length": config["intermediate_size"],
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "attention.layer_norm_rms_epsilon": config.get("rms_norm_eps", 1e-5),
        **({"rope.freq_base": rope["rope_theta"]} if "rope_theta" in rope else {}),
        **({"attention.key_length": config["head_dim"]} if config.get("head_dim") else {}),
        **yarn(rope),
    }


def yarn(rope: Config) -> dict[str, Any]:
    if rope.get("rope_type") != "yarn":
        return {}
    keys = {"factor": "factor", "original_max_position_embeddings": "original_context_length",
            "beta_fast": "yarn_beta_fast", "beta_slow": "yarn_beta_slow"}  # fmt: skip
    stated = {f"rope.scaling.{key}": rope[name] for name, key in keys.items() if rope.get(name) is not None}
    return {"rope.scaling.type": "yarn", **stated}


def classic(config: Config) -> dict[str, Any]:
    hidden = size_of(config, "hidden_size", "n_embd", "d_model")
    own = ("intermediate_size",) if config["model_type"] in ("gpt_neox", "phi", "starcoder2") else ()
    inner = next((config[name] for name in (*own, "n_inner", "ffn_hidden_size") if config.get(name)), 0)
    epsilon = size_of(config, "layer_norm_epsilon", "layer_norm_eps", "norm_epsilon")
    return {
        **sizes(config),
        **heads(config),
        "feed_forward_length": inner or 4 * hidden,
        "attention.layer_norm_epsilon": epsilon,
    }


def rotated_classic(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    rope = config["rope_parameters"]
    return {
        **classic(config),
        "attention.head_count_kv": config.get("num_key_value_heads", config["num_attention_heads"]),
        "rope.freq_base": rope["rope_theta"],
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * size),
    }


def granite(config: Config) -> dict[str, Any]:
    return {
        **decoder(config),
        "attention.scale": config["attention_multiplier"],
        "embedding_scale": config["embedding_multiplier"],
        "residual_scale": config["residual_multiplier"],
        "logit_scale": config["logits_scaling"],
        "rope.scaling.finetuned": True,
    }


def gemma2(config: Config) -> dict[str, Any]:
    names = ("attn_logit_softcapping", "final_logit_softcapping")
    stated = {**decoder(config), **{name: config[name] for name in names}}
    return {**stated, "attention.sliding_window": config["sliding_window"]}


def olmo3(config: Config) -> dict[str, Any]:
    windowed = [kind == "sliding_attention" for kind in config["layer_types"]]
    return {
        **decoder(
            {**config, "rope_parameters": config["rope_parameters"].get("full_attention", config["rope_parameters"])}
        ),
        "attention.sliding_window": config["sliding_window"],
        "attention.sliding_window_pattern": windowed,
    }


def phi3(config: Config) -> dict[str, Any]:
    rope, size = config["rope_parameters"], config["hidden_size"] // config["num_attention_heads"]
    stated = {
        **decoder(config),
        "rope.dimension_count": int(rope.get("partial_rotary_factor", 1.0) * size),
        "rope.scaling.original_context_length": config["original_max_position_embeddings"],
        "attention.sliding_window": config.get("sliding_window") or 0,
    }
    if rope["rope_type"] == "longrope":
        scale = config["max_position_embeddings"] / config["original_max_position_embeddings"]
        spread = max(math.log(scale), 0.0) / math.log(config["original_max_position_embeddings"])
        stated |= {"rope.scaling.attn_factor": math.sqrt(1 + spread)}
    return stated


def long_factors(config: Config) -> Tensors:
    rope = config["rope_parameters"]
    return {f"rope_factors_{kind}.weight": np.array(rope[f"{kind}_factor"], np.float32) for kind in ("long", "short")}


def falcon(config: Config) -> dict[str, Any]:
    is_new = config["new_decoder_architecture"]
    return {
        **classic(config),
        "tensor_data_layout": "jploski",
        "attention.head_count_kv": config["num_kv_heads"] if is_new else 1,
    }


def falcon_groups(config: Config) -> int:
    return int(config["num_kv_heads"]) if config["new_decoder_architecture"] else 1


def all_heads(config: Config) -> int:
    return int(size_of(config, "num_attention_heads", "n_head"))


def neox(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"]["partial_rotary_factor"]
    return {
        **classic(config),
        "rope.dimension_count": int(share * size),
        "use_parallel_residual": config["use_parallel_residual"],
    }


def mpt(config: Config) -> dict[str, Any]:
    attention = config["attn_config"]
    clip = attention.get("clip_qkv")
    return {
        **classic({**config, "layer_norm_epsilon": 1e-5}),
        "attention.max_alibi_bias": float(attention["alibi_bias_max"]),
        **({"attention.clamp_kqv": float(clip)} if clip else {}),
    }


def experts(config: Config) -> dict[str, Any]:
    stated = {
        **decoder(config),
        "expert_count": size_of(config, "num_local_experts", "num_experts", "n_routed_experts"),
        "expert_used_count": config["num_experts_per_tok"],
    }
    if config.get("moe_intermediate_size"):
        stated["expert_feed_forward_length"] = config["moe_intermediate_size"]
    if config.get("shared_expert_intermediate_size"):
        stated["expert_shared_feed_forward_length"] = config["shared_expert_intermediate_size"]
    return stated


def granite_moe(config: Config) -> dict[str, Any]:
    return {**granite(config), **experts(config)}


def gpt_oss(config: Config) -> dict[str, Any]:
    return {
        **experts(config),
        "attention.sliding_window": config["sliding_window"],
        "expert_feed_forward_length": config["intermediate_size"],
    }


def sinks(tensors: Tensors, config: Config) -> Tensors:
    del config
    return {f"{name}.weight" if name.endswith("sinks") else name: array for name, array in tensors.items()}


def selective(config: Config) -> dict[str, Any]:
    return {
        **sizes(config),
        "context_length": 1 << 20,
        "feed_forward_length": 0,
        "attention.head_count": 0,
        "attention.layer_norm_rms_epsilon": config["layer_norm_epsilon"],
        "ssm.conv_kernel": config["conv_kernel"],
        "ssm.inner_size": config["intermediate_size"],
        "ssm.state_size": config["state_size"],
        "ssm.time_step_rank": config["time_step_rank"],
        "ssm.dt_b_c_rms": False,
    }


def mamba2(config: Config) -> dict[str, Any]:
    inner = config["expand"] * config["hidden_size"]
    stated = selective({**config, "intermediate_size": inner, "time_step_rank": config["num_heads"]})
    return {**stated, "ssm.group_count": config["n_groups"]}


def mixer(config: Config) -> dict[str, Any]:
    return {
        "ssm.conv_kernel": config["mamba_d_conv"],
        "ssm.inner_size": config["mamba_expand"] * config["hidden_size"],
        "ssm.state_size": config["mamba_d_state"],
    }


def headed_mixer(config: Config, attending: list[int]) -> dict[str, Any]:
    counts = [config["num_key_value_heads"] * (layer in attending) for layer in range(config["num_hidden_layers"])]
    return {
        **mixer(config),
        "ssm.group_count": config["mamba_n_groups"],
        "ssm.time_step_rank": config["mamba_n_heads"],
        "attention.head_count_kv": counts,
    }


def jamba(config: Config) -> dict[str, Any]:
    period, offset = config["attn_layer_period"], config["attn_layer_offset"]
    layers = range(config["num_hidden_layers"])
    return {
        **experts(config),
        **mixer(config),
        "ssm.time_step_rank": config["mamba_dt_rank"],
        "attention.head_count_kv": [config["num_key_value_heads"] * (layer % period == offset) for layer in layers],
    }


def bamba(config: Config) -> dict[str, Any]:
    size = config["hidden_size"] // config["num_attention_heads"]
    share = config["rope_parameters"].get("partial_rotary_factor", 1.0)
    return {
        **decoder(config),
        **headed_mixer(config, config["attn_layer_indices"]),
        "rope.dimension_count": int(share * size),
        "rope.scaling.finetuned": True,
    }


def granite_hybrid(config: Config) -> dict[str, Any]:
    attending = [layer for layer, kind in enumerate(config["layer_types"]) if kind in ("full_attention", "attention")]
    stated = {**granite(config), **(experts(config) if config["num_local_experts"] else {})}
    return {
        **stated,
        **headed_mixer(config, attending),
        "context_length": 1 << 20,
        "rope.scaling.finetuned": False,
        "expert_shared_feed_forward_length": config["shared_intermediate_size"],
    }


def qwen3_next(config: Config) -> dict[str, Any]:
    return {
        **experts(config),
        "ssm.conv_kernel": config["linear_conv_kernel_dim"],
        "ssm.state_size": config["linear_key_head_dim"],
        "ssm.group_count": config["linear_num_key_heads"],
        "ssm.time_step_rank": config["linear_num_value_heads"],
        "ssm.inner_size": config["linear_value_head_dim"] * config["linear_num_value_heads"],
        "rope.dimension_count": int(config["rope_parameters"]["partial_rotary_factor"] * config["head_dim"]),
    }


def deepseek(config: Config) -> dict[str, Any]:
    rope, latent = config["rope_parameters"], config["kv_lora_rank"]
    is_v3 = config["model_type"] == "deepseek_v3"
    scale = rope.get("mscale_all_dim")
    return {
        **experts({**config, "num_key_value_heads": 1, "head_dim": None}),
        "leading_dense_block_count": config["first_k_dense_replace"],
        "attention.q_lora_rank": config["q_lora_rank"],
        "attention.kv_lora_rank": latent,
        "attention.key_length": latent + config["qk_rope_head_dim"],
        "attention.value_length": latent,
        "attention.key_length_mla": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length_mla": config["v_head_dim"],
        "rope.dimension_count": config["qk_rope_head_dim"],
        "expert_shared_count": config["n_shared_experts"],
        "expert_weights_scale": float(config["routed_scaling_factor"]),
        "expert_weights_norm": config["norm_topk_prob"] or None,
        "expert_gating_func": 2 if is_v3 else 1,
        "expert_group_count": config["n_group"],
        "expert_group_used_count": config["topk_group"],
        "rope.scaling.yarn_log_multiplier": None if scale is None else 0.1 * scale,
    }


def whole_deepseek(config: Config) -> dict[str, Any]:
    """As the first converters wrote it: no absorbed projections."""
    return {
        **deepseek(config),
        "attention.key_length": config["qk_nope_head_dim"] + config["qk_rope_head_dim"],
        "attention.value_length": config["v_head_dim"],
        "attention.key_length_mla": None,
        "attention.value_length_mla": None,
        "expert_gating_func": None,
    }


def llama4(config: Config) -> dict[str, Any]:
    return {
        **experts({**config, "intermediate_size": config["intermediate_size_mlp"]}),
        "rope.dimension_count": config["head_dim"],
        "interleave_moe_layer_step": config["interleave_moe_layer_step"],
        "expert_feed_forward_length": config["intermediate_size"],
    }
