"""Decoders that see images: a language model, and a part that makes embeddings of what a prompt shows.

A new one takes three things, of which the runner needs no more:

- a :class:`MediaEncoder`: what arrays a :class:`~hardpoint.interfaces.Feature` brings and how they become embeddings
  ``[length, C]``, one for each of the placeholders that the feature covers;
- a :class:`VisionLanguageModel` (mostly this class as it is) over the configuration of its language model;
- weight rules of the encoder, and under which names checkpoints keep the language model.

The scheduler plans what is encoded when; the runner keeps outputs by content and puts them in their places. Legend: C
hidden size of the language model.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from hashlib import sha256
from typing import Any

import numpy as np
import torch

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import WeightRule
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint.interfaces.request import Feature
from hardpoint_models.config_fields import MAX_INTEGER, shown
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant
from hardpoint_models.llama import LLAMA, MISTRAL, QWEN2, QWEN3
from hardpoint_models.siglip_config import section
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = [
    "MediaEncoder",
    "VisionLanguageModel",
    "content_hash",
    "make_feature",
    "read_text_config",
    "refuse_array",
    "token_id",
]

PIXEL_VALUES = "pixel_values"

_USUAL_SIZES: Mapping[str, Any] = {"hidden_size": 4096, "num_hidden_layers": 32, "num_attention_heads": 32}
_TEXT_DEFAULTS: Mapping[str, tuple[DecoderVariant, Mapping[str, Any]]] = {
    "llama": (LLAMA, {**_USUAL_SIZES, "intermediate_size": 11008}),
    "mistral": (MISTRAL, {**_USUAL_SIZES, "num_key_value_heads": 8, "intermediate_size": 14336}),
    "qwen2": (QWEN2, {**_USUAL_SIZES, "num_key_value_heads": 32, "intermediate_size": 22016}),
    "qwen3": (QWEN3, {**_USUAL_SIZES, "num_key_value_heads": 32, "intermediate_size": 22016, "head_dim": 128}),
}
"""By ``model_type``. Files leave out of ``text_config`` what is as in the first model of its kind."""


class MediaEncoder(torch.nn.Module):
    """Makes embeddings of media. Registered as ``vision`` of the model, so its parameters are named ``vision.*``."""

    def placeholder_id(self, feature: Feature) -> int | None:
        """The token id that stands at each position of ``feature``; None for media that are not taken."""
        raise NotImplementedError

    @property
    def placeholder_ids(self) -> frozenset[int]:
        """Those of all kinds of media."""
        raise NotImplementedError

    def refuse(self, feature: Feature) -> str | None:
        """Why ``feature``, of a kind that is taken, does not fit, in words a client may see, or None: array names,
        shapes, dtypes, values, and a ``length`` unlike the number of embeddings. Sizes are looked at before data."""
        raise NotImplementedError

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        """Of each [its ``length``, C], on the model's device and in its dtype. None of them was refused."""
        raise NotImplementedError

    def example(self, num_tokens: int) -> Feature:
        """A made-up item of about ``num_tokens`` embeddings, at most where that is possible."""
        raise NotImplementedError

    def weight_rules(self) -> Sequence[WeightRule]:
        """Targets begin with ``vision.``."""
        raise NotImplementedError


