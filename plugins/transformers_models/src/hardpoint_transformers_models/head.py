"""What a model of ``transformers`` does behind its layers: its class alone, given hidden states."""

from __future__ import annotations

import copy
from typing import Any

import torch

__all__ = ["without_layers"]


class _Hidden:
    """What models take for the output of their layers: hidden states, and nothing of whatever else they ask for."""

    def __init__(self, states: torch.Tensor) -> None:
        self.last_hidden_state = states

    def __getitem__(self, index: int) -> torch.Tensor:
        if index:
            raise IndexError(f"of the output of the layers only the hidden states are known, not output {index}")
        return self.last_hidden_state

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)


class _GivenHidden(torch.nn.Module):
    """In the place of the layers: hands on what was given as embeddings."""

    def forward(self, *args: object, inputs_embeds: torch.Tensor, **given: object) -> _Hidden:
        del args, given
        return _Hidden(inputs_embeds)


def without_layers(model: Any) -> Any:
    """The library's model for head and logits alone: it shares the modules of ``model`` but the layers.

    It takes hidden states as ``inputs_embeds``.
    """
    head = copy.copy(model)
    head._modules = {**model._modules, model.base_model_prefix: _GivenHidden()}
    return head
