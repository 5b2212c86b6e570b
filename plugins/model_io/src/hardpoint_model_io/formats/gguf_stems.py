"""What rows of the table of GGUF architectures have in common: metadata fields and tensor stems."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import MetadataField

__all__ = [
    "CLASSIC_FIELDS",
    "DECODER_FIELDS",
    "DECODER_STEMS",
    "EXPERT_FIELDS",
    "POOLING_METHODS",
    "QK_NORM_STEMS",
    "SENTENCE_FIELD",
    "SHARED_EXPERT_FIELDS",
    "SHARED_EXPERT_STEMS",
    "SILU",
    "changed",
    "complete_mlp_bias",
    "complete_pooling",
    "expert_stems",
    "normed_by",
]

DECODER_FIELDS = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("feed_forward_length", "intermediate_size", int, required=True),
    MetadataField("attention.head_count", "num_attention_heads", int, required=True),
    MetadataField("attention.head_count_kv", "num_key_value_heads", int),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("attention.layer_norm_rms_epsilon", "rms_norm_eps", float, required=True),
    MetadataField("rope.freq_base", "rope_theta", float, default=10_000.0),
    MetadataField("attention.sliding_window", "sliding_window", int),
)
SILU = {"hidden_act": "silu"}
SENTENCE_FIELD = "sentence_embedding"
"""The field of a configuration that says how texts are pooled; no ``config.json`` has it."""
POOLING_METHODS = {1: "mean", 2: "cls", 3: "last"}
"""Values of ``pooling_type`` that make one vector of a text."""

DECODER_STEMS = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
    "blk.attn_norm": "input_layernorm",
    "blk.attn_q": "self_attn.q_proj",
    "blk.attn_k": "self_attn.k_proj",
    "blk.attn_v": "self_attn.v_proj",
    "blk.attn_output": "self_attn.o_proj",
    "blk.ffn_norm": "post_attention_layernorm",
    "blk.ffn_gate": "mlp.gate_proj",
    "blk.ffn_up": "mlp.up_proj",
    "blk.ffn_down": "mlp.down_proj",
}
QK_NORM_STEMS = {"blk.attn_q_norm": "self_attn.q_norm", "blk.attn_k_norm": "self_attn.k_norm"}

EXPERT_FIELDS = (
    MetadataField("expert_count", "num_experts", int, required=True),
    MetadataField("expert_used_count", "num_experts_per_tok", int, required=True),
    MetadataField("expert_feed_forward_length", "moe_intermediate_size", int, required=True),
)
SHARED_EXPERT_FIELDS = (
    MetadataField("expert_shared_feed_forward_length", "shared_expert_intermediate_size", int, required=True),
)
SHARED_EXPERT_STEMS = {
    "blk.ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "blk.ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "blk.ffn_up_shexp": "mlp.shared_expert.up_proj",
    "blk.ffn_down_shexp": "mlp.shared_expert.down_proj",
}


def expert_stems(
    block: str, gate: str = "gate_proj", up: str = "up_proj", down: str = "down_proj", *, router: str = ""
) -> dict[str, str]:
    """Stems of a router, by default ``<block>.gate``, and of stacks of experts under ``block``."""
    parts = {"blk.ffn_gate_exps": gate, "blk.ffn_up_exps": up, "blk.ffn_down_exps": down}
    stacks = {stem: f"{block}.experts.*.{part}" for stem, part in parts.items()}
    return {"blk.ffn_gate_inp": router or f"{block}.gate", **stacks}


def changed(fields: tuple[MetadataField, ...], key: str, /, **changes: Any) -> tuple[MetadataField, ...]:
    """``fields`` with another entry for the metadata ``key``."""
    return tuple(replace(entry, **changes) if entry.key == key else entry for entry in fields)


def normed_by(name: str) -> tuple[MetadataField, ...]:
    """Fields of decoders with layer norms, whose epsilon the family calls ``name``."""
    return changed(DECODER_FIELDS, "attention.layer_norm_rms_epsilon", key="attention.layer_norm_epsilon", name=name)


CLASSIC_FIELDS = tuple(
    entry
    for entry in normed_by("layer_norm_epsilon")
    if entry.key not in ("rope.freq_base", "attention.sliding_window")
)
"""Of the first families, which do not rotate."""


def complete_pooling(metadata: Metadata, config: dict[str, Any]) -> None:
    """How texts are pooled, where the file says so. Readers of these files normalize embeddings."""
    pooling = metadata.raw("pooling_type") or 0
    if pooling != 0:
        method = POOLING_METHODS.get(pooling, f"type {pooling!r}") if isinstance(pooling, int) else repr(pooling)
        config[SENTENCE_FIELD] = {"pooling_method": method, "normalizes": True, "other_modules": []}


def complete_mlp_bias(metadata: Metadata, config: dict[str, Any]) -> None:
    """Whether feed-forward blocks have biases is not in the metadata."""
    config["mlp_bias"] = any(name.endswith(".ffn_up.bias") for name in metadata.file.tensors)
