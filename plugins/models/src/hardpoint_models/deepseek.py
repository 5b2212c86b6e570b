"""DeepSeek V2 and V3: latent attention, dense feed-forward in the first layers, then experts beside shared ones."""

from __future__ import annotations

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.deepseek_config import read_deepseek_v2, read_deepseek_v3

__all__ = ["create_deepseek_v2", "create_deepseek_v3"]


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_deepseek_v2(ctx: ModelContext, options: NoOptions) -> Model:
    """``DeepseekV2ForCausalLM``: experts by softmax, greedily from all of them or from the best groups."""
    del options
    return build_decoder(ctx, read_deepseek_v2)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_deepseek_v3(ctx: ModelContext, options: NoOptions) -> Model:
    """``DeepseekV3ForCausalLM``: experts by sigmoid with a stored correction. Layers that predict further tokens are
    left in the checkpoint."""
    del options
    return build_decoder(ctx, read_deepseek_v3)
