"""Cases of decoders that see images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_testing_torch import ParityCase

__all__ = ["VISION_CASES"]

_CLIP: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}

VISION_CASES: tuple[ParityCase, ...] = (
    ParityCase(
        "LlavaForConditionalGeneration",
        {"text_config": {"model_type": "llama"}, "vision_config": _CLIP, "image_token_index": 7},
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
                **_CLIP,
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
)
