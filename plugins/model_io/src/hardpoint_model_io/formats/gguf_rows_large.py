"""GGUF architectures of DeepSeek V2 and V3 and of Llama 4."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufFile
from hardpoint_model_io.formats.gguf_layouts import latent_up_projection
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, Join, MetadataField
from hardpoint_model_io.formats.gguf_rows_decoders import LLAMA_HEAD_DIM
from hardpoint_model_io.formats.gguf_rows_mixtures import LOCAL_EXPERT_FIELDS
from hardpoint_model_io.formats.gguf_stems import DECODER_FIELDS, DECODER_STEMS, SILU, changed, expert_stems

__all__ = ["LARGE_ROWS"]

_SOFTMAX, _SIGMOID = 1, 2
"""Values of ``expert_gating_func``."""
_LARGE_V3_EXPERTS = 256
_LLAMA4_CHUNK = 8192
_WITHOUT_NORMS = 128
"""Llama 4 with so many experts does not normalize queries and keys."""

_DEEPSEEK_STEMS = {
    **{stem: name for stem, name in DECODER_STEMS.items() if stem not in ("blk.attn_k", "blk.attn_v")},
    "blk.attn_q_a": "self_attn.q_a_proj",
    "blk.attn_q_a_norm": "self_attn.q_a_layernorm",
    "blk.attn_q_b": "self_attn.q_b_proj",
    "blk.attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "blk.attn_kv_a_norm": "self_attn.kv_a_layernorm",
    # Files of the first converters hold both of its parts in one.
    "blk.attn_kv_b": "self_attn.kv_b_proj",
    **expert_stems("mlp"),
    "blk.exp_probs_b.bias": "mlp.gate.e_score_correction_bias",
    **{f"blk.ffn_{part}_shexp": f"mlp.shared_experts.{part}_proj" for part in ("gate", "up", "down")},
}
_DEEPSEEK_FIELDS = (
    *(entry for entry in DECODER_FIELDS if entry.name not in ("num_key_value_heads", "sliding_window")),
    MetadataField("attention.q_lora_rank", "q_lora_rank", int),
    MetadataField("attention.kv_lora_rank", "kv_lora_rank", int, required=True),
    MetadataField("rope.dimension_count", "qk_rope_head_dim", int, required=True),
    MetadataField("expert_count", "n_routed_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
    MetadataField("expert_shared_count", "n_shared_experts", int, default=0, least=0),
    MetadataField("expert_feed_forward_length", "moe_intermediate_size", int, required=True),
    MetadataField("expert_weights_scale", "routed_scaling_factor", float, default=1.0),
    MetadataField("expert_weights_norm", "norm_topk_prob", bool, default=False),
    MetadataField("leading_dense_block_count", "first_k_dense_replace", int, default=0, least=0),
)
_LATENT_JOIN = {"self_attn.kv_b_proj.weight": Join(("blk.attn_k_b", "blk.attn_v_b"), values=latent_up_projection)}
_LLAMA4_STEMS = {
    **DECODER_STEMS,
    **{f"blk.ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **expert_stems("mlp", router="feed_forward.router"),
    **{f"blk.ffn_{part}_shexp": f"feed_forward.shared_expert.{part}_proj" for part in ("gate", "up", "down")},
}


def _complete_deepseek(metadata: Metadata, config: dict[str, Any]) -> None:
    """Sizes of heads. Files in which attention is absorbed give those of latents under the usual keys, and the others
    under keys of their own."""
    is_absorbed = metadata.raw("attention.key_length_mla") is not None
    suffix = "_mla" if is_absorbed else ""
    whole, rotated = metadata.integer(f"attention.key_length{suffix}"), config["qk_rope_head_dim"]
    if whole <= rotated:
        raise ModelFormatError(
            f"{metadata.path}: metadata {metadata.key(f'attention.key_length{suffix}')!r} is {whole}, of which "
            f"{rotated} rotate; some must not"
        )
    config["qk_nope_head_dim"] = whole - rotated
    config["v_head_dim"] = metadata.integer(f"attention.value_length{suffix}")
    config["num_key_value_heads"] = config["num_attention_heads"]
    config.setdefault("q_lora_rank", None)
    scaling = config.get("rope_scaling")
    if scaling is not None and metadata.raw("rope.scaling.yarn_log_multiplier") is not None:
        # A tenth of what configurations have, which sharpens scores and cancels out in the rotation.
        given = round(metadata.number("rope.scaling.yarn_log_multiplier", least=0) * 10, 6)
        scaling |= {"mscale": given, "mscale_all_dim": given}


def _groups(metadata: Metadata, config: dict[str, Any], default: tuple[int, int]) -> None:
    config["n_group"] = metadata.integer("expert_group_count", default[0])
    config["topk_group"] = metadata.integer("expert_group_used_count", default[1])


def _complete_v2(metadata: Metadata, config: dict[str, Any]) -> None:
    function = metadata.integer("expert_gating_func", _SOFTMAX, least=0)
    if function not in (0, _SOFTMAX):
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('expert_gating_func')!r} is {function}; supported: {_SOFTMAX} "
            f"(softmax), {_SIGMOID} (sigmoid)"
        )
    _groups(metadata, config, (1, 1))
    config["topk_method"] = "group_limited_greedy" if config["n_group"] > 1 else "greedy"


def _complete_v3(metadata: Metadata, config: dict[str, Any]) -> None:
    # Older files do not tell of groups; of this size there are only models with eight.
    _groups(metadata, config, (8, 4) if config["n_routed_experts"] == _LARGE_V3_EXPERTS else (1, 1))
    config["rope_interleave"] = True
    config["num_nextn_predict_layers"] = 0


def _is_v3(file: GgufFile) -> bool:
    return file.metadata.get("deepseek2.expert_gating_func") == _SIGMOID


def _complete_llama4(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_qk_norm"] = config["num_local_experts"] != _WITHOUT_NORMS
    sparse = metadata.layers_with("ffn_gate_inp.weight")
    config["moe_layers"] = sorted(sparse)


_V2_ROW = GgufArchitecture(
    gguf="deepseek2",
    architecture="DeepseekV2ForCausalLM",
    model_type="deepseek_v2",
    stems=_DEEPSEEK_STEMS,
    fields=_DEEPSEEK_FIELDS,
    joins=_LATENT_JOIN,
    constants=SILU,
    completions=(_complete_deepseek, _complete_v2),
    # A head is what rotates of it.
    head_dim_keys=("rope.dimension_count",),
)
LARGE_ROWS = (
    replace(
        _V2_ROW,
        architecture="DeepseekV3ForCausalLM",
        model_type="deepseek_v3",
        completions=(_complete_deepseek, _complete_v3),
        applies=_is_v3,
    ),
    _V2_ROW,
    GgufArchitecture(
        gguf="llama4",
        architecture="Llama4ForCausalLM",
        model_type="llama4_text",
        stems=_LLAMA4_STEMS,
        fields=(
            *changed(DECODER_FIELDS, "feed_forward_length", name="intermediate_size_mlp"),
            MetadataField("expert_feed_forward_length", "intermediate_size", int, required=True),
            *LOCAL_EXPERT_FIELDS,
        ),
        # What the format leaves to its readers.
        constants=SILU
        | {
            "attention_chunk_size": _LLAMA4_CHUNK,
            "no_rope_layer_interval": 4,
            "attn_temperature_tuning": True,
            "floor_scale": 8192,
            "attn_scale": 0.1,
        },
        completions=(_complete_llama4,),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
)
