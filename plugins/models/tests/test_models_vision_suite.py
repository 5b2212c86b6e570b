"""The rules of the kind ``model`` on decoders that see images, computing text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from case_parts import CLIP_TOWER, SIGLIP_TOWER
from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow


class TestLlava(ModelSuite):
    plugin: ClassVar[str | None] = "LlavaForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
        "vision_config": CLIP_TOWER,
        "image_token_index": 7,
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {
        "projector_hidden_act": "of_nobody",
        "vision_feature_select_strategy": "of_nobody",
    }


SIGLIP: Mapping[str, Any] = {**SIGLIP_TOWER, "model_type": "siglip_vision_model"}


class TestGemma3(ModelSuite):
    plugin: ClassVar[str | None] = "Gemma3ForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "text_config": {
            "num_hidden_layers": 2,
            "layer_types": ["sliding_attention", "full_attention"],
            "sliding_window": 7,
            "head_dim": 16,
        },
        "vision_config": SIGLIP,
        "image_token_index": 7,
        "mm_tokens_per_image": 4,
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"vision_config": "of_nobody", "mm_tokens_per_image": 7}


class TestSmolVLM(ModelSuite):
    plugin: ClassVar[str | None] = "SmolVLMForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
        "vision_config": {**SIGLIP, "model_type": "smolvlm_vision"},
        "image_token_id": 7,
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"vision_config": "of_nobody", "scale_factor": 3}


class TestIdefics3(ModelSuite):
    plugin: ClassVar[str | None] = "Idefics3ForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **TestSmolVLM.checkpoint_config,
        "vision_config": {**SIGLIP, "model_type": "idefics3_vision"},
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = TestSmolVLM.unknown_config


QWEN: Mapping[str, Any] = {
    "text_config": {
        "num_hidden_layers": 2,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": [2, 2, 2]},
    },
    "image_token_id": 7,
    "video_token_id": 11,
}
TOWER: Mapping[str, Any] = {"depth": 2, "num_heads": 4, "patch_size": 2}


class TestQwen2VL(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2VLForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **QWEN,
        "vision_config": {**TOWER, "embed_dim": 32, "hidden_size": 48, "mlp_ratio": 2},
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"vision_config": "of_nobody"}


class TestQwen25VL(ModelSuite):
    plugin: ClassVar[str | None] = "Qwen2_5_VLForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        **QWEN,
        "vision_config": {
            **TOWER,
            "hidden_size": 32,
            "intermediate_size": 40,
            "out_hidden_size": 48,
            "window_size": 8,
            "fullatt_block_indexes": [1],
        },
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {"vision_config": "of_nobody"}
