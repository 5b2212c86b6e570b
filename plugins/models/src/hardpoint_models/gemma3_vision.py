"""Gemma 3 with images: a SigLIP tower, its patches averaged over squares, and text that sees whole images.

Legend: N images, H channels, S side of an image in pixels, g patches of it, D width of the tower, C hidden size of the
language model, k the side of the squares of patches that become one embedding, P embeddings of an image.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Feature
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.encdec import require_whole_model
from hardpoint_models.gemma3_config import read_gemma3
from hardpoint_models.siglip import VisionTower, vision_rules
from hardpoint_models.siglip_config import VisionConfig, read_siglip, section
from hardpoint_models.vision_language import (
    PIXEL_VALUES,
    MediaEncoder,
    VisionLanguageModel,
    make_feature,
    refuse_array,
    token_id,
)
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["Gemma3Encoder", "Gemma3VisionConfig", "create_gemma3_vision", "read_gemma3_text", "read_gemma3_vision"]

IMAGES_AT_ONCE = 4
"""So many go through the tower together: an image has 16 times as many patches as embeddings."""

_TOWER_DEFAULTS: Mapping[str, Any] = {
    "hidden_size": 768,
    "intermediate_size": 3072,
    "num_hidden_layers": 12,
    "num_attention_heads": 12,
    "num_channels": 3,
    "image_size": 224,
    "patch_size": 16,
}
_TEXT_DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 262_208,
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
}
"""Files leave out of ``text_config`` what is as in these; the published ones name little more than three sizes."""


@dataclass(frozen=True, slots=True)
class Gemma3VisionConfig:
    """``square``: k. ``num_tokens``: P."""

    tower: VisionConfig
    image_token: int
    square: int
    num_tokens: int


def read_gemma3_text(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """That of the language model. Raises as ``read_gemma3``, and ``UnsupportedModelError`` for other kinds."""
    text = section(config, "text_config", architecture)
    ConfigFields(text, architecture).require("model_type", ("gemma3_text",), "gemma3_text")
    missing = {name: value for name, value in _TEXT_DEFAULTS.items() if text.get(name) is None}
    # The head is the model's, not the language model's.
    is_tied = ConfigFields(config, architecture).flag("tie_word_embeddings", True)
    read = read_gemma3({**text, **missing, "tie_word_embeddings": is_tied}, architecture)
    return replace(read, sees_whole_media=True)


def read_gemma3_vision(config: Mapping[str, Any], architecture: str, text: DecoderConfig) -> Gemma3VisionConfig:
    """Raises ``ModelFormatError`` for malformed fields and sizes that do not fit each other, ``UnsupportedModelError``
    for what is not computed here."""
    tower = read_siglip(
        section(config, "vision_config", architecture),
        architecture,
        model_types=("siglip_vision_model",),
        defaults=_TOWER_DEFAULTS,
    )
    num_tokens = ConfigFields(config, architecture).integer("mm_tokens_per_image", 256)
    square = tower.grid // max(int(num_tokens**0.5), 1)
    if square < 1 or (tower.grid // square) ** 2 != num_tokens:
        raise ModelFormatError(
            f"{architecture}: images of {tower.grid} patches a side (image_size={tower.image_size}, "
            f"patch_size={tower.patch_size}) cannot be averaged to mm_tokens_per_image={num_tokens}"
        )
    windows = [window for window in text.windows if window is not None]
    if windows and num_tokens > min(windows):
        # Such windows would hide the beginning of an image from its end, as no backend computes it.
        raise UnsupportedModelError(
            f"{architecture}: config field 'mm_tokens_per_image' is {num_tokens}; supported: images that fit into the "
            f"sliding window of {min(windows)} tokens"
        )
    names = ("image_token_index", "image_token_id")
    return Gemma3VisionConfig(
        tower, token_id(config, names, text.vocab_size, architecture, 262_144), square, num_tokens
    )


class Gemma3Encoder(MediaEncoder):
    """Takes float32 [H, S, S] under ``pixel_values``, one image per feature."""

    def __init__(self, config: Gemma3VisionConfig, hidden_size: int, layers: LayerToolkit) -> None:
        super().__init__()
        self.config = config
        self._dtype, self._device = layers.dtype, layers.device
        self.tower = VisionTower("vision.tower", config.tower, layers)
        width = config.tower.hidden_size
        self.norm = layers.rms_norm(width, config.tower.norm_eps, weight_offset=1.0)
        # Stored with inputs before outputs; every rank holds all of it.
        weight = torch.empty(width, hidden_size, dtype=layers.dtype, device=layers.device)
        self.projection = torch.nn.Parameter(weight, requires_grad=False)

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return frozenset((self.config.image_token,))

    def placeholder_id(self, feature: Feature) -> int | None:
        return self.config.image_token if feature.modality == "image" else None

    @property
    def _shape(self) -> tuple[int, int, int]:
        tower = self.config.tower
        return tower.num_channels, tower.image_size, tower.image_size

    def refuse(self, feature: Feature) -> str | None:
        if set(feature.data) - {PIXEL_VALUES}:
            return f"it brings {', '.join(sorted(feature.data))[:100]}; this model takes {PIXEL_VALUES!r} alone"
        if feature.length != self.config.num_tokens:
            return f"it has {feature.length} positions; an image takes {self.config.num_tokens} of this model"
        return refuse_array(feature, PIXEL_VALUES, "float32", self._shape)

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        embeddings: list[torch.Tensor] = []
        for start in range(0, len(features), IMAGES_AT_ONCE):
            arrays = np.stack([one.data[PIXEL_VALUES] for one in features[start : start + IMAGES_AT_ONCE]])
            embeddings.extend(self._embed(torch.from_numpy(arrays).to(self._device, self._dtype)))
        return embeddings

    def _embed(self, pixels: torch.Tensor) -> torch.Tensor:
        """[N, H, S, S] to [N, P, C]."""
        grid, square = self.config.tower.grid, self.config.square
        states = self.tower(pixels).transpose(1, 2).unflatten(2, (grid, grid))
        averaged = F.avg_pool2d(states, square, square).flatten(2).transpose(1, 2)
        embedded = self.norm(averaged.flatten(0, 1)) @ self.projection
        return embedded.unflatten(0, (len(pixels), -1))

    def example(self, num_tokens: int) -> Feature:
        del num_tokens
        return make_feature({PIXEL_VALUES: np.zeros(self._shape, dtype=np.float32)}, self.config.num_tokens)

    def weight_rules(self) -> Sequence[WeightRule]:
        towers = [f"{outer}vision_tower{inner}" for outer in ("", "model.") for inner in (".vision_model", "")]
        projectors = [f"{outer}multi_modal_projector" for outer in ("", "model.")]
        return [
            *(rule for stored in towers for rule in vision_rules(stored, "vision.tower", self.config.tower)),
            # What SigLIP pools states with; here squares of patches are averaged.
            *(WeightRule(f"{stored}.head.{rest}", None) for stored in towers for rest in ("*", "*.*", "*.*.*")),
            *(WeightRule(f"{stored}.mm_input_projection_weight", "vision.projection") for stored in projectors),
            *(WeightRule(f"{stored}.mm_soft_emb_norm.weight", "vision.norm.weight") for stored in projectors),
        ]


@plugin("model", capabilities={"tasks": ["generate"]})
def create_gemma3_vision(ctx: ModelContext, options: NoOptions) -> Model:
    """``Gemma3ForConditionalGeneration``: the sizes that see images, with and without any."""
    del options
    info, layers = require_whole_model(ctx)
    text = read_gemma3_text(info.config, info.architecture)
    config = read_gemma3_vision(info.config, info.architecture, text)
    return VisionLanguageModel(info, text, layers, Gemma3Encoder(config, text.hidden_size, layers))
