"""Configuration of a model from the metadata of its GGUF file, in the Hugging Face spelling."""

from __future__ import annotations

from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufArray, GgufFile
from hardpoint_model_io.formats.gguf_metadata import Metadata
from hardpoint_model_io.formats.gguf_record import GgufArchitecture, MetadataField
from hardpoint_model_io.formats.gguf_rope import rope_scaling
from hardpoint_model_io.formats.gguf_stems import complete_pooling

TOKENS_KEY = "tokenizer.ggml.tokens"


def build_config(file: GgufFile, row: GgufArchitecture) -> dict[str, Any]:
    """``config.json`` fields of the model in ``file``. Raises ``ModelFormatError`` naming file and metadata key."""
    metadata = Metadata(file, row.gguf)
    config: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type}
    config.update(row.constants)
    metadata.num_layers()
    _check_direction(metadata, row)
    for entry in row.fields:
        value = _field_value(metadata, entry)
        if value is not None:
            config[entry.name] = value
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    if "num_attention_heads" in config:
        _complete_attention(metadata, row, config)
    complete_pooling(metadata, config)
    for complete in row.completions:
        complete(metadata, config)
    for name, key in (("bos_token_id", "bos_token_id"), ("eos_token_id", "eos_token_id"),
                      ("pad_token_id", "padding_token_id")):  # fmt: skip
        if (token := token_id(file, key)) is not None:
            config[name] = token
    return config


def token_id(file: GgufFile, key: str) -> int | None:
    """The id under ``tokenizer.ggml.<key>``, or None. Raises ``ModelFormatError`` for one outside the vocabulary."""
    value = file.metadata.get(f"tokenizer.ggml.{key}")
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < _vocab_size(file):
        raise ModelFormatError(
            f"{file.path}: metadata 'tokenizer.ggml.{key}' is {value!r}, not an id of the vocabulary"
        )
    return value


def _check_direction(metadata: Metadata, row: GgufArchitecture) -> None:
    """Some decoders were trained on to look both ways, and go by the same name."""
    if not row.looks_both_ways and not metadata.flag("attention.causal", True):
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('attention.causal')!r} is false: tokens see those behind them, "
            f"which no model plugin here computes for {row.gguf!r}"
        )


def _field_value(metadata: Metadata, entry: MetadataField) -> Any:
    if metadata.raw(entry.key) is None and not entry.required:
        return entry.default
    if entry.kind is bool:
        return metadata.flag(entry.key, False)
    if entry.kind is float:
        return metadata.number(entry.key, least=entry.least)
    return metadata.integer(entry.key, least=1 if entry.least is None else entry.least)


def _complete_attention(metadata: Metadata, row: GgufArchitecture, config: dict[str, Any]) -> None:
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = _head_dim(metadata, row, config)
    _complete_rotation(metadata, row, config)
    stored = metadata.file.tensors
    config["attention_bias"] = any(name.endswith((".attn_q.bias", ".attn_qkv.bias")) for name in stored)
    if scaling := rope_scaling(metadata, config):
        config["rope_scaling"] = scaling


def _head_dim(metadata: Metadata, row: GgufArchitecture, config: dict[str, Any]) -> int:
    for suffix in row.head_dim_keys:
        if metadata.raw(suffix) is not None:
            return metadata.integer(suffix)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads:
        raise ModelFormatError(
            f"{metadata.path}: the hidden size {hidden} is no multiple of the {heads} attention heads"
        )
    return int(hidden // heads)


def _complete_rotation(metadata: Metadata, row: GgufArchitecture, config: dict[str, Any]) -> None:
    """How much of a head rotates: a share of it where the architecture has that, or else all of it."""
    size = config["head_dim"]
    if metadata.raw("rope.dimension_count") is None:
        rotated = size
    else:
        rotated = metadata.integer("rope.dimension_count")
    if row.rotates_part:
        if rotated > size:
            raise ModelFormatError(
                f"{metadata.path}: metadata {metadata.key('rope.dimension_count')!r} is {rotated}, more than the "
                f"{size} values of a head"
            )
        config["partial_rotary_factor"] = rotated / size
    elif rotated != size:
        raise UnsupportedModelError(
            f"{metadata.path}: metadata {metadata.key('rope.dimension_count')!r} is {rotated}, but only whole heads of "
            f"{size} values can be rotated"
        )


def _vocab_size(file: GgufFile) -> int:
    """Rows of the embedding, which is what the logits have; the token list may be shorter."""
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise ModelFormatError(f"{file.path}: the tensor 'token_embd.weight' is missing or not a matrix")
    tokens = file.metadata.get(TOKENS_KEY)
    if isinstance(tokens, GgufArray) and tokens.count > embedding.shape[0]:
        raise ModelFormatError(
            f"{file.path}: {tokens.count} tokens, but the embedding has only {embedding.shape[0]} rows"
        )
    return embedding.shape[0]
