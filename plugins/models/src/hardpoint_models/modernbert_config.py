"""What ModernBERT encoders read from a configuration, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hardpoint.errors import ModelFormatError
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import require_layer_types
from hardpoint_models.label_head import LabelShape, num_labels, score_activation
from hardpoint_models.text_pooling import TextPooling
from hardpoint_torch_runtime.layers import ACTIVATIONS, RopeParameters

__all__ = ["ModernBertConfig"]

GLOBAL_THETA, LOCAL_THETA = 160_000.0, 10_000.0
DEFAULT_EVERY = 3
DEFAULT_SPAN = 128


@dataclass(frozen=True, slots=True)
class ModernBertConfig:
    """Sizes are those of the whole model; ``windows`` and ``is_local`` have one entry per layer.

    Attributes:
        windows: how many tokens to either side a token sees, itself included; None for all of them.
        is_local: whether the layer is rotated by ``local_rope``.
        labels: the head, or None where hidden states are the result.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    norm_eps: float
    norm_bias: bool
    attention_bias: bool
    mlp_bias: bool
    activation: str
    rope: RopeParameters
    local_rope: RopeParameters
    windows: tuple[int | None, ...]
    is_local: tuple[bool, ...]
    pooling: TextPooling
    labels: LabelShape | None = None

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def read(
        cls, config: Mapping[str, Any], architecture: str, head: Literal["none", "text", "tokens"] = "none"
    ) -> ModernBertConfig:
        """``head``: whether scores are computed of whole texts, or of each token.

        Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
        computed here.
        """
        fields = ConfigFields(config, architecture)
        fields.require("hidden_activation", tuple(ACTIVATIONS), "gelu")
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise ModelFormatError(
                f"{architecture}: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}"
            )
        num_layers = fields.num_layers()
        is_local = _local_layers(fields, num_layers)
        # Stated is the span of both sides together; a token is in its own window.
        window = fields.integer("local_attention", DEFAULT_SPAN) // 2 + 1
        norm_eps, norm_bias = fields.epsilon("norm_eps", 1e-5), fields.flag("norm_bias", False)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=num_layers,
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            norm_eps=norm_eps,
            norm_bias=norm_bias,
            attention_bias=fields.flag("attention_bias", False),
            mlp_bias=fields.flag("mlp_bias", False),
            activation=config.get("hidden_activation") or "gelu",
            rope=_rope(fields, "full_attention", "global_rope_theta", GLOBAL_THETA),
            local_rope=_rope(fields, "sliding_attention", "local_rope_theta", LOCAL_THETA),
            windows=tuple(window if local else None for local in is_local),
            is_local=is_local,
            pooling=_pooling(fields, head),
            labels=None if head == "none" else _labels(fields, norm_eps, norm_bias),
        )


def _local_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """One layer in so many sees everything, the first one among them."""
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None:
        kinds = require_layer_types(fields, layer_types, num_layers)
        return tuple(kind == "sliding_attention" for kind in kinds)
    every = fields.integer("global_attn_every_n_layers", DEFAULT_EVERY)
    return tuple(index % every != 0 for index in range(num_layers))


def _rope(fields: ConfigFields, layer_type: str, older: str, default: float) -> RopeParameters:
    """Newer files have settings by type of layer, older ones a base for each."""
    present = {name: value for name, value in fields.raw.items() if value is not None}
    present["rope_theta"] = fields.positive(older, default)
    by_type = present.get("rope_parameters")
    if isinstance(by_type, Mapping) and layer_type not in by_type and "rope_theta" not in by_type:
        present.pop("rope_parameters")
    return RopeParameters.from_config(present, layer_type)


def _pooling(fields: ConfigFields, head: str) -> TextPooling:
    """A head was trained on what it was trained on, whatever lies beside it."""
    if head == "none":
        return TextPooling.read(fields, method="cls", normalizes=False)
    if head == "tokens":
        return TextPooling("token_embed", normalizes=True)
    fields.require("classifier_pooling", ("cls", "mean"), "cls")
    return TextPooling(fields.raw.get("classifier_pooling") or "cls", normalizes=True)


def _labels(fields: ConfigFields, norm_eps: float, norm_bias: bool) -> LabelShape:
    fields.require("classifier_activation", tuple(ACTIVATIONS), "gelu")
    count = num_labels(fields)
    return LabelShape(
        count,
        score_activation(fields, count),
        dense=fields.raw.get("classifier_activation") or "gelu",
        dense_bias=fields.flag("classifier_bias", False),
        norm_eps=norm_eps,
        norm_bias=norm_bias,
    )
