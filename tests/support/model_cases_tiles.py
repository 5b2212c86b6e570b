"""Cases of decoders that see tiles of images, or whole images from each of their tokens."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import LLAMA3, SIGLIP_TOWER
from hardpoint_testing_torch import ParityCase

__all__ = ["TILE_CASES"]

_IDEFICS3: Mapping[str, Any] = {
    "text_config": {"model_type": "llama"},
    "vision_config": SIGLIP_TOWER,
    "image_token_id": 7,
    "scale_factor": 2,
}
_GEMMA3_TEXT: Mapping[str, Any] = {
    "model_type": "gemma3_text",
    "layer_types": ["sliding_attention", "full_attention", "sliding_attention"],
    "sliding_window": 7,
    "head_dim": 16,
    "query_pre_attn_scalar": 24,
}
_GEMMA3: Mapping[str, Any] = {
    "text_config": _GEMMA3_TEXT,
    "vision_config": {**SIGLIP_TOWER, "model_type": "siglip_vision_model", "vision_use_head": False},
    "image_token_index": 7,
    "mm_tokens_per_image": 4,
}

TILE_CASES: tuple[ParityCase, ...] = (
    ParityCase("Gemma3ForConditionalGeneration", _GEMMA3),
    ParityCase(
        "Gemma3ForConditionalGeneration",
        {
            **_GEMMA3,
            "text_config": {
                **_GEMMA3_TEXT,
                "num_attention_heads": 6,
                "head_dim": 20,
                "sliding_window": 9,
                "attention_bias": True,
                "rope_parameters": {
                    "full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 5e4},
                    "sliding_attention": {"rope_type": "default", "rope_theta": 200.0},
                },
            },
            # A rest of pixels, and one of patches that no average has.
            "vision_config": {
                **_GEMMA3["vision_config"],
                "hidden_size": 36,
                "num_attention_heads": 2,
                "image_size": 30,
                "num_channels": 2,
                "vision_use_head": True,
            },
            "mm_tokens_per_image": 9,
            "image_token_index": 0,
            "tie_word_embeddings": False,
        },
        "odd heads, biases, two rotations, images as long as the window, with rests, untied",
        block_size=16,
    ),
    ParityCase("Idefics3ForConditionalGeneration", _IDEFICS3),
    ParityCase(
        "Idefics3ForConditionalGeneration",
        {
            **_IDEFICS3,
            "text_config": {
                "model_type": "llama",
                "num_attention_heads": 6,
                "num_key_value_heads": 2,
                "head_dim": 20,
                "rope_parameters": LLAMA3,
            },
            "vision_config": {
                **SIGLIP_TOWER,
                "hidden_size": 36,
                "num_attention_heads": 2,
                "image_size": 19,
                "patch_size": 3,
            },
            "scale_factor": 3,
            "image_token_id": 0,
            "tie_word_embeddings": True,
        },
        "odd heads, Llama 3 rope, threefold squares, tied",
        block_size=16,
    ),
    ParityCase("SmolVLMForConditionalGeneration", _IDEFICS3),
    ParityCase(
        "SmolVLMForConditionalGeneration",
        {
            **_IDEFICS3,
            "text_config": {"model_type": "llama", "num_attention_heads": 8, "head_dim": 6, "attention_bias": True},
            "vision_config": {
                **SIGLIP_TOWER,
                "image_size": 25,
                "patch_size": 3,
                "num_channels": 1,
                "hidden_act": "gelu",
            },
            "scale_factor": 4,
        },
        "small heads, biases, gray tiles with a rest, fourfold squares",
        block_size=16,
    ),
)
