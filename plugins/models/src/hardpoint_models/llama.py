"""Architectures of the Llama lineage: one decoder, members differ in biases, head norms and windows."""

from __future__ import annotations

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant

__all__ = ["create_llama", "create_mistral", "create_qwen2", "create_qwen3"]

LLAMA = DecoderVariant()
MISTRAL = DecoderVariant(
    qkv_bias=False, output_bias=False, mlp_bias=False, has_sliding_window=True, default_window=4096
)
QWEN2 = DecoderVariant(
    qkv_bias=True, output_bias=False, mlp_bias=False, has_sliding_window=True, has_window_switch=True
)
QWEN3 = DecoderVariant(mlp_bias=False, qk_norm="heads", has_sliding_window=True, has_window_switch=True)


def _build(ctx: ModelContext, variant: DecoderVariant) -> Model:
    return build_decoder(ctx, lambda config, architecture: DecoderConfig.read(config, architecture, variant))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_llama(ctx: ModelContext, options: NoOptions) -> Model:
    """``LlamaForCausalLM``: also SmolLM2 and other models saved under that name."""
    del options
    return _build(ctx, LLAMA)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_mistral(ctx: ModelContext, options: NoOptions) -> Model:
    """``MistralForCausalLM``: every layer has the sliding window unless the configuration says null."""
    del options
    return _build(ctx, MISTRAL)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_qwen2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2ForCausalLM``: biases on query, key and value; optional windows in the upper layers."""
    del options
    return _build(ctx, QWEN2)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_qwen3(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3ForCausalLM``: queries and keys are normalized per head before rotation."""
    del options
    return _build(ctx, QWEN3)
