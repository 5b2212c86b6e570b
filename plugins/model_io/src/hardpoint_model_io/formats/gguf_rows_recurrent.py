"""GGUF architectures with recurrent layers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufFile
from hardpoint_model_io.formats.gguf_layouts import (
    AS_CONVOLUTION,
    AS_ROW,
    AS_VECTOR,
    DECAY_LOG,
    DECAY_LOG_VECTOR,
    SUBTRACT_ONE,
    delta_groups,
)
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, Join, MetadataField, Transform
from hardpoint_model_io.formats.gguf_rows_decoders import GRANITE_FIELDS, LLAMA_HEAD_DIM, PAIRED, complete_granite
from hardpoint_model_io.formats.gguf_rows_mixtures import complete_dense_layers
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

__all__ = ["RECURRENT_ROWS"]

MAX_POSITIONS = 1 << 18
"""Files of models without positions claim more than tables by position can bear; this is far beyond training."""

_BARE_FIELDS = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", float, required=True),
    MetadataField("ssm.conv_kernel", "conv_kernel", int, required=True),
    MetadataField("ssm.state_size", "state_size", int, required=True),
)
_SELECTIVE_FIELDS = (
    *_BARE_FIELDS,
    MetadataField("ssm.inner_size", "intermediate_size", int, required=True),
    MetadataField("ssm.time_step_rank", "time_step_rank", int, required=True),
)
_HEADED_FIELDS = (
    *_BARE_FIELDS,
    MetadataField("ssm.time_step_rank", "num_heads", int, required=True),
    MetadataField("ssm.group_count", "n_groups", int, default=1),
)
_MIXER_FIELDS = (
    MetadataField("ssm.conv_kernel", "mamba_d_conv", int, required=True),
    MetadataField("ssm.state_size", "mamba_d_state", int, required=True),
)
_HYBRID_FIELDS = (
    *_MIXER_FIELDS,
    MetadataField("ssm.group_count", "mamba_n_groups", int, default=1),
    MetadataField("ssm.time_step_rank", "mamba_n_heads", int, required=True),
)


def _mixer_stems(mixer: str) -> dict[str, str]:
    """Of what Mamba's two generations have in common, under ``mixer``."""
    return {
        "blk.ssm_in": f"{mixer}.in_proj",
        "blk.ssm_conv1d": f"{mixer}.conv1d",
        "blk.ssm_a": f"{mixer}.A_log",
        "blk.ssm_d": f"{mixer}.D",
        "blk.ssm_out": f"{mixer}.out_proj",
    }


def _headed_stems(mixer: str) -> dict[str, str]:
    return {**_mixer_stems(mixer), "blk.ssm_dt.bias": f"{mixer}.dt_bias", "blk.ssm_norm": f"{mixer}.norm"}


