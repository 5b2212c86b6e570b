"""Gemma 3 with images: a SigLIP tower, its patches averaged over squares, and text that sees whole images."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.encdec import require_whole_model
from hardpoint_models.gemma3_config import read_gemma3
from hardpoint_models.image_encoders import IMAGE_INPUTS, SquareImageEncoder
from hardpoint_models.siglip_config import VisionConfig, read_siglip, section
from hardpoint_models.vision_language import VisionLanguageModel, token_id
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["Gemma3Encoder", "Gemma3VisionConfig", "create_gemma3_vision", "read_gemma3_text", "read_gemma3_vision"]

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
    """``square``: the side of the squares of patches that become one embedding; ``num_tokens``: those of an image."""

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


class Gemma3Encoder(SquareImageEncoder):
    def __init__(self, config: Gemma3VisionConfig, hidden_size: int, layers: LayerToolkit) -> None:
        super().__init__(config.image_token, config.tower, config.num_tokens, layers)
        self.config = config
        width = config.tower.hidden_size
        self.norm = layers.rms_norm(width, config.tower.norm_eps, weight_offset=1.0)
        # Stored with inputs before outputs; every rank holds all of it.
        weight = torch.empty(width, hidden_size, dtype=layers.dtype, device=layers.device)
        self.projection = torch.nn.Parameter(weight, requires_grad=False)

    def embed(self, pixels: torch.Tensor) -> torch.Tensor:
        grid, square = self.config.tower.grid, self.config.square
        states = self.tower(pixels).transpose(1, 2).unflatten(2, (grid, grid))
        averaged = F.avg_pool2d(states, square, square).flatten(2).transpose(1, 2)
        embedded = self.norm(averaged.flatten(0, 1)) @ self.projection
        return embedded.unflatten(0, (len(pixels), -1))

    def weight_rules(self) -> Sequence[WeightRule]:
        projectors = [f"{outer}multi_modal_projector" for outer in ("", "model.")]
        return [
            *self.tower_rules(),
            *(WeightRule(f"{stored}.mm_input_projection_weight", "vision.projection") for stored in projectors),
            *(WeightRule(f"{stored}.mm_soft_emb_norm.weight", "vision.norm.weight") for stored in projectors),
        ]


@plugin("model", capabilities={"tasks": ["generate"], "inputs": IMAGE_INPUTS})
def create_gemma3_vision(ctx: ModelContext, options: NoOptions) -> Model:
    """``Gemma3ForConditionalGeneration``: the sizes that see images, with and without any."""
    del options
    info, layers = require_whole_model(ctx)
    text = read_gemma3_text(info.config, info.architecture)
    config = read_gemma3_vision(info.config, info.architecture, text)
    return VisionLanguageModel(info, text, layers, Gemma3Encoder(config, text.hidden_size, layers))
