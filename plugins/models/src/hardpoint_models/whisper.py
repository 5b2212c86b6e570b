"""Whisper: an encoder of spectrograms behind two convolutions, and a decoder of text.

Legend: N recordings, M mel bins, F frames, S = F / 2 encoder tokens, C hidden size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint.interfaces.request import Feature
from hardpoint_models.bart import bart_layer_rules
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields
from hardpoint_models.encdec import EncoderDecoderModel, require_whole_model
from hardpoint_models.encdec_config import EncoderDecoderConfig, StackConfig, divided
from hardpoint_torch_runtime.layers import ACTIVATIONS, LayerToolkit

__all__ = ["WhisperModel", "create_whisper", "read_whisper"]

INPUT_FEATURES = "input_features"
INPUTS = {"audio": {INPUT_FEATURES: "float32 [mel bins, frames]"}}
FRAMES_PER_TOKEN = 2
KERNEL_SIZE = 3


def read_whisper(config: Mapping[str, Any], architecture: str) -> EncoderDecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
    computed here."""
    fields = ConfigFields(config, architecture)
    fields.require("activation_function", tuple(ACTIVATIONS), "gelu")
    fields.require("tie_word_embeddings", (True,), True)
    fields.require("is_encoder_decoder", (True,), True)
    # It was never set in a released model, and its reference implementation reads it without using it.
    fields.require("scale_embedding", (False,), False)
    size, num_tokens = fields.integer("d_model"), fields.integer("max_source_positions")

    def stack(name: str, num_positions: int) -> StackConfig:
        return StackConfig(
            fields.integer(f"{name}_layers", most=MAX_LAYERS),
            divided(fields, size, f"{name}_attention_heads", key_bias=False),
            fields.integer(f"{name}_ffn_dim"),
            num_positions,
        )

    return EncoderDecoderConfig(
        hidden_size=size,
        vocab_size=fields.integer("vocab_size"),
        encoder=stack("encoder", num_tokens),
        decoder=stack("decoder", fields.integer("max_target_positions")),
        activation=config.get("activation_function") or "gelu",
        max_encoder_tokens=num_tokens,
        num_mel_bins=fields.integer("num_mel_bins"),
    )


class _Convolution(torch.nn.Module):
    """[N, channels, F] to [N, C, F / stride] through an activation. Every rank holds all of it."""

    def __init__(self, channels: int, stride: int, config: EncoderDecoderConfig, layers: LayerToolkit) -> None:
        super().__init__()
        weight = torch.empty(config.hidden_size, channels, KERNEL_SIZE, dtype=layers.dtype, device=layers.device)
        self.weight = torch.nn.Parameter(weight, requires_grad=False)
        self.bias = torch.nn.Parameter(torch.empty_like(weight[:, 0, 0]), requires_grad=False)
        self._stride = stride

    def forward(self, states: torch.Tensor) -> torch.Tensor:
        # The activation here is the exact one whatever the layers have.
        return F.gelu(F.conv1d(states, self.weight, self.bias, stride=self._stride, padding=KERNEL_SIZE // 2))


class WhisperModel(EncoderDecoderModel):
    """``WhisperForConditionalGeneration``. The encoder takes float32 [M, F] under ``input_features``: log-mel
    spectrograms of 30 seconds, padded, as the feature extractor of the checkpoint makes them."""

    input_kind = "a log-mel spectrogram"

    def __init__(self, info: ModelInfo, config: EncoderDecoderConfig, layers: LayerToolkit) -> None:
        super().__init__(info, config, layers)
        self._dtype = layers.dtype
        self._shape = (config.num_mel_bins or 0, config.max_encoder_tokens * FRAMES_PER_TOKEN)
        self.first_convolution = _Convolution(self._shape[0], 1, config, layers)
        self.second_convolution = _Convolution(config.hidden_size, FRAMES_PER_TOKEN, config, layers)

    def refuse_input(self, feature: Feature) -> str | None:
        wrong = self._wrong_part(feature, INPUT_FEATURES)
        if wrong is not None:
            return wrong
        states, most = feature.data[INPUT_FEATURES], self.config.max_encoder_tokens
        if feature.num_encoder_tokens != most:
            return f"a recording takes {most} encoder tokens, but num_encoder_tokens is {feature.num_encoder_tokens}"
        if states.dtype != np.float32 or states.shape != self._shape:
            return (
                f"{INPUT_FEATURES} must be float32 {list(self._shape)} (mel bins, frames), not {states.dtype} "
                f"{list(states.shape)}; pad the recording"
            )
        return None if bool(np.isfinite(states).all()) else f"{INPUT_FEATURES} holds values that are not finite"

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        arrays = np.stack([feature.data[INPUT_FEATURES] for feature in features])
        states = torch.from_numpy(arrays).to(self._device, self._dtype)
        hidden = self.second_convolution(self.first_convolution(states)).transpose(1, 2)
        lengths = [self.config.max_encoder_tokens] * len(features)
        return self.encoder(hidden.flatten(0, 1), lengths).split(lengths)

    def example_input(self, num_tokens: int) -> Feature:
        del num_tokens
        silence = np.zeros(self._shape, dtype=np.float32)
        return Feature(
            modality="audio",
            content_hash=sha256(silence.tobytes()).hexdigest(),
            offset=0,
            length=1,
            num_encoder_tokens=self.config.max_encoder_tokens,
            data={INPUT_FEATURES: silence},
        )

    def weight_rules(self) -> Sequence[WeightRule]:
        return [
            *bart_layer_rules(key_bias=False),
            *(WeightRule(f"model.{part}.layer_norm.*", f"{part}.final_norm.*") for part in ("encoder", "decoder")),
            WeightRule("model.encoder.conv1.*", "first_convolution.*"),
            WeightRule("model.encoder.conv2.*", "second_convolution.*"),
            WeightRule("model.decoder.embed_tokens.weight", "shared.weight"),
            WeightRule("proj_out.weight", None),
        ]


@plugin("model", capabilities={"tasks": ["generate"], "inputs": INPUTS})
def create_whisper(ctx: ModelContext, options: NoOptions) -> Model:
    """``WhisperForConditionalGeneration``: all sizes, the distilled ones among them."""
    del options
    info, layers = require_whole_model(ctx)
    return WhisperModel(info, read_whisper(info.config, info.architecture), layers)
