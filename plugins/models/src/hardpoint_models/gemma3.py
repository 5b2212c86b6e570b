"""Gemma 3, the text models: windows of their own rotation between full layers, norms around every block."""

from __future__ import annotations

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.gemma3_config import read_gemma3

__all__ = ["create_gemma3"]


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gemma3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Gemma3ForCausalLM``: five windowed layers to a full one, unless the configuration lists others."""
    del options
    return build_decoder(ctx, read_gemma3)
