"""GGUF architectures of the Llama lineage with dense feed-forward blocks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from hardpoint.errors import UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufArray
from hardpoint_model_io.formats.gguf_layouts import PAIRED_KEYS, PAIRED_QUERIES, SUBTRACT_ONE
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField, Reorder, Transform
from hardpoint_model_io.formats.gguf_stems import (
    DECODER_FIELDS,
    DECODER_STEMS,
    QK_NORM_STEMS,
    SENTENCE_FIELD,
    SILU,
    changed,
    complete_mlp_bias,
    expert_stems,
)

__all__ = ["DECODER_ROWS", "GRANITE_FIELDS", "LLAMA_HEAD_DIM", "PAIRED", "complete_granite", "takes_turns"]

# The file pairs neighboring rows for its rotary embedding; Hugging Face pairs the two halves of a head.
PAIRED: Mapping[str, Transform] = {"blk.attn_q": PAIRED_QUERIES, "blk.attn_k": PAIRED_KEYS}
LLAMA_HEAD_DIM = ("attention.key_length", "rope.dimension_count")

_AROUND_STEMS = DECODER_STEMS | {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.ffn_norm": "pre_feedforward_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_GEMMA3_STEMS = _AROUND_STEMS | QK_NORM_STEMS
# Gemma scales by one plus the weight; the file stores the sum.
_GEMMA_NORMS: Mapping[str, Transform] = {stem: SUBTRACT_ONE for stem in _GEMMA3_STEMS if stem.endswith("_norm")}
_SOFT_CAPS = (
    MetadataField("attn_logit_softcapping", "attn_logit_softcapping", float),
    MetadataField("final_logit_softcapping", "final_logit_softcapping", float),
)
_MIXTRAL_FIELDS = (
    MetadataField("expert_count", "num_local_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
)
GRANITE_FIELDS = (
    *DECODER_FIELDS,
    MetadataField("attention.scale", "attention_multiplier", float),
    MetadataField("embedding_scale", "embedding_multiplier", float, default=1.0),
    MetadataField("residual_scale", "residual_multiplier", float, default=1.0),
    MetadataField("logit_scale", "logits_scaling", float, default=1.0),
)
_OLMO2_STEMS = {stem: name for stem, name in (DECODER_STEMS | QK_NORM_STEMS).items()
                if stem not in ("blk.attn_norm", "blk.ffn_norm")} | {
    "blk.post_attention_norm": "post_attention_layernorm",
    "blk.post_ffw_norm": "post_feedforward_layernorm",
}  # fmt: skip
_ANSWERS = "cls.output.weight"
_WINDOWED = "olmo2.attention.sliding_window"
_OLMO3_PATTERN = 4


def takes_turns(num_layers: int, pattern: int) -> list[str]:
    """Kinds of layers of which every ``pattern``-th has no window."""
    return ["full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(num_layers)]


def _complete_gemma2(metadata: Metadata, config: dict[str, Any]) -> None:
    config["layer_types"] = takes_turns(config["num_hidden_layers"], 2)
    # The 27B sizes alone scale queries by the model width per head.
    _scale_queries(config, is_wide=config["num_hidden_layers"] == 46)
    for name in ("attn_logit_softcapping", "final_logit_softcapping"):
        config.setdefault(name, None)


def _complete_gemma3(metadata: Metadata, config: dict[str, Any]) -> None:
    config["layer_types"] = takes_turns(config["num_hidden_layers"], config["sliding_window_pattern"])
    _scale_queries(config, is_wide=config["num_hidden_layers"] == 62)


def _scale_queries(config: dict[str, Any], *, is_wide: bool) -> None:
    width = config["hidden_size"] // config["num_attention_heads"]
    config["query_pre_attn_scalar"] = width if is_wide else config["head_dim"]


def complete_granite(metadata: Metadata, config: dict[str, Any]) -> None:
    """Without a factor for scores in the file the usual one holds."""
    config.setdefault("attention_multiplier", config["head_dim"] ** -0.5)


def _complete_answers(metadata: Metadata, config: dict[str, Any]) -> None:
    """A reranker that answers yes or no has the rows of the head for these, which are two labels."""
    key = "classifier.output_labels"
    names = metadata.file.strings(metadata.key(key)) if isinstance(metadata.raw(key), GgufArray) else []
    if names != [b"yes", b"no"]:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key(key)!r} names {[name.decode(errors='replace') for name in names]}"
            f"; supported beside {_ANSWERS!r} are 'yes' and 'no'"
        )
    config["id2label"] = {"0": "no", "1": "yes"}
    config.pop(SENTENCE_FIELD, None)


def _no_before_yes(config: Mapping[str, Any], count: int) -> np.ndarray:
    """Of two labels the second one's share is the score."""
    if count != 2:
        raise ValueError(f"{count} rows, not one for 'yes' and one for 'no'")
    return np.array([1, 0])


def _complete_olmo3(metadata: Metadata, config: dict[str, Any]) -> None:
    num_layers = config["num_hidden_layers"]
    config["layer_types"] = takes_turns(num_layers, _OLMO3_PATTERN)
    if metadata.raw("attention.sliding_window_pattern") is not None:
        windowed = metadata.per_layer("attention.sliding_window_pattern", num_layers)
        config["layer_types"] = ["sliding_attention" if flag else "full_attention" for flag in windowed]