class VisionLanguageModel(DecoderModel):
    """A decoder with an encoder of media (see ``MediaModel`` of the torch runtime); pipelines of stages are refused.

    ``text_prefixes``: what stands in checkpoints in the place of ``model.`` before the names of the language model's
    weights, and ``head_prefixes`` before ``lm_head.``; alternatives, of which a checkpoint has one.
    """

    text_prefixes: Sequence[str] = ("language_model.model.", "model.language_model.")
    head_prefixes: Sequence[str] = ("language_model.", "")

    def __init__(self, info: ModelInfo, config: DecoderConfig, layers: LayerToolkit, vision: MediaEncoder) -> None:
        super().__init__(info, config, layers, None)
        self.vision = vision

    @property
    def placeholder_ids(self) -> frozenset[int]:
        return self.vision.placeholder_ids

    def placeholder_id(self, feature: Feature) -> int | None:
        return self.vision.placeholder_id(feature)

    def refuse_input(self, feature: Feature) -> str | None:
        return self.vision.refuse(feature)

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        return self.vision.encode(features)

    def example_input(self, num_tokens: int) -> Feature:
        return self.vision.example(num_tokens)

    def weight_rules(self) -> Sequence[WeightRule]:
        return [*self.vision.weight_rules(), *self._renamed(super().weight_rules())]

    def _renamed(self, rules: Sequence[WeightRule]) -> Iterator[WeightRule]:
        for rule in rules:
            is_text = rule.pattern.startswith("model.")
            for prefix in self.text_prefixes if is_text else self.head_prefixes:
                yield replace(rule, pattern=prefix + rule.pattern.removeprefix("model."))


def read_text_config(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """That of the language model, which ``text_config`` describes. Whether the head is tied is said there or outside.

    Raises ``UnsupportedModelError`` for kinds of language models that are not computed here, and what
    ``DecoderConfig.read`` raises.
    """
    text = section(config, "text_config", architecture)
    kind = text.get("model_type", "llama")
    if not isinstance(kind, str) or kind not in _TEXT_DEFAULTS:
        raise UnsupportedModelError(
            f"{architecture}: the language model is of type {shown(kind)}; supported: {', '.join(_TEXT_DEFAULTS)}"
        )
    variant, defaults = _TEXT_DEFAULTS[kind]
    is_tied = text.get("tie_word_embeddings") or config.get("tie_word_embeddings") or False
    # A null is no size, but it says that there is no window, and as many KV heads as heads.
    missing = {name: value for name, value in defaults.items() if name not in text}
    return DecoderConfig.read({**missing, **text, "tie_word_embeddings": is_tied}, architecture, variant)


def token_id(
    config: Mapping[str, Any], names: Sequence[str], vocab_size: int, architecture: str, default: int | None = None
) -> int:
    """The placeholder id under the first of ``names`` that is there. Raises ``ModelFormatError`` unless it is a token
    of the vocabulary."""
    value = next((config[name] for name in names if config.get(name) is not None), default)
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < min(vocab_size, MAX_INTEGER):
        raise ModelFormatError(
            f"{architecture}: config field {names[0]!r} is {shown(value)}; a token id below {vocab_size} is needed"
        )
    return value


def refuse_array(feature: Feature, name: str, dtype: str, shape: Sequence[int | None]) -> str | None:
    """Why the feature's array ``name`` is not there, or not of that type and shape (None for any length from 1 on), or
    holds values that are not finite."""
    array = feature.data.get(name)
    wanted = f"{dtype} [{', '.join('any' if length is None else str(length) for length in shape)}]"
    if array is None:
        return f"it brings no array {name!r}; {wanted} is needed, as the model's processor makes it"
    fits = array.ndim == len(shape) and all(
        have >= 1 if want is None else have == want for have, want in zip(array.shape, shape, strict=True)
    )
    if str(array.dtype) != dtype or not fits:
        return f"{name} is {array.dtype} {list(array.shape)}; {wanted} is needed, as the model's processor makes it"
    return None if bool(np.isfinite(array).all()) else f"{name} holds values that are not finite"


def content_hash(data: Mapping[str, np.ndarray]) -> str:
    """What identifies arrays: names, types, shapes and bytes."""
    digest = sha256()
    for name in sorted(data):
        array = np.ascontiguousarray(data[name])
        digest.update(f"{name} {array.dtype.str} {array.shape} ".encode())
        digest.update(array.tobytes())
    return digest.hexdigest()


def make_feature(data: Mapping[str, np.ndarray], length: int, *, offset: int = 0, modality: str = "image") -> Feature:
    """A feature of ``length`` positions from ``offset`` on, identified by what it shows."""
    return Feature(modality=modality, content_hash=content_hash(data), offset=offset, length=length, data=dict(data))
