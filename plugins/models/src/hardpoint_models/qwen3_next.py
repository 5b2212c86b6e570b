"""Qwen3-Next: gated delta nets, gated attention in every fourth layer, experts beside a shared one."""

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
from hardpoint_models.hybrid_config import HybridConfig, mixer_rules, read_layer_kinds, read_sizes
from hardpoint_models.moe import expert_rules, shared_expert_rules, softmax_routing, sparse_layers
from hardpoint_torch_runtime.layers import DeltaSizes, MixtureSizes, RopeParameters

__all__ = ["create_qwen3_next", "read_qwen3_next"]

_SAME = (
    "model.norm.weight",
    *(f"{LAYER}.{name}" for name in ("post_attention_layernorm.weight", "self_attn.q_norm.weight")),
    *(f"{LAYER}.{name}" for name in ("self_attn.k_norm.weight", "mlp.down_proj.*")),
)
_MIXER = ("A_log", "dt_bias", "in_proj_qkvz.*", "in_proj_ba.*", "conv1d.weight", "norm.weight", "out_proj.*")
RULES = (
    *(WeightRule(name, name) for name in _SAME),
    *gated_rules("mlp"),
    *mixer_rules("linear_attn", _MIXER),
    # Layers that predict further tokens are left in the checkpoint, from "mtp.norm.weight" to the experts' projections.
    *(WeightRule(".".join(("mtp", *"*" * depth)), None) for depth in range(2, 8)),
)
EXPERT_RULES = (
    *shared_expert_rules(f"{LAYER}.mlp.shared_expert"),
    *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
)


def read_qwen3_next(config: Mapping[str, Any], architecture: str) -> HybridConfig:
    """A quarter of each head rotates by default, and norms are stored as what they differ from one.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    shared = read_sizes(fields, default_eps=1e-6, head_size=256)
    return HybridConfig(
        **shared,
        intermediate_size=fields.integer("intermediate_size", 5632),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=False,
        attention_scale=shared["head_size"] ** -0.5,
        mixer=_mixer(fields, shared["hidden_size"], shared["norm_eps"]),
        recurrent=_kinds(fields, shared["num_layers"]),
        rules=RULES,
        rope=RopeParameters.from_config({"partial_rotary_factor": 0.25, **fields.present()}),
        experts=_experts(fields, shared["num_layers"]),
        qk_norm=True,
        gates_output=True,
        norm_offset=1.0,
    )


def _mixer(fields: ConfigFields, hidden_size: int, norm_eps: float) -> DeltaSizes:
    try:
        return DeltaSizes(
            hidden_size=hidden_size,
            num_heads=fields.integer("linear_num_value_heads", 32),
            head_size=fields.integer("linear_value_head_dim", 128),
            num_groups=fields.integer("linear_num_key_heads", 16),
            key_size=fields.integer("linear_key_head_dim", 128),
            conv_width=fields.integer("linear_conv_kernel_dim", 4),
            norm_eps=norm_eps,
        )
    except ValueError as error:
        raise ModelFormatError(
            f"{fields.architecture}: linear_num_value_heads, linear_num_key_heads or linear_conv_kernel_dim cannot be: "
            f"{error}"
        ) from error


def _kinds(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it is recurrent; without a list all are but every ``full_attention_interval``-th."""
    interval = fields.integer("full_attention_interval", 4)
    if fields.raw.get("layer_types") is not None:
        return read_layer_kinds(fields, num_layers)
    return tuple((layer + 1) % interval != 0 for layer in range(num_layers))


def _experts(fields: ConfigFields, num_layers: int) -> ExpertsConfig | None:
    if fields.count("num_experts", 512) == 0:
        return None
    counted = ConfigFields({"num_experts": 512, "num_experts_per_tok": 10, **fields.present()}, fields.architecture)
    return ExpertsConfig(
        sizes=MixtureSizes(
            fields.integer("hidden_size"),
            fields.integer("moe_intermediate_size", 512),
            fields.integer("shared_expert_intermediate_size", 512),
            weighs_shared=True,
        ),
        routing=softmax_routing(counted, renormalizes=fields.flag("norm_topk_prob", True)),
        layers=sparse_layers(fields, num_layers),
        rules=EXPERT_RULES,
    )


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_qwen3_next(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3NextForCausalLM``: gated delta nets, gated attention, experts beside a shared one with a gate."""
    del options
    return build_hybrid(ctx, read_qwen3_next)
