"""Configuration of a model from the metadata of its GGUF file, in the Hugging Face spelling."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import numpy as np

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf import GgufArray, GgufFile
from hardpoint_model_io.formats.gguf_dequant import dequantize
from hardpoint_model_io.formats.gguf_names import GgufArchitecture, MetadataField

MAX_FIELD_VALUE = 1 << 30
SENTENCE_FIELD = "sentence_embedding"
"""The field of a configuration that says how texts are pooled; no ``config.json`` has it."""
TOKENS_KEY = "tokenizer.ggml.tokens"
# Written by converters of the Llama 3.1 and later scheme; the factors they produce identify it.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}


def build_config(file: GgufFile, row: GgufArchitecture) -> dict[str, Any]:
    """``config.json`` fields of the model in ``file``. Raises ``ModelFormatError`` naming file and metadata key."""
    config: dict[str, Any] = {"architectures": [row.architecture], "model_type": row.model_type}
    config.update(row.constants)
    for entry in row.fields:
        value = _field_value(file, row, entry)
        if value is not None:
            config[entry.name] = value
    config.setdefault("num_key_value_heads", config["num_attention_heads"])
    config["head_dim"] = _head_dim(file, row, config)
    _check_whole_heads_rotate(file, row, config)
    config["vocab_size"] = _vocab_size(file)
    config["tie_word_embeddings"] = "output.weight" not in file.tensors
    config["attention_bias"] = "blk.0.attn_q.bias" in file.tensors
    if scaling := _rope_scaling(file, row, config):
        config["rope_scaling"] = scaling
    if row.gguf == "gemma3":
        _complete_gemma3(config)
    if row.gguf == "bert":
        _complete_bert(file, config)
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


def _field_value(file: GgufFile, row: GgufArchitecture, entry: MetadataField) -> Any:
    key = f"{row.gguf}.{entry.key}"
    value = file.metadata.get(key)
    if value is None:
        if entry.required:
            raise ModelFormatError(f"{file.path}: metadata {key!r} is missing; the file is incomplete")
        return entry.default
    if isinstance(value, GgufArray):
        # Some converters repeat one value for every layer.
        distinct = np.unique(file.numbers(key))
        if distinct.size != 1:
            raise UnsupportedModelError(f"{file.path}: metadata {key!r} differs between layers, which is not supported")
        value = distinct[0].item()
    return _checked(file, key, value, entry.kind)


def _checked(file: GgufFile, key: str, value: Any, kind: type) -> Any:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    if not is_number or (kind is int and not isinstance(value, int)) or not 0 < value <= MAX_FIELD_VALUE:
        raise ModelFormatError(f"{file.path}: metadata {key!r} is {value!r}, not a usable number")
    # Stored as float32; the nearest short decimal is what the model's author wrote (1e-05, not 9.99e-06).
    return float(str(np.float32(value))) if kind is float else value


def _head_dim(file: GgufFile, row: GgufArchitecture, config: Mapping[str, Any]) -> int:
    for suffix in row.head_dim_keys:
        key = f"{row.gguf}.{suffix}"
        if key in file.metadata:
            return int(_checked(file, key, file.metadata[key], int))
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    if hidden % heads:
        raise ModelFormatError(f"{file.path}: the hidden size {hidden} is no multiple of the {heads} attention heads")
    return int(hidden // heads)


def _check_whole_heads_rotate(file: GgufFile, row: GgufArchitecture, config: Mapping[str, Any]) -> None:
    key = f"{row.gguf}.rope.dimension_count"
    if file.metadata.get(key, config["head_dim"]) != config["head_dim"]:
        raise UnsupportedModelError(
            f"{file.path}: metadata {key!r} is {file.metadata[key]!r}, but only whole heads of {config['head_dim']} "
            "values can be rotated"
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


def _rope_scaling(file: GgufFile, row: GgufArchitecture, config: Mapping[str, Any]) -> dict[str, Any] | None:
    prefix = f"{row.gguf}.rope"
    scaling = _stated_scaling(file, prefix)
    # Files older than the scaling keys have the factor of linear scaling alone; a factor without a type is linear too.
    old = file.metadata.get(f"{prefix}.scale_linear")
    if old is not None and "factor" not in scaling:
        scaling["factor"] = _checked(file, f"{prefix}.scale_linear", old, float)
    is_stretched = scaling.get("factor", 1.0) != 1.0
    kind = file.metadata.get(f"{prefix}.scaling.type", "linear" if is_stretched else "none")
    if kind == "none":
        return _scaling_from_factors(file, config)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(f"{file.path}: rotary scaling {kind!r} is not supported; supported: linear, yarn")
    if "factor" not in scaling:
        raise ModelFormatError(f"{file.path}: metadata '{prefix}.scaling.factor' is missing; the file is incomplete")
    if "attention_factor" in scaling:
        if kind == "linear":
            raise UnsupportedModelError(f"{file.path}: '{prefix}.scaling.attn_factor' is only supported with yarn")
        # The file's number multiplies what yarn itself prescribes; in a config.json it replaces that.
        scaling["attention_factor"] *= 0.1 * log(max(scaling["factor"], 1.0)) + 1.0
    return {"rope_type": kind, **scaling}


def _stated_scaling(file: GgufFile, prefix: str) -> dict[str, Any]:
    scaling: dict[str, Any] = {}
    for key, name, number in (("factor", "factor", float), ("attn_factor", "attention_factor", float),
                              ("original_context_length", "original_max_position_embeddings", int),
                              ("yarn_beta_fast", "beta_fast", float),
                              ("yarn_beta_slow", "beta_slow", float)):  # fmt: skip
        if (value := file.metadata.get(f"{prefix}.scaling.{key}")) is not None:
            scaling[name] = _checked(file, f"{prefix}.scaling.{key}", value, number)
    return scaling


def _scaling_from_factors(file: GgufFile, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scheme behind per-frequency divisors stored as a tensor, recognized by recomputing them."""
    tensor = file.tensors.get("rope_freqs.weight")
    if tensor is None:
        return None
    stored = dequantize(file.raw(tensor), tensor.type, tensor.shape)
    factor = float(stored.max())
    frequencies = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2, dtype=np.float64) / config["head_dim"])
    context = _LLAMA3_SCALING["original_max_position_embeddings"]
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    smooth = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{file.path}: the rotary factors in 'rope_freqs.weight' follow no known scheme (known: Llama 3)"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


