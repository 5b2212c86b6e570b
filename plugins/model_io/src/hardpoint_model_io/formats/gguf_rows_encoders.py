"""GGUF architectures of encoders."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField

__all__ = ["ENCODER_ROWS", "SENTENCE_FIELD"]

SENTENCE_FIELD = "sentence_embedding"
"""The field of a configuration that says how texts are pooled; no ``config.json`` has it."""
_ENCODER_FIELDS = (
    MetadataField("embedding_length", "hidden_size", int, required=True),
    MetadataField("block_count", "num_hidden_layers", int, required=True),
    MetadataField("feed_forward_length", "intermediate_size", int, required=True),
    MetadataField("attention.head_count", "num_attention_heads", int, required=True),
    MetadataField("context_length", "max_position_embeddings", int, required=True),
    MetadataField("attention.layer_norm_epsilon", "layer_norm_eps", float, required=True),
)
_BERT_STEMS = {
    "token_embd": "embeddings.word_embeddings",
    "position_embd": "embeddings.position_embeddings",
    "token_types": "embeddings.token_type_embeddings",
    "token_embd_norm": "embeddings.LayerNorm",
    "blk.attn_q": "attention.self.query",
    "blk.attn_k": "attention.self.key",
    "blk.attn_v": "attention.self.value",
    "blk.attn_output": "attention.output.dense",
    "blk.attn_output_norm": "attention.output.LayerNorm",
    "blk.ffn_up": "intermediate.dense",
    "blk.ffn_down": "output.dense",
    "blk.layer_output_norm": "output.LayerNorm",
}
_POOLING_METHODS = {1: "mean", 2: "cls", 3: "last"}
"""Values of ``bert.pooling_type`` that make one vector of a text."""


def _complete_bert(metadata: Metadata, config: dict[str, Any]) -> None:
    """How many kinds of tokens there are, and how texts are pooled. Readers of these files normalize embeddings."""
    types = metadata.file.tensors.get("token_types.weight")
    if types is None or len(types.shape) != 2:
        raise ModelFormatError(f"{metadata.path}: the tensor 'token_types.weight' is missing or not a matrix")
    config["type_vocab_size"] = types.shape[0]
    pooling = metadata.raw("pooling_type") or 0
    if pooling != 0:
        method = _POOLING_METHODS.get(pooling, f"type {pooling!r}") if isinstance(pooling, int) else repr(pooling)
        config[SENTENCE_FIELD] = {"pooling_method": method, "normalizes": True, "other_modules": []}


ENCODER_ROWS = (
    GgufArchitecture(
        gguf="bert",
        architecture="BertModel",
        model_type="bert",
        stems=_BERT_STEMS,
        fields=_ENCODER_FIELDS,
        constants={"hidden_act": "gelu"},
        completions=(_complete_bert,),
        blocks="encoder.layer",
        tasks=("embed",),
    ),
)
