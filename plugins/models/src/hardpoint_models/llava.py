"""LLaVA: states of a CLIP tower, projected to what the language model sees."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_models.encdec import require_whole_model
from hardpoint_models.image_encoders import IMAGE_INPUTS, SquareImageEncoder
from hardpoint_models.siglip_config import VisionConfig, read_siglip, section
from hardpoint_models.vision_language import VisionLanguageModel, read_text_config, token_id
from hardpoint_torch_runtime.layers import ACTIVATIONS, LayerToolkit

__all__ = ["LlavaConfig", "LlavaEncoder", "create_llava", "read_llava"]

MAX_DEPTHS = 64
_SIZES: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
}
_TOWERS: Mapping[str, Mapping[str, Any]] = {
    "clip_vision_model": {**_SIZES, "patch_size": 32, "hidden_act": "quick_gelu", "layer_norm_eps": 1e-5},
    "siglip_vision_model": {**_SIZES, "patch_size": 16, "hidden_act": "gelu_pytorch_tanh"},
}
"""Kinds of towers, and what files leave out of ``vision_config``."""


@dataclass(frozen=True, slots=True)
class LlavaConfig:
    """Attributes:
    tower: with as many layers as are needed, of ``num_stored`` in the files.
    depths: behind how many layers of the tower states are taken, one set beside the other.
    drops_class_token: the first token of an image is left out.
    activation: between the two layers of the projector.
    """

    tower: VisionConfig
    num_stored: int
    image_token: int
    depths: tuple[int, ...]
    drops_class_token: bool
    activation: str
    projector_bias: bool

    @property
    def num_tokens(self) -> int:
        """Embeddings of one image."""
        return self.tower.num_positions - self.drops_class_token


def read_llava(config: Mapping[str, Any], architecture: str, vocab_size: int) -> LlavaConfig:
    """Raises ``ModelFormatError`` for malformed fields, ``UnsupportedModelError`` for what is not computed here."""
    fields = ConfigFields(config, architecture)
    tower = _read_tower(section(config, "vision_config", architecture), architecture)
    fields.require("vision_feature_select_strategy", ("default", "full"), "default")
    fields.require("projector_hidden_act", tuple(ACTIVATIONS), "gelu")
    drops = config.get("vision_feature_select_strategy") != "full"
    if tower.num_positions - drops < 1:
        raise ModelFormatError(f"{architecture}: without its first token an image of one patch has nothing left")
    depths = _depths(config.get("vision_feature_layer"), tower.num_layers, architecture)
    return LlavaConfig(
        tower=replace(tower, num_layers=max(depths)),
        num_stored=tower.num_layers,
        image_token=token_id(config, ("image_token_index", "image_token_id"), vocab_size, architecture, 32000),
        depths=depths,
        drops_class_token=drops,
        activation=config.get("projector_hidden_act") or "gelu",
        projector_bias=fields.flag("multimodal_projector_bias", True),
    )


def _read_tower(config: Mapping[str, Any], architecture: str) -> VisionConfig:
    kind = config.get("model_type", "clip_vision_model")
    if not isinstance(kind, str) or kind not in _TOWERS:
        raise UnsupportedModelError(
            f"{architecture}: the vision model is of type {shown(kind)}; supported: {', '.join(_TOWERS)}"
        )
    read = read_siglip(config, architecture, model_types=(kind,), defaults=_TOWERS[kind])
    is_clip = kind == "clip_vision_model"
    # States are taken before the norm behind the last layer.
    return replace(read, patch_bias=not is_clip, has_class_token=is_clip, has_input_norm=is_clip, has_output_norm=False)


def _depths(given: Any, num_layers: int, architecture: str) -> tuple[int, ...]:
    """Negative ones count from the last layer, which is -1."""
    listed = given if isinstance(given, list | tuple) else [-2 if given is None else given]
    is_known = 1 <= len(listed) <= MAX_DEPTHS and all(
        type(one) is int and -num_layers - 1 <= one <= num_layers for one in listed
    )
    if not is_known:
        raise ModelFormatError(
            f"{architecture}: config field 'vision_feature_layer' is {shown(given)}; one or several of "
            f"{-num_layers - 1} to {num_layers} are needed"
        )
    return tuple(one if one >= 0 else num_layers + 1 + one for one in listed)


class LlavaEncoder(SquareImageEncoder):
    def __init__(self, config: LlavaConfig, hidden_size: int, layers: LayerToolkit) -> None:
        super().__init__(config.image_token, config.tower, config.num_tokens, layers)
        self.config = config
        width = config.tower.hidden_size * len(config.depths)
        bias = config.projector_bias
        self.first = layers.column_linear("vision.first", width, hidden_size, bias=bias)
        self.activation = layers.activation(config.activation)
        self.second = layers.row_linear("vision.second", hidden_size, hidden_size, bias=bias)

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        states = torch.cat(self.tower.states(pixels, self.config.depths), dim=-1)
        if self.config.drops_class_token:
            states = states[:, 1:]
        projected = self.second(self.activation(self.first(states.flatten(0, 1))))
        return projected.unflatten(0, (len(pixels), -1))

    def weight_rules(self) -> Sequence[WeightRule]:
        linear = {"linear_1": "first", "linear_2": "second"}
        return [
            *self.tower_rules(self.config.num_stored),
            *(
                WeightRule(f"{prefix}multi_modal_projector.{stored}.*", f"vision.{name}.*")
                for prefix in ("", "model.")
                for stored, name in linear.items()
            ),
        ]


@plugin("model", capabilities={"tasks": ["generate"], "inputs": IMAGE_INPUTS})
def create_llava(ctx: ModelContext, options: NoOptions) -> Model:
    """``LlavaForConditionalGeneration``: LLaVA 1.5 and its like, over Llama, Mistral or Qwen2."""
    del options
    info, layers = require_whole_model(ctx)
    text = read_text_config(info.config, info.architecture)
    config = read_llava(info.config, info.architecture, text.vocab_size)
    return VisionLanguageModel(info, text, layers, LlavaEncoder(config, text.hidden_size, layers))
