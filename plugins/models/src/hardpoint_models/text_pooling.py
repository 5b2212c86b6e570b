"""How a model makes one result of a text, as its configuration and the files beside its weights say."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint_models.config_fields import ConfigFields, shown

__all__ = ["SENTENCE_FIELD", "PoolingMethod", "SequencePooling", "TextPooling"]

SequencePooling = Literal["cls", "mean", "last"]
"""Ways to one state of a text: that of the first token, the mean of all, that of the last token."""
PoolingMethod = Literal["cls", "mean", "last", "token_embed", "step"]
"""Beyond those to one state: of each token on its own, or of those alone that end a step of reasoning."""
SENTENCE_FIELD = "sentence_embedding"
"""Where loaders put what the files beside a checkpoint say about embeddings of whole texts."""
DIMENSIONS = "matryoshka_dimensions"


@dataclass(frozen=True, slots=True)
class TextPooling:
    """Attributes:
    method: how the hidden states of a text become one, unless a request says otherwise.
    normalizes: whether embeddings have length one, unless a request says otherwise.
    dimensions: to how many entries embeddings may be cut; empty where the model lists none, and any number will do.
    """

    method: PoolingMethod
    normalizes: bool
    dimensions: tuple[int, ...] = ()

    @classmethod
    def read(cls, fields: ConfigFields, *, method: SequencePooling, normalizes: bool) -> TextPooling:
        """``method`` and ``normalizes`` hold where the files say nothing.

        Raises ``ModelFormatError`` for malformed fields, ``UnsupportedModelError`` for poolings and modules that are
        not computed here.
        """
        dimensions = _dimensions(fields)
        sentence: Any = fields.raw.get(SENTENCE_FIELD)
        if sentence is None:
            return cls(method, normalizes, dimensions)
        if not isinstance(sentence, Mapping):
            raise ModelFormatError(
                f"{fields.architecture}: config field {SENTENCE_FIELD!r} is {shown(sentence)}; an object is needed, or "
                "none at all, since it is made of the files beside the weights"
            )
        stated: Any = sentence.get("pooling_method")
        others = sentence.get("other_modules") or ()
        if stated not in get_args(SequencePooling):
            raise UnsupportedModelError(
                f"{fields.architecture}: the files beside the weights pool by {shown(stated)}; supported: "
                f"{', '.join(map(repr, get_args(SequencePooling)))}"
            )
        if others:
            listed = ", ".join(map(shown, others)) if isinstance(others, list | tuple) else shown(others)
            raise UnsupportedModelError(
                f"{fields.architecture}: modules.json lists {listed} behind the encoder, which are not computed "
                "here; supported: 'Transformer', 'Pooling' and 'Normalize'"
            )
        return cls(stated, bool(sentence.get("normalizes")), dimensions)


def _dimensions(fields: ConfigFields) -> tuple[int, ...]:
    """In the field's own order. ``ModelFormatError`` for anything but a list of sizes up to the hidden one."""
    given: Any = fields.raw.get(DIMENSIONS)
    if given is None:
        return ()
    most = fields.integer("hidden_size")
    sizes = given if isinstance(given, list | tuple) else [None]
    if not sizes or any(isinstance(size, bool) or not isinstance(size, int) or not 1 <= size <= most for size in sizes):
        raise ModelFormatError(
            f"{fields.architecture}: config field {DIMENSIONS!r} is {shown(given)}; a list of numbers from 1 to "
            f"{most} is needed"
        )
    return tuple(sizes)
