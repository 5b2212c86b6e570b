"""Cases of decoders that see images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from case_parts import CLIP_TOWER
from hardpoint_testing_torch import ParityCase

__all__ = ["VISION_CASES"]


_QWEN_TEXT: Mapping[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 2,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
}
_QWEN: Mapping[str, Any] = {
    "text_config": _QWEN_TEXT,
    "image_token_id": 7,
    "video_token_id": 11,
    "vision_start_token_id": 3,
    "vision_end_token_id": 4,
}
_QWEN_TOWER: Mapping[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 2}
_ODD_TEXT: Mapping[str, Any] = {
    **_QWEN_TEXT,
    "hidden_size": 60,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "tie_word_embeddings": True,
    "rope_parameters": {"rope_type": "default", "rope_theta": 200.0, "mrope_section": [1, 3, 1]},
}

VISION_CASES: tuple[ParityCase, ...] = (
    ParityCase(
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama"}, "vision_config": CLIP_TOWER, "image_token_index": 7},
    ),
    ParityCase(
        "LlavaForConditionalGeneration",
        {
            "text_config": {
                "model_type": "qwen2",
                "num_attention_heads": 6,
                "hidden_size": 60,
                "tie_word_embeddings": True,
                "rope_parameters": {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0},
            },
            "vision_config": {
                **CLIP_TOWER,
                "hidden_size": 36,
                "num_attention_heads": 2,
                "image_size": 9,
                "num_channels": 2,
                "hidden_act": "gelu",
            },
            "vision_feature_layer": [-1, 1],
            "vision_feature_select_strategy": "full",
            "multimodal_projector_bias": False,
            "projector_hidden_act": "gelu_pytorch_tanh",
            "image_token_index": 0,
        },
        "Qwen2 text, states of two layers with the first token, images with a rest, tied",
        block_size=16,
    ),
    ParityCase(
        "Qwen2VLForConditionalGeneration",
        {**_QWEN, "vision_config": {**_QWEN_TOWER, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2}},
    ),
    ParityCase(
        "Qwen2VLForConditionalGeneration",
        {
            **_QWEN,
            "text_config": {**_ODD_TEXT, "use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
            "vision_config": {
                **_QWEN_TOWER,
                "embed_dim": 48,
                "hidden_size": 60,
                "num_heads": 2,
                "mlp_ratio": 1,
                "in_channels": 2,
                "temporal_patch_size": 3,
                "spatial_merge_size": 3,
                "hidden_act": "gelu",
            },
        },
        "odd heads and sections, upper layers with windows, patches merged by nine, tied",
        block_size=16,
    ),
    ParityCase(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_QWEN,
            "vision_config": {
                **_QWEN_TOWER,
                "hidden_size": 32,
                "intermediate_size": 40,
                "out_hidden_size": 48,
                "window_size": 8,
                "fullatt_block_indexes": [1],
                "tokens_per_second": 2,
            },
        },
    ),
    ParityCase(
        "Qwen2_5_VLForConditionalGeneration",
        {
            **_QWEN,
            "text_config": _ODD_TEXT,
            "vision_config": {
                **_QWEN_TOWER,
                "depth": 3,
                "hidden_size": 48,
                "num_heads": 6,
                "intermediate_size": 42,
                "out_hidden_size": 60,
                "spatial_merge_size": 1,
                "window_size": 7,
                "fullatt_block_indexes": [],
                "tokens_per_second": 4,
            },
        },
        "odd heads and sections, nothing merged, windows in all layers, tied",
        block_size=16,
    ),
)