def _complete_phi3(metadata: Metadata, config: dict[str, Any]) -> None:
    """No window is stated as one of 0."""
    config["sliding_window"] = config.get("sliding_window") or None
    # Without factors that stretch it, the trained context is the whole one.
    if metadata.raw("rope.scaling.original_context_length") is not None:
        config["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")


_QWEN3 = GgufArchitecture(
    gguf="qwen3",
    architecture="Qwen3ForCausalLM",
    model_type="qwen3",
    stems=DECODER_STEMS | QK_NORM_STEMS,
    fields=DECODER_FIELDS,
    constants=SILU,
)
DECODER_ROWS = (
    GgufArchitecture(
        gguf="llama",
        architecture="MixtralForCausalLM",
        model_type="mixtral",
        stems=DECODER_STEMS | expert_stems("block_sparse_moe", "w1", "w3", "w2"),
        fields=DECODER_FIELDS + _MIXTRAL_FIELDS,
        transforms=PAIRED,
        constants=SILU,
        applies=lambda file: bool(file.metadata.get("llama.expert_count")),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="llama",
        architecture="LlamaForCausalLM",
        model_type="llama",
        stems=DECODER_STEMS,
        fields=DECODER_FIELDS,
        transforms=PAIRED,
        constants=SILU,
        completions=(complete_mlp_bias,),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="smollm3",
        architecture="SmolLM3ForCausalLM",
        model_type="smollm3",
        stems=DECODER_STEMS,
        fields=DECODER_FIELDS,
        transforms=PAIRED,
        constants=SILU | {"no_rope_layer_interval": 4},
        completions=(complete_mlp_bias,),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="granite",
        architecture="GraniteForCausalLM",
        model_type="granite",
        stems=DECODER_STEMS,
        fields=GRANITE_FIELDS,
        transforms=PAIRED,
        constants=SILU,
        completions=(complete_granite, complete_mlp_bias),
        head_dim_keys=LLAMA_HEAD_DIM,
    ),
    GgufArchitecture(
        gguf="olmo2",
        architecture="Olmo3ForCausalLM",
        model_type="olmo3",
        stems=_OLMO2_STEMS,
        fields=DECODER_FIELDS,
        constants=SILU,
        completions=(_complete_olmo3,),
        applies=lambda file: bool(file.metadata.get(_WINDOWED)),
    ),
    GgufArchitecture(
        gguf="olmo2",
        architecture="Olmo2ForCausalLM",
        model_type="olmo2",
        stems=_OLMO2_STEMS,
        fields=DECODER_FIELDS,
        constants=SILU,
    ),
    GgufArchitecture(
        gguf="phi3",
        architecture="Phi3ForCausalLM",
        model_type="phi3",
        stems={
            **{stem: name for stem, name in DECODER_STEMS.items() if stem != "blk.ffn_gate"},
            "blk.attn_qkv": "self_attn.qkv_proj",
            "blk.ffn_up": "mlp.gate_up_proj",
        },
        fields=changed(DECODER_FIELDS, "attention.sliding_window", least=0),
        constants=SILU,
        completions=(_complete_phi3,),
        rotates_part=True,
    ),
    GgufArchitecture(
        gguf="qwen2",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        stems=DECODER_STEMS,
        fields=DECODER_FIELDS,
        constants=SILU,
    ),
    # The half of Qwen2-VL that reads: of a text without images all three positions are one.
    GgufArchitecture(
        gguf="qwen2vl",
        architecture="Qwen2ForCausalLM",
        model_type="qwen2",
        stems=DECODER_STEMS,
        fields=DECODER_FIELDS,
        constants=SILU,
    ),
    replace(
        _QWEN3,
        architecture="Qwen3ForSequenceClassification",
        stems={**_QWEN3.stems, "cls.output": "score"},
        transforms={"cls.output": Reorder(_no_before_yes)},
        completions=(_complete_answers,),
        applies=lambda file: _ANSWERS in file.tensors,
        tasks=("embed", "classify"),
    ),
    _QWEN3,
    GgufArchitecture(
        gguf="gemma2",
        architecture="Gemma2ForCausalLM",
        model_type="gemma2",
        stems=_AROUND_STEMS,
        fields=changed(DECODER_FIELDS, "attention.sliding_window", default=4096) + _SOFT_CAPS,
        transforms=_GEMMA_NORMS,
        constants={"hidden_activation": "gelu_pytorch_tanh"},
        completions=(_complete_gemma2,),
    ),
    GgufArchitecture(
        gguf="gemma3",
        architecture="Gemma3ForCausalLM",
        model_type="gemma3_text",
        stems=_GEMMA3_STEMS,
        fields=(*changed(DECODER_FIELDS, "rope.freq_base", default=1_000_000.0), _SOFT_CAPS[1]),
        transforms=_GEMMA_NORMS,
        constants={
            "hidden_activation": "gelu_pytorch_tanh",
            "rope_local_base_freq": 10_000.0,
            "sliding_window_pattern": 6,
        },
        completions=(_complete_gemma3,),
    ),
)
