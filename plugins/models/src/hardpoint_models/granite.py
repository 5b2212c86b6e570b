"""Granite: the Llama decoder with factors on embeddings, scores, residuals and logits, dense or with experts."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant, ExpertsConfig
from hardpoint_models.granite_rules import EXPERT_RULES
from hardpoint_models.moe import softmax_routing
from hardpoint_torch_runtime.layers import MixtureSizes

__all__ = ["create_granite", "create_granite_moe", "read_granite", "read_granite_moe"]

GRANITE = DecoderVariant()


def read_granite(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features the decoder
    does not compute."""
    fields = ConfigFields(config, architecture)
    return replace(
        DecoderConfig.read(config, architecture, GRANITE),
        attention_scale=fields.number("attention_multiplier", 1.0),
        input_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def read_granite_moe(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """The same with experts in every layer, whose weights sum to one. Raises as :func:`read_granite`."""
    dense = read_granite(config, architecture)
    fields = ConfigFields({"num_local_experts": 8, "num_experts_per_tok": 2, **config}, architecture)
    experts = ExpertsConfig(
        sizes=MixtureSizes(dense.hidden_size, dense.intermediate_size),
        routing=softmax_routing(fields, renormalizes=True),
        layers=(True,) * dense.num_layers,
        rules=EXPERT_RULES,
    )
    return replace(dense, experts=experts)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_granite(ctx: ModelContext, options: NoOptions) -> Model:
    """``GraniteForCausalLM``: Granite 3, the dense models."""
    del options
    return build_decoder(ctx, read_granite)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_granite_moe(ctx: ModelContext, options: NoOptions) -> Model:
    """``GraniteMoeForCausalLM``: Granite 3 and PowerMoE, a mixture of experts in every layer."""
    del options
    return build_decoder(ctx, read_granite_moe)
