"""GGUF architectures of models with an encoder and a decoder that attends to it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np

from hardpoint.errors import UnsupportedModelError
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField

__all__ = ["ENCODER_DECODER_ROWS"]

_T5_FIELDS = (
    MetadataField("embedding_length", "d_model", int, required=True),
    MetadataField("block_count", "num_layers", int, required=True),
    MetadataField("decoder_block_count", "num_decoder_layers", int),
    MetadataField("feed_forward_length", "d_ff", int, required=True),
    MetadataField("attention.head_count", "num_heads", int, required=True),
    MetadataField("attention.key_length", "d_kv", int, required=True),
    MetadataField("attention.layer_norm_rms_epsilon", "layer_norm_epsilon", float, required=True),
    MetadataField("attention.relative_buckets_count", "relative_attention_num_buckets", int, required=True),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("decoder_start_token_id", "decoder_start_token_id", int, least=0),
)
_FARTHEST = 128
"""Distances from here on count as one; the format leaves that to its readers."""


def _self_attention(stack: str, feed_forward: int) -> dict[str, str]:
    """Stems of one stack, whose feed-forward part has the number ``feed_forward`` in each layer."""
    block, last = f"{stack}.blk", f"layer.{feed_forward}"
    return {
        f"{block}.attn_norm": "layer.0.layer_norm",
        **{f"{block}.attn_{letter}": f"layer.0.SelfAttention.{letter}" for letter in "qkvo"},
        f"{block}.attn_rel_b": "layer.0.SelfAttention.relative_attention_bias",
        f"{block}.ffn_norm": f"{last}.layer_norm",
        f"{block}.ffn_up": f"{last}.DenseReluDense.wi",
        f"{block}.ffn_down": f"{last}.DenseReluDense.wo",
    }


_T5_STEMS = {
    "token_embd": "shared",
    "output": "lm_head",
    "enc.output_norm": "encoder.final_layer_norm",
    "dec.output_norm": "decoder.final_layer_norm",
    **_self_attention("enc", 1),
    **_self_attention("dec", 2),
    "dec.blk.cross_attn_norm": "layer.1.layer_norm",
    **{f"dec.blk.cross_attn_{letter}": f"layer.1.EncDecAttention.{letter}" for letter in "qkvo"},
    "dec.blk.cross_attn_rel_b": "layer.1.EncDecAttention.relative_attention_bias",
}
_GATES = {
    f"{stack}.blk.ffn_{part}": f"layer.{number}.DenseReluDense.{name}"
    for stack, number in (("enc", 1), ("dec", 2))
    for part, name in (("gate", "wi_0"), ("up", "wi_1"))
}


def _complete_t5(metadata: Metadata, config: dict[str, Any]) -> None:
    """Raises ``UnsupportedModelError`` for biases of each layer, which UMT5 has."""
    own = [name for name in metadata.file.tensors if name.endswith(".attn_rel_b.weight") and ".blk.0." not in name]
    if own:
        raise UnsupportedModelError(
            f"{metadata.path}: tensor {sorted(own)[0]!r}: positions that each layer learns for itself (UMT5) are not "
            "supported; those of T5 and mT5 are, which all layers share"
        )
    key, value = config["d_kv"], metadata.integer("attention.value_length", config["d_kv"])
    if key != value:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('attention.value_length')!r} is {value}; supported is that of "
            f"keys, {key}"
        )
    config.setdefault("num_decoder_layers", config["num_layers"])
    config["tie_word_embeddings"] = config["tie_word_embeddings"] or _is_twice(metadata)
    # Under the names that all models have as well.
    config |= {"hidden_size": config["d_model"], "num_attention_heads": config["num_heads"], "head_dim": key}


def _is_twice(metadata: Metadata) -> bool:
    """Whether the head is the embedding, stored once more, as some checkpoints have it."""
    file = metadata.file
    head, words = file.tensors["output.weight"], file.tensors["token_embd.weight"]
    if head.type != words.type or head.shape != words.shape:
        return False
    held, said = file.raw(head), file.raw(words)
    # Nearly all heads differ in the first row already.
    return bool(np.array_equal(held[0], said[0]) and np.array_equal(held, said))


_T5 = GgufArchitecture(
    gguf="t5",
    architecture="T5ForConditionalGeneration",
    model_type="t5",
    stems=_T5_STEMS,
    fields=_T5_FIELDS,
    constants={"is_encoder_decoder": True, "feed_forward_proj": "relu", "relative_attention_max_distance": _FARTHEST},
    completions=(_complete_t5,),
    stacks={"enc.blk": "encoder.block", "dec.blk": "decoder.block"},
    tasks=("generate",),
)
ENCODER_DECODER_ROWS = (
    replace(
        _T5,
        stems=_T5_STEMS | _GATES,
        constants={**_T5.constants, "feed_forward_proj": "gated-gelu"},
        applies=lambda file: "enc.blk.0.ffn_gate.weight" in file.tensors,
    ),
    _T5,
)
