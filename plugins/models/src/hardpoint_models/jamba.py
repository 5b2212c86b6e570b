"""Jamba: Mamba-1 layers, attention without positions in a few, and experts in every other one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.causal import LAYER, gated_rules
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import ExpertsConfig
from hardpoint_models.hybrid import build_hybrid
from hardpoint_models.hybrid_config import HybridConfig, mixer_rules, read_sizes
from hardpoint_models.mamba_config import read_step_rank
from hardpoint_models.moe import expert_rules
from hardpoint_torch_runtime.layers import MixtureSizes, RoutingParameters, SelectiveSizes

__all__ = ["create_jamba", "read_jamba"]

RULES = (
    WeightRule("model.final_layernorm.weight", "model.norm.weight"),
    WeightRule(f"{LAYER}.pre_ff_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *gated_rules("feed_forward"),
    WeightRule(f"{LAYER}.feed_forward.down_proj.*", f"{LAYER}.mlp.down_proj.*"),
    WeightRule(f"{LAYER}.mamba.dt_proj.bias", f"{LAYER}.mixer.dt_bias"),
    *mixer_rules("mamba", ("x_proj.*", "dt_proj.*", "dt_layernorm.*", "b_layernorm.*", "c_layernorm.*")),
)
EXPERT_RULES = (
    WeightRule(f"{LAYER}.feed_forward.router.weight", f"{LAYER}.mlp.gate.weight"),
    *expert_rules("feed_forward", gate="gate_proj", up="up_proj", down="down_proj", stacks="feed_forward"),
)


def read_jamba(config: Mapping[str, Any], architecture: str) -> HybridConfig:
    """Attention and experts each in every so many layers; weights of experts are taken as the router gives them.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    shared = read_sizes(fields, default_eps=1e-6)
    num_layers = shared["num_layers"]
    attending = _every(fields, "attn_layer_period", "attn_layer_offset", (8, 4), num_layers)
    return HybridConfig(
        **shared,
        intermediate_size=fields.integer("intermediate_size"),
        attention_bias=False,
        mlp_bias=False,
        attention_scale=shared["head_size"] ** -0.5,
        mixer=_mixer(fields, shared["hidden_size"], shared["norm_eps"]),
        recurrent=tuple(not attends for attends in attending),
        rules=RULES,
        rope=None,
        experts=_experts(fields, num_layers),
    )


def _mixer(fields: ConfigFields, hidden_size: int, norm_eps: float) -> SelectiveSizes:
    try:
        return SelectiveSizes(
            hidden_size=hidden_size,
            inner_size=fields.integer("mamba_expand", 2) * hidden_size,
            state_size=fields.integer("mamba_d_state", 16),
            step_rank=read_step_rank(fields, "mamba_dt_rank", hidden_size),
            conv_width=fields.integer("mamba_d_conv", 4),
            has_bias=fields.flag("mamba_proj_bias", False),
            has_conv_bias=fields.flag("mamba_conv_bias", True),
            norm_eps=norm_eps,
        )
    except ValueError as error:
        raise ModelFormatError(f"{fields.architecture}: mamba_d_conv cannot be: {error}") from error


def _experts(fields: ConfigFields, num_layers: int) -> ExpertsConfig | None:
    """None where there is only one, which is a dense block."""
    spelling = "num_experts" if fields.raw.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.integer(spelling, 16)
    num_chosen = fields.integer("num_experts_per_tok", 2)
    layers = _every(fields, "expert_layer_period", "expert_layer_offset", (2, 1), num_layers)
    if num_experts == 1:
        return None
    if num_chosen > num_experts:
        raise ModelFormatError(
            f"{fields.architecture}: num_experts_per_tok={num_chosen} is more than there are, {spelling}={num_experts}"
        )
    return ExpertsConfig(
        sizes=MixtureSizes(fields.integer("hidden_size"), fields.integer("intermediate_size")),
        routing=RoutingParameters(num_experts, num_chosen, renormalizes=False),
        layers=layers,
        rules=EXPERT_RULES,
    )


def _every(
    fields: ConfigFields, period_name: str, offset_name: str, defaults: tuple[int, int], num_layers: int
) -> tuple[bool, ...]:
    """Per layer whether its number leaves ``offset`` when divided by ``period``."""
    period, offset = fields.integer(period_name, defaults[0]), fields.count(offset_name, defaults[1])
    if offset >= period:
        raise ModelFormatError(f"{fields.architecture}: {offset_name}={offset} must be below {period_name}={period}")
    return tuple(layer % period == offset for layer in range(num_layers))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_jamba(ctx: ModelContext, options: NoOptions) -> Model:
    """``JambaForCausalLM``: Mamba-1 with normalized steps, attention without positions, experts."""
    del options
    return build_hybrid(ctx, read_jamba)
