"""GGUF architectures of decoders with experts."""

from __future__ import annotations

from typing import Any

from hardpoint_model_io.formats.gguf_layouts import AS_ROW
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField
from hardpoint_model_io.formats.gguf_rows_decoders import GRANITE_FIELDS, LLAMA_HEAD_DIM, PAIRED, complete_granite
from hardpoint_model_io.formats.gguf_stems import (
    DECODER_FIELDS,
    DECODER_STEMS,
    EXPERT_FIELDS,
    QK_NORM_STEMS,
    SHARED_EXPERT_FIELDS,
    SHARED_EXPERT_STEMS,
    SILU,
    changed,
    expert_stems,
)

__all__ = ["LOCAL_EXPERT_FIELDS", "MIXTURE_ROWS", "complete_dense_layers"]

LOCAL_EXPERT_FIELDS = (
    MetadataField("expert_count", "num_local_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
)
_GPT_OSS_STEMS = {
    **{stem: name for stem, name in DECODER_STEMS.items() if not stem.startswith("blk.ffn")},
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.attn_sinks.weight": "self_attn.sinks",
    **expert_stems("mlp", router="mlp.router"),
}


def complete_dense_layers(metadata: Metadata, config: dict[str, Any]) -> None:
    """Layers without a router are dense."""
    sparse = metadata.layers_with("ffn_gate_inp.weight")
    config["mlp_only_layers"] = [layer for layer in range(config["num_hidden_layers"]) if layer not in sparse]


def _complete_qwen2_moe(metadata: Metadata, config: dict[str, Any]) -> None:
    config["qkv_bias"] = config["attention_bias"]


def _complete_gpt_oss(metadata: Metadata, config: dict[str, Any]) -> None:
    """The first layer has a window, the next has none, and so on."""
    kinds = ("sliding_attention", "full_attention")
    config["layer_types"] = [kinds[index % 2] for index in range(config["num_hidden_layers"])]
    if "rope_scaling" in config:
        # Nothing in the file says that the ramp between its ends is not rounded, as it is elsewhere.
        config["rope_scaling"]["truncate"] = False
    else:
        config["rope_scaling"] = {"rope_type": "default"}


MIXTURE_ROWS = (
    GgufArchitecture(
        gguf="qwen2moe",
        architecture="Qwen2MoeForCausalLM",
        model_type="qwen2_moe",
        stems=DECODER_STEMS | expert_stems("mlp") | SHARED_EXPERT_STEMS,
        fields=DECODER_FIELDS + EXPERT_FIELDS + SHARED_EXPERT_FIELDS,
        transforms={"blk.ffn_gate_inp_shexp": AS_ROW},
        # The format cannot say otherwise, and whoever reads it does not renormalize.
        constants=SILU | {"norm_topk_prob": False},
        completions=(_complete_qwen2_moe, complete_dense_layers),
    ),
    GgufArchitecture(
        gguf="qwen3moe",
        architecture="Qwen3MoeForCausalLM",
        model_type="qwen3_moe",
        stems=DECODER_STEMS | QK_NORM_STEMS | expert_stems("mlp"),
        fields=DECODER_FIELDS + EXPERT_FIELDS,
        # The format cannot say otherwise, and whoever reads it renormalizes.
        constants=SILU | {"norm_topk_prob": True},
        completions=(complete_dense_layers,),
    ),
    GgufArchitecture(
        gguf="granitemoe",
        architecture="GraniteMoeForCausalLM",
        model_type="granitemoe",
        stems=DECODER_STEMS | expert_stems("block_sparse_moe", router="block_sparse_moe.router.layer"),
        fields=GRANITE_FIELDS + LOCAL_EXPERT_FIELDS,
        transforms=PAIRED,
        constants=SILU,
        completions=(complete_granite,),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="gpt-oss",
        architecture="GptOssForCausalLM",
        model_type="gpt_oss",
        stems=_GPT_OSS_STEMS,
        fields=(
            *changed(
                changed(DECODER_FIELDS, "feed_forward_length", key="expert_feed_forward_length"),
                "attention.sliding_window",
                required=True,
            ),
            *LOCAL_EXPERT_FIELDS,
        ),
        constants=SILU,
        completions=(_complete_gpt_oss,),
    ),
)
