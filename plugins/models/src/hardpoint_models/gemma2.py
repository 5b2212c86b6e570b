"""Gemma 2: windows in every other layer, norms around every block, capped scores and logits."""

from __future__ import annotations

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.gemma3_config import read_gemma2

__all__ = ["create_gemma2"]


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gemma2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Gemma2ForCausalLM``: layers with a window and layers without one take turns."""
    del options
    return build_decoder(ctx, read_gemma2)
