"""What BERT encoders and those that follow RoBERTa read from a configuration, as one frozen record."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_models.label_head import LabelShape, num_labels, score_activation
from hardpoint_models.text_pooling import TextPooling
from hardpoint_torch_runtime.layers import ACTIVATIONS

__all__ = ["BertConfig", "BertVariant"]

Head = Literal["none", "text", "tokens"]
"""Whether scores are computed of whole texts, or of each token."""


@dataclass(frozen=True, slots=True)
class BertVariant:
    """How members of the family differ.

    Attributes:
        follows_roberta: positions are counted from behind the padding's id, padding does not count, and the head has
            a dense layer of its own in the place of the pooler.
        default_padding: where the configuration does not say which token pads.
    """

    head: Head = "none"
    follows_roberta: bool = False
    default_padding: int = 0
    default_eps: float = 1e-12


PLAIN = BertVariant()


@dataclass(frozen=True, slots=True)
class BertConfig:
    """Sizes are those of the whole model.

    Attributes:
        activation: by its name in configurations.
        padding_id: the token behind whose id positions are counted; None where they are counted from 0.
        separator_id: the token behind which the second text of a pair begins; None where tokens are all of one type.
        labels: the head, or None where hidden states are the result.
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
    pooling: TextPooling
    padding_id: int | None = None
    separator_id: int | None = None
    labels: LabelShape | None = None

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_heads

    @classmethod
    def read(cls, config: Mapping[str, Any], architecture: str, variant: BertVariant = PLAIN) -> BertConfig:
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
        vocab_size, max_positions = fields.integer("vocab_size"), fields.integer("max_position_embeddings")
        num_token_types = fields.integer("type_vocab_size", 2)
        labels = _labels(fields, variant)
        padding_id = _padding(fields, variant, max_positions)
        separator_id = None
        if labels is not None and num_token_types > 1 and padding_id is None:
            separator_id = _separator(fields, vocab_size)
        return cls(
            hidden_size=hidden_size,
            intermediate_size=fields.integer("intermediate_size"),
            num_layers=fields.num_layers(),
            num_heads=num_heads,
            vocab_size=vocab_size,
            max_positions=max_positions,
            num_token_types=num_token_types,
            norm_eps=fields.epsilon("layer_norm_eps", variant.default_eps),
            activation=config.get("hidden_act") or "gelu",
            pooling=_pooling(fields, variant),
            padding_id=padding_id,
            separator_id=separator_id,
            labels=labels,
        )


def _pooling(fields: ConfigFields, variant: BertVariant) -> TextPooling:
    """A bare checkpoint was trained to gather a text in its first token, and nothing says that lengths do not count.
    A head was trained on what it was trained on, whatever lies beside it."""
    if variant.head == "none":
        return TextPooling.read(fields, method="cls", normalizes=False)
    return TextPooling("token_embed" if variant.head == "tokens" else "cls", normalizes=True)


def _labels(fields: ConfigFields, variant: BertVariant) -> LabelShape | None:
    if variant.head == "none":
        return None
    count = num_labels(fields)
    activation = score_activation(fields, count)
    return LabelShape(count, activation, dense="tanh" if variant.head == "text" else None)


def _padding(fields: ConfigFields, variant: BertVariant, max_positions: int) -> int | None:
    """Positions have to begin within the table."""
    if not variant.follows_roberta:
        return None
    given: Any = fields.raw.get("pad_token_id")
    padding = variant.default_padding if given is None else given
    if isinstance(padding, bool) or not isinstance(padding, int) or not 0 <= padding < max_positions - 1:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'pad_token_id' is {shown(padding)}; it must be from 0 to "
            f"{max_positions - 2}, since the table of {max_positions} positions is used from behind it on"
        )
    return padding


def _separator(fields: ConfigFields, vocab_size: int) -> int:
    """A wrong one would let both texts of a pair pass for one."""
    given: Any = fields.raw.get("sep_token_id")
    if given is None:
        raise UnsupportedModelError(
            f"{fields.architecture}: neither the config field 'sep_token_id' nor the tokenizer's files say which token "
            "divides two texts, whose tokens are of different types; add the field to config.json"
        )
    if isinstance(given, bool) or not isinstance(given, int) or not 0 <= given < vocab_size:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'sep_token_id' is {shown(given)}; a token below {vocab_size} is "
            "needed"
        )
    return given
