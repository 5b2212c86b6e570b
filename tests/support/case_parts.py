"""Parts of configurations that cases of several families share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

__all__ = ["CLIP_TOWER", "LLAMA3", "NO_IDS", "ODD_HEADS", "ROUTED", "SIGLIP_TOWER", "YARN"]

LLAMA3: Mapping[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 10000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 32,
}
YARN: Mapping[str, Any] = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
}
ODD_HEADS: Mapping[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20}
NO_IDS: Mapping[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
"""The usual ones are beyond a tiny vocabulary."""
ROUTED: Mapping[str, float] = {"bfloat16": 0.25}
"""Rounding may choose another expert, which changes all that follows."""
CLIP_TOWER: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}
SIGLIP_TOWER: Mapping[str, Any] = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "image_size": 16,
    "patch_size": 4,
}
"""Without a type: Idefics 3 and SmolVLM have towers of the kind as well."""