_POOLING_METHODS = {1: "mean", 2: "cls", 3: "last"}
"""Values of ``bert.pooling_type`` that make one vector of a text."""


def _complete_bert(file: GgufFile, config: dict[str, Any]) -> None:
    """How many kinds of tokens there are, and how texts are pooled. Readers of these files normalize embeddings."""
    types = file.tensors.get("token_types.weight")
    if types is None or len(types.shape) != 2:
        raise ModelFormatError(f"{file.path}: the tensor 'token_types.weight' is missing or not a matrix")
    config["type_vocab_size"] = types.shape[0]
    pooling = file.metadata.get("bert.pooling_type", 0)
    if pooling != 0:
        method = _POOLING_METHODS.get(pooling, f"type {pooling!r}") if isinstance(pooling, int) else repr(pooling)
        config[SENTENCE_FIELD] = {"pooling_method": method, "normalizes": True, "other_modules": []}


def _complete_gemma3(config: dict[str, Any]) -> None:
    layers, pattern = config["num_hidden_layers"], config["sliding_window_pattern"]
    config["layer_types"] = [
        "full_attention" if (index + 1) % pattern == 0 else "sliding_attention" for index in range(layers)
    ]
    # The 27B size alone scales queries by the model width per head.
    wide = layers == 62
    config["query_pre_attn_scalar"] = (
        config["hidden_size"] // config["num_attention_heads"] if wide else config["head_dim"]
    )
