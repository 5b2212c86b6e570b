"""The rules of the kind ``model`` on decoders that see images, computing text."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import ModelSuite

pytestmark = pytest.mark.slow

CLIP: Mapping[str, Any] = {
    "model_type": "clip_vision_model",
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "image_size": 12,
    "patch_size": 4,
}


class TestLlava(ModelSuite):
    plugin: ClassVar[str | None] = "LlavaForConditionalGeneration"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "text_config": {"model_type": "llama", "num_hidden_layers": 2},
        "vision_config": CLIP,
        "image_token_index": 7,
    }
    splits_into_stages: ClassVar[bool] = False
    unknown_config: ClassVar[Mapping[str, Any]] = {
        "projector_hidden_act": "of_nobody",
        "vision_feature_select_strategy": "of_nobody",
    }
