"""Rotary settings from the metadata and the tensors of a GGUF file, in the Hugging Face spelling."""

from __future__ import annotations

from collections.abc import Mapping
from math import log
from typing import Any

import numpy as np

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_model_io.formats.gguf_dequant import dequantize
from hardpoint_model_io.formats.gguf_metadata import Metadata

__all__ = ["rope_scaling"]

# Written by converters of the Llama 3.1 and later scheme; the factors they produce identify it.
_LLAMA3_SCALING = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
_MAX_PAIRS = 1 << 16
_LONG, _SHORT = "rope_factors_long.weight", "rope_factors_short.weight"
_FIELDS = {
    "factor": "factor",
    "attn_factor": "attention_factor",
    "yarn_beta_fast": "beta_fast",
    "yarn_beta_slow": "beta_slow",
}


def rope_scaling(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """``rope_scaling`` of the model, None without one. Raises ``ModelFormatError``, ``UnsupportedModelError``."""
    if "rope_theta" not in config:
        return None  # A family that does not rotate; whatever the file says of rotation has no effect.
    if metadata.has(_LONG, _SHORT):
        return _longrope(metadata, config)
    scaling = _stated_scaling(metadata)
    # Files older than the scaling keys have the factor of linear scaling alone; a factor without a type is linear too.
    if metadata.raw("rope.scale_linear") is not None and "factor" not in scaling:
        scaling["factor"] = metadata.number("rope.scale_linear")
    is_stretched = scaling.get("factor", 1.0) != 1.0
    kind = metadata.text("rope.scaling.type") or ("linear" if is_stretched else "none")
    if kind == "none":
        return _scaling_from_factors(metadata, config)
    if kind not in ("linear", "yarn"):
        raise UnsupportedModelError(
            f"{metadata.path}: rotary scaling {kind!r} is not supported; supported: linear, yarn"
        )
    if "factor" not in scaling:
        raise ModelFormatError(
            f"{metadata.path}: metadata {metadata.key('rope.scaling.factor')!r} is missing; the file is incomplete"
        )
    if "attention_factor" in scaling:
        if kind == "linear":
            raise UnsupportedModelError(
                f"{metadata.path}: {metadata.key('rope.scaling.attn_factor')!r} is only supported with yarn"
            )
        # The file's number multiplies what yarn itself prescribes; in a config.json it replaces that.
        scaling["attention_factor"] *= 0.1 * log(max(scaling["factor"], 1.0)) + 1.0
    return {"rope_type": kind, **scaling}


def _stated_scaling(metadata: Metadata) -> dict[str, Any]:
    scaling: dict[str, Any] = {
        name: metadata.number(f"rope.scaling.{key}")
        for key, name in _FIELDS.items()
        if metadata.raw(f"rope.scaling.{key}") is not None
    }
    if metadata.raw("rope.scaling.original_context_length") is not None:
        scaling["original_max_position_embeddings"] = metadata.integer("rope.scaling.original_context_length")
    return scaling


def _scaling_from_factors(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any] | None:
    """The scheme behind per-frequency divisors stored as a tensor, recognized by recomputing them."""
    if not metadata.has("rope_freqs.weight"):
        return None
    stored = _factors(metadata, "rope_freqs.weight")
    factor = float(stored.max())
    frequencies = config["rope_theta"] ** (-np.arange(0, config["head_dim"], 2, dtype=np.float64) / config["head_dim"])
    context = _LLAMA3_SCALING["original_max_position_embeddings"]
    low, high = _LLAMA3_SCALING["low_freq_factor"], _LLAMA3_SCALING["high_freq_factor"]
    smooth = np.clip((context * frequencies / (2 * np.pi) - low) / (high - low), 0.0, 1.0)
    expected = 1.0 / ((1.0 - smooth) / factor + smooth)
    if stored.shape != expected.shape or not np.allclose(stored, expected, rtol=1e-3):
        raise UnsupportedModelError(
            f"{metadata.path}: the rotary factors in 'rope_freqs.weight' follow no known scheme (known: Llama 3)"
        )
    return {"rope_type": "llama3", "factor": factor, **_LLAMA3_SCALING}


def _longrope(metadata: Metadata, config: Mapping[str, Any]) -> dict[str, Any]:
    """Divisors for contexts within and beyond the trained length. The type need not be stated: the tensors tell."""
    kind = metadata.text("rope.scaling.type")
    if kind not in (None, "none", "longrope"):
        raise UnsupportedModelError(f"{metadata.path}: rotary scaling {kind!r} with factors for long contexts")
    for name in (_LONG, _SHORT):
        if not metadata.has(name):
            raise ModelFormatError(f"{metadata.path}: the tensor {name!r} is missing; the file is incomplete")
    original = metadata.integer("rope.scaling.original_context_length")
    scaling: dict[str, Any] = {
        "rope_type": "longrope",
        "long_factor": [float(factor) for factor in _factors(metadata, _LONG)],
        "short_factor": [float(factor) for factor in _factors(metadata, _SHORT)],
        "original_max_position_embeddings": original,
        "factor": config["max_position_embeddings"] / original,
    }
    if metadata.raw("rope.scaling.attn_factor") is not None:
        scaling["attention_factor"] = metadata.number("rope.scaling.attn_factor")
    return scaling


def _factors(metadata: Metadata, name: str) -> np.ndarray:
    """One for each pair of a head, float32. Raises ``ModelFormatError`` for what cannot be a list of them."""
    tensor = metadata.file.tensors[name]
    if len(tensor.shape) != 1 or tensor.shape[0] > _MAX_PAIRS:
        raise ModelFormatError(
            f"{metadata.path}: the tensor {name!r} of shape {list(tensor.shape)} is no list of rotary factors, one for "
            "each pair of a head; the file is corrupt, download it again"
        )
    return dequantize(metadata.file.raw(tensor), tensor.type, tensor.shape)
