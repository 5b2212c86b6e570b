"""GGUF architectures of decoders with layer norms and plain feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.errors import UnsupportedModelError
from hardpoint_model_io.formats.gguf_layouts import FUSED_QKV, TRANSPOSE
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField, Transform
from hardpoint_model_io.formats.gguf_stems import CLASSIC_FIELDS, DECODER_STEMS, changed, normed_by

__all__ = ["CLASSIC_ROWS"]

_NEOX_STEMS = {
    "token_embd": "gpt_neox.embed_in",
    "output_norm": "gpt_neox.final_layer_norm",
    "output": "embed_out",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_qkv": "attention.query_key_value",
    "blk.attn_output": "attention.dense",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
_GPT2_STEMS = {
    "token_embd": "transformer.wte",
    "position_embd": "transformer.wpe",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "ln_1",
    "blk.attn_qkv": "attn.c_attn",
    "blk.attn_output": "attn.c_proj",
    "blk.ffn_norm": "ln_2",
    "blk.ffn_up": "mlp.c_fc",
    "blk.ffn_down": "mlp.c_proj",
}
_BLOOM_STEMS = {
    "token_embd": "transformer.word_embeddings",
    "token_embd_norm": "transformer.word_embeddings_layernorm",
    "output_norm": "transformer.ln_f",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_qkv": "self_attention.query_key_value",
    "blk.attn_output": "self_attention.dense",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_up": "mlp.dense_h_to_4h",
    "blk.ffn_down": "mlp.dense_4h_to_h",
}
_FALCON_STEMS = {stem: name for stem, name in _BLOOM_STEMS.items() if stem not in ("token_embd_norm", "blk.ffn_norm")}
_MPT_STEMS = {
    "token_embd": "transformer.wte",
    "output_norm": "transformer.norm_f",
    "output": "lm_head",
    "blk.attn_norm": "norm_1",
    "blk.attn_qkv": "attn.Wqkv",
    "blk.attn_output": "attn.out_proj",
    "blk.ffn_norm": "norm_2",
    "blk.ffn_up": "ffn.up_proj",
    "blk.ffn_down": "ffn.down_proj",
}
_ROTATED_STEMS = {stem: name for stem, name in DECODER_STEMS.items() if stem != "blk.ffn_gate"}
_NO_WINDOW = tuple(entry for entry in normed_by("layer_norm_eps") if entry.key != "attention.sliding_window")
_FALCON_FIELDS = (
    *changed(CLASSIC_FIELDS, "feed_forward_length", name="ffn_hidden_size"),
    MetadataField("rope.freq_base", "rope_theta", float, default=10_000.0),
)
_MPT_FIELDS = (*CLASSIC_FIELDS, MetadataField("attention.max_alibi_bias", "max_alibi_bias", float, least=0))
_TRANSPOSED: Mapping[str, Transform] = {
    f"blk.{stem}.weight": TRANSPOSE for stem in ("attn_qkv", "attn_output", "ffn_up", "ffn_down")
}


def _complete_neox(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_parallel_residual"] = metadata.flag("use_parallel_residual", True)


def _complete_falcon(metadata: Metadata, config: dict[str, Any]) -> None:
    """The newer decoder has several heads of keys and values, or two norms side by side."""
    config["num_kv_heads"] = config["num_key_value_heads"]
    num_norms = 2 if metadata.layers_with("attn_norm_2.weight") else 1
    is_new = num_norms == 2 or config["num_kv_heads"] > 1
    config["new_decoder_architecture"] = is_new
    if is_new:
        config["num_ln_in_parallel_attn"] = num_norms
    config |= {"multi_query": True, "parallel_attn": True, "alibi": False, "bias": config["attention_bias"]}


def _complete_mpt(metadata: Metadata, config: dict[str, Any]) -> None:
    steepest = config.pop("max_alibi_bias", 0.0)
    if not steepest:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('attention.max_alibi_bias')!r} says that positions are no slopes "
            "(ALiBi), which is not supported"
        )
    if config["num_key_value_heads"] != config["num_attention_heads"]:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('attention.head_count_kv')!r} is {config['num_key_value_heads']};"
            f" supported is a head of keys and values for each of the {config['num_attention_heads']} of queries"
        )
    has_clip = metadata.raw("attention.clamp_kqv") is not None
    clip = metadata.number("attention.clamp_kqv", least=0) if has_clip else None
    config["attn_config"] = {"alibi": True, "alibi_bias_max": steepest, "clip_qkv": clip or None}


def _complete_biases(metadata: Metadata, config: dict[str, Any]) -> None:
    config["use_bias"] = config["attention_bias"]


def _complete_phi2(metadata: Metadata, config: dict[str, Any]) -> None:
    config["tie_word_embeddings"] = False


_FALCON_ROW = GgufArchitecture(
    gguf="falcon",
    architecture="FalconForCausalLM",
    model_type="falcon",
    stems=_FALCON_STEMS,
    fields=_FALCON_FIELDS,
    transforms={"blk.attn_qkv": FUSED_QKV},
    constants={"activation": "gelu"},
    completions=(_complete_falcon,),
    blocks="transformer.h",
)
_FALCON_ROWS = (
    # With a norm for each of the two blocks of a layer.
    replace(
        _FALCON_ROW,
        stems=_FALCON_STEMS | {"blk.attn_norm": "ln_mlp", "blk.attn_norm_2": "ln_attn"},
        applies=lambda file: "blk.0.attn_norm_2.weight" in file.tensors,
    ),
    _FALCON_ROW,
)
CLASSIC_ROWS = (
    GgufArchitecture(
        gguf="gpt2",
        architecture="GPT2LMHeadModel",
        model_type="gpt2",
        stems=_GPT2_STEMS,
        fields=changed(CLASSIC_FIELDS, "feed_forward_length", name="n_inner"),
        transforms=_TRANSPOSED,
        constants={"activation_function": "gelu_new"},
        blocks="transformer.h",
    ),
    GgufArchitecture(
        gguf="starcoder",
        architecture="GPTBigCodeForCausalLM",
        model_type="gpt_bigcode",
        # One head of keys and values follows the queries, in files as in checkpoints.
        stems=_GPT2_STEMS,
        fields=changed(CLASSIC_FIELDS, "feed_forward_length", name="n_inner"),
        constants={"activation_function": "gelu_pytorch_tanh", "multi_query": True},
        blocks="transformer.h",
    ),
    GgufArchitecture(
        gguf="gptneox",
        architecture="GPTNeoXForCausalLM",
        model_type="gpt_neox",
        stems=_NEOX_STEMS,
        fields=_NO_WINDOW,
        transforms={"blk.attn_qkv": FUSED_QKV},
        constants={"hidden_act": "gelu"},
        completions=(_complete_neox,),
        blocks="gpt_neox.layers",
        rotates_part=True,
    ),
    GgufArchitecture(
        gguf="bloom",
        architecture="BloomForCausalLM",
        model_type="bloom",
        stems=_BLOOM_STEMS,
        fields=CLASSIC_FIELDS,
        transforms={"blk.attn_qkv": FUSED_QKV},
        blocks="transformer.h",
    ),
    *_FALCON_ROWS,
    GgufArchitecture(
        gguf="mpt",
        architecture="MptForCausalLM",
        model_type="mpt",
        stems=_MPT_STEMS,
        fields=_MPT_FIELDS,
        completions=(_complete_mpt,),
        blocks="transformer.blocks",
    ),
    GgufArchitecture(
        gguf="phi2",
        architecture="PhiForCausalLM",
        model_type="phi",
        stems=_ROTATED_STEMS
        | {
            "output_norm": "model.final_layernorm",
            "blk.attn_output": "self_attn.dense",
            "blk.ffn_up": "mlp.fc1",
            "blk.ffn_down": "mlp.fc2",
        },
        fields=_NO_WINDOW,
        constants={"hidden_act": "gelu_new"},
        completions=(_complete_phi2,),
        rotates_part=True,
    ),
    GgufArchitecture(
        gguf="starcoder2",
        architecture="Starcoder2ForCausalLM",
        model_type="starcoder2",
        stems=_ROTATED_STEMS | {"blk.ffn_up": "mlp.c_fc", "blk.ffn_down": "mlp.c_proj"},
        fields=normed_by("norm_epsilon"),
        constants={"hidden_act": "gelu_pytorch_tanh"},
        completions=(_complete_biases,),
    ),
)
