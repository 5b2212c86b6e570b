"""What BERT encoders read from a configuration, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["BertConfig", "PoolingMethod"]

PoolingMethod = Literal["cls", "mean", "last"]
SENTENCE_FIELD = "sentence_embedding"
"""Where loaders put what the files beside a checkpoint say about embeddings of whole texts."""


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes are those of the whole model.

    Attributes:
        activation: by its name in configurations.
        pooling_method, normalizes: how the hidden states of a text become its embedding, unless a request says
            otherwise.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    vocab_size: int
    max_positions: int
    num_token_types: int
    norm_eps: float
    activation: str
    pooling_method: PoolingMethod
    normalizes: bool

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def read(cls, config: Mapping[str, Any], architecture: str) -> BertConfig:
        """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are
        not computed here (decoders, relative positions, other poolings)."""
        fields = ConfigFields(config, architecture)
        fields.require("hidden_act", tuple(ACTIVATIONS), "gelu")
        fields.require("position_embedding_type", ("absolute",), "absolute")
        fields.require("is_decoder", (False,), False)
        fields.require("add_cross_attention", (False,), False)
        hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
        if hidden_size % num_heads:
            raise ModelFormatError(
                f"{architecture}: hidden_size={hidden_size} is no multiple of num_attention_heads={num_heads}"
            )
        pooling_method, normalizes = _pooling(fields)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.num_layers(),
            num_heads=num_heads,
            vocab_size=fields.integer("vocab_size"),
            max_positions=fields.integer("max_position_embeddings"),
            num_token_types=fields.integer("type_vocab_size", 2),
            norm_eps=fields.epsilon("layer_norm_eps", 1e-12),
            activation=config.get("hidden_act") or "gelu",
            pooling_method=pooling_method,
            normalizes=normalizes,
        )


def _pooling(fields: ConfigFields) -> tuple[PoolingMethod, bool]:
    """A bare checkpoint was trained to gather a text in its first token, and nothing says that lengths do not count."""
    sentence: Any = fields.raw.get(SENTENCE_FIELD)
    if sentence is None:
        return "cls", False
    if not isinstance(sentence, Mapping):
        raise ModelFormatError(
            f"{fields.architecture}: config field {SENTENCE_FIELD!r} is {shown(sentence)}; an object is needed, or "
            "none at all, since it is made of the files beside the weights"
        )
    method: Any = sentence.get("pooling_method")
    others = sentence.get("other_modules") or ()
    if method not in get_args(PoolingMethod):
        raise UnsupportedModelError(
            f"{fields.architecture}: the files beside the weights pool by {shown(method)}; supported: "
            f"{', '.join(map(repr, get_args(PoolingMethod)))}"
        )
    if others:
        listed = ", ".join(map(shown, others)) if isinstance(others, list | tuple) else shown(others)
        raise UnsupportedModelError(
            f"{fields.architecture}: modules.json lists {listed} behind the encoder, which are not computed "
            "here; supported: 'Transformer', 'Pooling' and 'Normalize'"
        )
    return method, bool(sentence.get("normalizes"))
