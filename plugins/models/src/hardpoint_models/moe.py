"""Decoders with a mixture of experts in place of the dense feed-forward: Mixtral, Qwen2-MoE and Qwen3-MoE."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant, ExpertsConfig
from hardpoint_torch_runtime.layers import MixtureSizes, RoutingParameters

__all__ = [
    "create_mixtral",
    "create_qwen2_moe",
    "create_qwen3_moe",
    "expert_rules",
    "shared_expert_rules",
    "softmax_routing",
    "sparse_layers",
]

MIXTRAL = DecoderVariant(
    qkv_bias=False, output_bias=False, mlp_bias=False, has_sliding_window=True, default_theta=1e6, default_eps=1e-5
)
QWEN2_MOE = DecoderVariant(output_bias=False, mlp_bias=False, has_sliding_window=True, default_window=4096)
QWEN3_MOE = DecoderVariant(mlp_bias=False, qk_norm="heads", has_sliding_window=True, default_window=4096)


def expert_rules(block: str, *, gate: str, up: str, down: str, stacks: str = "mlp") -> tuple[WeightRule, ...]:
    """Rules for the layout with every expert apart, in which ``block`` and the projections have the names given, and
    for the one with the experts stacked, gate over up, under ``stacks``."""
    held, stored = "model.layers.*.mlp", f"model.layers.*.{block}"
    stacked = f"model.layers.*.{stacks}.experts"
    apart = f"{stored}.experts.*"
    rules = (
        WeightRule(f"{stored}.gate.weight", f"{held}.gate.weight"),
        WeightRule(f"{held}.gate.weight", f"{held}.gate.weight"),
        WeightRule(f"{apart}.{gate}.*", f"{held}.experts.*.gate_up_proj.*", "gate"),
        WeightRule(f"{apart}.{up}.*", f"{held}.experts.*.gate_up_proj.*", "up"),
        WeightRule(f"{apart}.{down}.*", f"{held}.experts.*.down_proj.*"),
        WeightRule(f"{stacked}.gate_up_proj", None, unstacked=(f"{apart}.{gate}.weight", f"{apart}.{up}.weight")),
        WeightRule(f"{stacked}.down_proj", None, unstacked=(f"{apart}.{down}.weight",)),
    )
    return tuple(dict.fromkeys(rules))


def shared_expert_rules(shared: str, *, is_weighed: bool = True) -> tuple[WeightRule, ...]:
    """Rules for experts that every token passes, kept under ``shared``, and for their gate, kept beside them."""
    held = "model.layers.*.mlp"
    gate = WeightRule(f"{shared}_gate.weight", f"{held}.shared_gate.weight")
    return (
        WeightRule(f"{shared}.gate_proj.*", f"{held}.shared_experts.gate_up_proj.*", "gate"),
        WeightRule(f"{shared}.up_proj.*", f"{held}.shared_experts.gate_up_proj.*", "up"),
        WeightRule(f"{shared}.down_proj.*", f"{held}.shared_experts.down_proj.*"),
        *((gate,) if is_weighed else ()),
    )


def read_mixtral(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Every layer has experts, whose weights sum to one.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    dense = DecoderConfig.read(config, architecture, MIXTRAL)
    experts = ExpertsConfig(
        sizes=MixtureSizes(dense.hidden_size, dense.intermediate_size),
        routing=softmax_routing(fields, renormalizes=True),
        layers=(True,) * dense.num_layers,
        rules=expert_rules("block_sparse_moe", gate="w1", up="w3", down="w2"),
    )
    return replace(dense, experts=experts)


def read_qwen2_moe(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Beside the experts one that every token passes, weighted by a gate of its own. Windows are off unless asked for,
    and hold in every other layer below ``max_window_layers``. Raises as :func:`read_mixtral`."""
    fields = ConfigFields(config, architecture)
    has_window = fields.flag("use_sliding_window", False)
    num_layers = fields.num_layers()
    settings = {"use_sliding_window": has_window, "layer_types": fields.raw.get("layer_types")}
    if has_window and settings["layer_types"] is None:
        last = fields.count("max_window_layers", 28)
        kinds = ("sliding_attention", "full_attention")
        settings["layer_types"] = [kinds[layer % 2] if layer < last else kinds[1] for layer in range(num_layers)]
    dense = DecoderConfig.read({**config, **settings}, architecture, QWEN2_MOE)
    experts = ExpertsConfig(
        sizes=MixtureSizes(
            dense.hidden_size,
            fields.integer("moe_intermediate_size"),
            fields.integer("shared_expert_intermediate_size"),
            weighs_shared=True,
        ),
        routing=softmax_routing(fields, renormalizes=fields.flag("norm_topk_prob", False)),
        layers=sparse_layers(fields, num_layers),
        rules=(
            *shared_expert_rules("model.layers.*.mlp.shared_expert"),
            *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
        ),
    )
    return replace(dense, qkv_bias=fields.flag("qkv_bias", True), experts=experts)


def read_qwen3_moe(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Some layers may stay dense; windows are off unless asked for, and hold in every layer. Raises as
    :func:`read_mixtral`."""
    fields = ConfigFields(config, architecture)
    has_window = fields.flag("use_sliding_window", False)
    dense = DecoderConfig.read({**config, "use_sliding_window": has_window}, architecture, QWEN3_MOE)
    experts = ExpertsConfig(
        sizes=MixtureSizes(dense.hidden_size, fields.integer("moe_intermediate_size")),
        routing=softmax_routing(fields, renormalizes=fields.flag("norm_topk_prob", False)),
        layers=sparse_layers(fields, dense.num_layers),
        rules=expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    return replace(dense, experts=experts)


def softmax_routing(fields: ConfigFields, *, renormalizes: bool) -> RoutingParameters:
    """Scores are the softmax over all experts; ``ModelFormatError`` where more are chosen than there are."""
    # Both spellings are in use, also for one architecture.
    spelling = "num_experts" if fields.raw.get("num_local_experts") is None else "num_local_experts"
    num_experts = fields.integer(spelling)
    num_chosen = fields.integer("num_experts_per_tok")
    if num_chosen > num_experts:
        raise ModelFormatError(
            f"{fields.architecture}: num_experts_per_tok={num_chosen} is more than there are, {spelling}={num_experts}"
        )
    return RoutingParameters(num_experts, num_chosen, renormalizes=renormalizes)


def sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it has experts: every ``decoder_sparse_step``-th, but for ``mlp_only_layers``."""
    step = fields.integer("decoder_sparse_step", 1)
    dense = fields.raw.get("mlp_only_layers")
    dense = [] if dense is None else dense
    if not isinstance(dense, list | tuple) or any(type(layer) is not int for layer in dense):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'mlp_only_layers' is {shown(dense)}; a list of layer numbers is "
            "needed"
        )
    return tuple(layer not in dense and (layer + 1) % step == 0 for layer in range(num_layers))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_mixtral(ctx: ModelContext, options: NoOptions) -> Model:
    """``MixtralForCausalLM``: a mixture of experts in every layer, weights renormalized."""
    del options
    return build_decoder(ctx, read_mixtral)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_qwen2_moe(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen2MoeForCausalLM``: experts beside a shared one with a gate of its own."""
    del options
    return build_decoder(ctx, read_qwen2_moe)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_qwen3_moe(ctx: ModelContext, options: NoOptions) -> Model:
    """``Qwen3MoeForCausalLM``: Qwen3 attention, experts in all layers or some of them."""
    del options
    return build_decoder(ctx, read_qwen3_moe)
