"""Architectures of the Llama lineage: one decoder, members differ in biases, head norms and windows."""

from __future__ import annotations

from hardpoint.errors import ConfigError
from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.decoder import DecoderModel
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant
from hardpoint_torch_runtime.layers import LayerToolkit

__all__ = ["create_llama", "create_mistral", "create_qwen2", "create_qwen3"]

LLAMA = DecoderVariant()
MISTRAL = DecoderVariant(
    qkv_bias=False, output_bias=False, mlp_bias=False, has_sliding_window=True, default_window=4096
)
QWEN2 = DecoderVariant(
    qkv_bias=True, output_bias=False, mlp_bias=False, has_sliding_window=True, has_window_switch=True
)
QWEN3 = DecoderVariant(mlp_bias=False, qk_norm=True, has_sliding_window=True, has_window_switch=True)


def build_decoder(ctx: ModelContext, variant: DecoderVariant) -> DecoderModel:
    """A model of the family from the worker's context. Weights are uninitialized until they are loaded."""
    if ctx.config is None or not isinstance(ctx.layers, LayerToolkit):
        raise ConfigError(
            f"model {ctx.name!r} runs on the torch worker, which hands it a worker configuration and a layer toolkit; "
            f"got {ctx.config!r} and {type(ctx.layers).__name__}"
        )
    info = ctx.config.model
    return DecoderModel(info, DecoderConfig.read(info.config, info.architecture, variant), ctx.layers, ctx.stage)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_llama(ctx: ModelContext, options: NoOptions) -> Model:
    """``LlamaForCausalLM``: also SmolLM2 and other models saved under that name."""
    del options
    return build_decoder(ctx, LLAMA)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_mistral(ctx: ModelContext, options: NoOptions) -> Model:
    """``MistralForCausalLM``: every layer has the sliding window unless the configuration says null."""
    del options
    return build_decoder(ctx, MISTRAL)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_qwen2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForCausalLM``: biases on query, key and value; optional windows in the upper layers."""
    del options
    return build_decoder(ctx, QWEN2)


@plugin("model", capabilities={"tasks": ["generate"]})
def create_qwen3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3ForCausalLM``: queries and keys are normalized per head before rotation."""
    del options
    return build_decoder(ctx, QWEN3)
