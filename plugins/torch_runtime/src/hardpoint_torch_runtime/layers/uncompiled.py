"""Layers that compiled code calls as they are."""

from __future__ import annotations

import torch

__all__ = ["UncompiledLayer"]


class UncompiledLayer(torch.nn.Module):
    """A layer that reads the forward context, which is not there when a model is compiled.

    ``name`` is unique in the model; compiled code finds the layer by it.
    """

    name: str