_BACKBONE_STEMS = {
    "token_embd": "backbone.embeddings",
    "output_norm": "backbone.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm",
}
_SELECTIVE: Mapping[str, Transform] = {"blk.ssm_conv1d.weight": AS_CONVOLUTION, "blk.ssm_a": DECAY_LOG}
_HEADED: Mapping[str, Transform] = {
    "blk.ssm_conv1d.weight": AS_CONVOLUTION,
    "blk.ssm_a": DECAY_LOG_VECTOR,
    "blk.ssm_d": AS_VECTOR,
    "blk.ssm_norm.weight": AS_VECTOR,
}
_JAMBA_STEMS = DECODER_STEMS | {
    "output_norm": "model.final_layernorm",
    "blk.ffn_norm": "pre_ff_layernorm",
    **{f"blk.ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **expert_stems("feed_forward", router="feed_forward.router"),
    **_mixer_stems("mamba"),
    "blk.ssm_x": "mamba.x_proj",
    "blk.ssm_dt": "mamba.dt_proj",
    "blk.ssm_dt_norm": "mamba.dt_layernorm",
    "blk.ssm_b_norm": "mamba.b_layernorm",
    "blk.ssm_c_norm": "mamba.c_layernorm",
}
_BAMBA_STEMS = DECODER_STEMS | {
    "output_norm": "model.final_layernorm",
    "blk.ffn_norm": "pre_ff_layernorm",
    **{f"blk.ffn_{part}": f"feed_forward.{part}_proj" for part in ("gate", "up", "down")},
    **_headed_stems("mamba"),
}
_GRANITE_STEMS = {
    **{stem: name for stem, name in DECODER_STEMS.items() if not stem.startswith("blk.ffn") or "norm" in stem},
    **expert_stems("block_sparse_moe", router="block_sparse_moe.router.layer"),
    # One block for all tokens is the shared expert where there are experts, and else the only one.
    **{
        f"blk.ffn_{part}{suffix}": f"shared_mlp.{name}"
        for suffix in ("", "_shexp")
        for part, name in (("gate", "gate_proj"), ("up", "up_proj"), ("down", "output_linear"))
    },
    **_headed_stems("mamba"),
}
_NEXT_NORMS = ("output_norm", "blk.attn_norm", "blk.post_attention_norm", "blk.attn_q_norm", "blk.attn_k_norm")
_NEXT_STEMS = {
    **{stem: name for stem, name in DECODER_STEMS.items() if stem != "blk.ffn_norm"},
    **QK_NORM_STEMS,
    "blk.post_attention_norm": "post_attention_layernorm",
    **expert_stems("mlp"),
    **SHARED_EXPERT_STEMS,
    # Files of the first converters hold the projection whole.
    "blk.ssm_in": "linear_attn.in_proj_qkvz",
    "blk.ssm_ba": "linear_attn.in_proj_ba",
    "blk.ssm_conv1d": "linear_attn.conv1d",
    "blk.ssm_a": "linear_attn.A_log",
    "blk.ssm_dt.bias": "linear_attn.dt_bias",
    "blk.ssm_norm": "linear_attn.norm",
    "blk.ssm_out": "linear_attn.out_proj",
}


def _times(metadata: Metadata, inner: int, size: int, key: str) -> int:
    """How often ``size`` goes into ``inner``. Raises ``ModelFormatError`` naming ``key`` where it does not."""
    if inner % size:
        raise ModelFormatError(
            f"{metadata.path}: metadata {metadata.key(key)!r} is {inner}, which is no multiple of {size}"
        )
    return inner // size


def _limit_positions(metadata: Metadata, config: dict[str, Any]) -> None:
    config["max_position_embeddings"] = min(config["max_position_embeddings"], MAX_POSITIONS)


def _complete_biases(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = bool(metadata.layers_with("ssm_in.bias"))
    config["use_conv_bias"] = bool(metadata.layers_with("ssm_conv1d.bias"))


def _complete_mamba(metadata: Metadata, config: dict[str, Any]) -> None:
    if metadata.flag("ssm.dt_b_c_rms", False):
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('ssm.dt_b_c_rms')!r} is true (Falcon-Mamba, which normalizes "
            "steps, B and C), which is not supported"
        )


def _complete_mamba2(metadata: Metadata, config: dict[str, Any]) -> None:
    inner = metadata.integer("ssm.inner_size")
    config["expand"] = _times(metadata, inner, config["hidden_size"], "ssm.inner_size")
    config["head_dim"] = _times(metadata, inner, config["num_heads"], "ssm.inner_size")


def _complete_mixer(metadata: Metadata, config: dict[str, Any]) -> None:
    inner = metadata.integer("ssm.inner_size")
    config["mamba_expand"] = _times(metadata, inner, config["hidden_size"], "ssm.inner_size")
    config["mamba_proj_bias"] = bool(metadata.layers_with("ssm_in.bias"))
    config["mamba_conv_bias"] = bool(metadata.layers_with("ssm_conv1d.bias"))


def _attending(metadata: Metadata, config: dict[str, Any]) -> list[int]:
    """Numbers of the layers that attend: those which the file gives heads of keys and values."""
    counts = metadata.per_layer("attention.head_count_kv", config["num_hidden_layers"])
    return [layer for layer, count in enumerate(counts) if count]


def _complete_granite_hybrid(metadata: Metadata, config: dict[str, Any]) -> None:
    attending = set(_attending(metadata, config))
    kinds = ("linear_attention", "full_attention")
    config["layer_types"] = [kinds[layer in attending] for layer in range(config["num_hidden_layers"])]
    rotates = metadata.flag("rope.scaling.finetuned", False)
    config["position_embedding_type"] = "rope" if rotates else "nope"
    config["shared_intermediate_size"] = metadata.integer(
        "expert_shared_feed_forward_length", config["intermediate_size"]
    )


def _complete_bamba(metadata: Metadata, config: dict[str, Any]) -> None:
    config["attn_layer_indices"] = _attending(metadata, config)


def _is_bamba(file: GgufFile) -> bool:
    """Of the hybrids in these files only Bamba has positions, and it has no factors."""
    return file.metadata.get("granitehybrid.rope.scaling.finetuned") is True and (
        "granitehybrid.embedding_scale" not in file.metadata
    )


def _complete_jamba(metadata: Metadata, config: dict[str, Any]) -> None:
    num_layers = config["num_hidden_layers"]
    attending, sparse = _attending(metadata, config), sorted(metadata.layers_with("ffn_gate_inp.weight"))
    config["attn_layer_period"], config["attn_layer_offset"] = _turns(metadata, attending, num_layers, "attention")
    config["expert_layer_period"], config["expert_layer_offset"] = _turns(metadata, sparse, num_layers, "experts")
    if not sparse:
        config["num_experts"] = 1


def _turns(metadata: Metadata, layers: list[int], num_layers: int, what: str) -> tuple[int, int]:
    """(period, offset) of ``layers``. Raises ``UnsupportedModelError`` where they follow at no equal distances."""
    if not layers:
        # Beyond the last layer.
        return num_layers + 1, num_layers
    period = layers[1] - layers[0] if len(layers) > 1 else max(num_layers, layers[0] + 1)
    if layers[0] >= period or layers != list(range(layers[0], num_layers, period)):
        raise UnsupportedModelError(
            f"{metadata.path}: the layers with {what} are {layers}; supported are those at equal distances"
        )
    return period, layers[0]


def _complete_qwen3_next(metadata: Metadata, config: dict[str, Any]) -> None:
    inner, heads = metadata.integer("ssm.inner_size"), config["linear_num_value_heads"]
    config["linear_value_head_dim"] = _times(metadata, inner, heads, "ssm.inner_size")
    recurrent = metadata.layers_with("ssm_out.weight")
    kinds = ("full_attention", "linear_attention")
    config["layer_types"] = [kinds[layer in recurrent] for layer in range(config["num_hidden_layers"])]


RECURRENT_ROWS = (
    GgufArchitecture(
        gguf="mamba",
        architecture="MambaForCausalLM",
        model_type="mamba",
        stems={**_BACKBONE_STEMS, **_mixer_stems("mixer"), "blk.ssm_x": "mixer.x_proj", "blk.ssm_dt": "mixer.dt_proj"},
        fields=_SELECTIVE_FIELDS,
        transforms=_SELECTIVE,
        constants=SILU,
        completions=(_complete_mamba, _complete_biases, _limit_positions),
        blocks="backbone.layers",
    ),
    GgufArchitecture(
        gguf="mamba2",
        architecture="Mamba2ForCausalLM",
        model_type="mamba2",
        stems={**_BACKBONE_STEMS, **_headed_stems("mixer")},
        fields=_HEADED_FIELDS,
        transforms=_HEADED,
        constants=SILU,
        completions=(_complete_mamba2, _complete_biases, _limit_positions),
        blocks="backbone.layers",
    ),
    GgufArchitecture(
        gguf="jamba",
        architecture="JambaForCausalLM",
        model_type="jamba",
        stems=_JAMBA_STEMS,
        fields=(
            *DECODER_FIELDS,
            *_MIXER_FIELDS,
            MetadataField("ssm.time_step_rank", "mamba_dt_rank", int, required=True),
            *EXPERT_FIELDS[:2],
        ),
        transforms=_SELECTIVE,
        constants=SILU,
        completions=(_complete_mixer, _complete_jamba, _limit_positions),
    ),
    GgufArchitecture(
        gguf="granitehybrid",
        architecture="BambaForCausalLM",
        model_type="bamba",
        stems=_BAMBA_STEMS,
        fields=(*DECODER_FIELDS, *_HYBRID_FIELDS),
        transforms={**PAIRED, **_HEADED},
        constants=SILU,
        completions=(_complete_mixer, _complete_bamba, _limit_positions),
        applies=_is_bamba,
        rotates_part=True,
    ),
    GgufArchitecture(
        gguf="granitehybrid",
        architecture="GraniteMoeHybridForCausalLM",
        model_type="granitemoehybrid",
        stems=_GRANITE_STEMS,
        fields=(
            *GRANITE_FIELDS,
            *_HYBRID_FIELDS,
            MetadataField("expert_count", "num_local_experts", int, default=0, least=0),
            MetadataField("expert_used_count", "num_experts_per_tok", int, default=0, least=0),
        ),
        transforms={**PAIRED, **_HEADED},
        constants=SILU,
        completions=(complete_granite, _complete_mixer, _complete_granite_hybrid, _limit_positions),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="qwen3next",
        architecture="Qwen3NextForCausalLM",
        model_type="qwen3_next",
        stems=_NEXT_STEMS,
        fields=(
            *changed(DECODER_FIELDS, "feed_forward_length", required=False),
            *EXPERT_FIELDS,
            *SHARED_EXPERT_FIELDS,
            MetadataField("ssm.conv_kernel", "linear_conv_kernel_dim", int, required=True),
            MetadataField("ssm.state_size", "linear_key_head_dim", int, required=True),
            MetadataField("ssm.group_count", "linear_num_key_heads", int, required=True),
            MetadataField("ssm.time_step_rank", "linear_num_value_heads", int, required=True),
        ),
        transforms={
            **dict.fromkeys(_NEXT_NORMS, SUBTRACT_ONE),
            "blk.ssm_conv1d.weight": AS_CONVOLUTION,
            "blk.ssm_a": DECAY_LOG_VECTOR,
            "blk.ffn_gate_inp_shexp": AS_ROW,
        },
        joins={"linear_attn.in_proj_qkvz.weight": Join(("blk.attn_qkv", "blk.attn_gate"), rows=delta_groups)},
        # The format cannot say otherwise, and whoever reads it renormalizes.
        constants=SILU | {"norm_topk_prob": True},
        completions=(_complete_qwen3_next, complete_dense_layers),
        rotates_part=True,
    ),
)
