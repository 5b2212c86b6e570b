"""From the worker's context to what a model is built from."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model import ModelContext
from hardpoint.interfaces.model_source import ModelInfo
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["build_decoder", "require_toolkit"]


def require_toolkit(ctx: ModelContext) -> tuple[ModelInfo, LayerToolkit]:
    """The model's description and what its layers are made by. Raises ``ConfigError`` on workers without them."""
    if ctx.config is None or not isinstance(ctx.layers, LayerToolkit):
        raise ConfigError(
            f"model {ctx.name!r} runs on the torch worker, which hands it a worker configuration and a layer toolkit; "
            f"got {ctx.config!r} and {type(ctx.layers).__name__}"
        )
    return ctx.config.model, ctx.layers


def build_decoder(ctx: ModelContext, read: Callable[[Mapping[str, Any], str], DecoderConfig]) -> DecoderModel:
    """``read`` makes the family's record of a model's configuration and its architecture.

    Weights are uninitialized until they are loaded.
    """
    info, layers = require_toolkit(ctx)
    return DecoderModel(info, read(info.config, info.architecture), layers, ctx.stage)
