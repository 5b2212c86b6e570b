"""What encoders made of inputs that requests bring, kept by content: for whatever a model does with it.

Outputs stay for as long as the scheduler counts on them (``EncoderInputs.freed`` names those to drop): sequences of one
prompt share an encoding, requests that show the same share it, and a preempted request may find its own again. What no
plan of the scheduler speaks of is used in its step and dropped.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch

from hardpoint.interfaces.request import Feature

__all__ = ["Content", "EncoderModel", "EncoderOutputs"]


@runtime_checkable
class EncoderModel(Protocol):
    """A model with an encoder.

    Unless it says where outputs go among the tokens (``MediaModel``), its decoder attends to them, and finds new ones
    as ``encoder_hidden`` in the forward context.
    """

    def refuse_input(self, feature: Feature) -> str | None:
        """Why the encoder cannot take ``feature``, in words a client may see, or None. Looks at sizes before data."""

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        """Of each feature [its ``num_encoder_tokens``, C]. None of them was refused."""

    def example_input(self, num_tokens: int) -> Feature:
        """A made-up input of about ``num_tokens`` encoder tokens, or of the only length there is."""


class Content(NamedTuple):
    """What an input shows. Its size is part of it: no claim about content may make room for it too small."""

    hash: str
    num_tokens: int

    @classmethod
    def of(cls, feature: Feature) -> Content:
        """As many tokens as the feature names, else one per position."""
        named = feature.num_encoder_tokens
        return cls(feature.content_hash, feature.length if named is None else named)


class EncoderOutputs:
    """Outputs of one model's encoder, by content."""

    def __init__(self, model: EncoderModel) -> None:
        self._model = model
        self._kept: dict[Content, torch.Tensor] = {}

    def __len__(self) -> int:
        """Outputs that the scheduler counts on."""
        return len(self._kept)

    def drop_freed(self, plan: Any) -> None:
        """``plan``: the step's ``EncoderInputs``, or None where it has none."""
        if self._kept and (freed := set(_freed(plan))):
            self._kept = {content: output for content, output in self._kept.items() if content.hash not in freed}

    def encode(self, features: Sequence[Feature], *, keeps: bool) -> Mapping[Content, torch.Tensor]:
        """Outputs by content, kept ones and those of ``features``; equal inputs are encoded once.

        ``keeps``: what is new stays until it is freed.
        """
        new = {Content.of(feature): feature for feature in features if Content.of(feature) not in self._kept}
        made = dict(zip(new, self._model.encode(list(new.values())), strict=True)) if new else {}
        if keeps:
            self._kept.update(made)
        return {**self._kept, **made}


def _freed(plan: Any) -> Sequence[str]:
    """The struct itself within one process; fields by name from another one."""
    if plan is None:
        return ()
    freed: Sequence[str] = plan.get("freed", ()) if isinstance(plan, Mapping) else plan.freed
    return freed
