"""GPT-OSS: heads with attention sinks, windows in every other layer, experts with biases and clamped gates."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.errors import UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.causal import LAYER
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, DecoderVariant, ExpertsConfig, GateClamp
from hardpoint_models.moe import softmax_routing
from hardpoint_torch_runtime.layers import MixtureSizes
from hardpoint_torch_runtime.weights import StackRule

__all__ = ["create_gpt_oss", "read_gpt_oss"]

VARIANT = DecoderVariant(
    mlp_bias=False, has_sliding_window=True, default_window=128, default_theta=150_000.0, default_eps=1e-5
)
DEFAULT_HEAD_SIZE = 64
DEFAULT_ROPE: Mapping[str, Any] = {
    "rope_type": "yarn",
    "factor": 32.0,
    "original_max_position_embeddings": 4096,
    "truncate": False,
}
DEFAULT_SLOPE, DEFAULT_LIMIT = 1.702, 7.0

_HELD, _EXPERT = f"{LAYER}.mlp", f"{LAYER}.mlp.experts.*"


def _stack_rules(kind: str, suffix: str, *, is_transposed: bool) -> tuple[WeightRule, ...]:
    """Rules for the stacks of one ``kind`` of parameter, whose names end in ``suffix``; gate and up take turns."""
    gate_and_up = f"{_EXPERT}.gate_proj.{kind}", f"{_EXPERT}.up_proj.{kind}"
    return (
        StackRule(
            f"{_HELD}.experts.gate_up_proj{suffix}",
            None,
            unstacked=gate_and_up,
            is_transposed=is_transposed,
            alternates=True,
        ),
        StackRule(
            f"{_HELD}.experts.down_proj{suffix}",
            None,
            unstacked=(f"{_EXPERT}.down_proj.{kind}",),
            is_transposed=is_transposed,
        ),
    )


RULES = (
    WeightRule(f"{_HELD}.router.*", f"{_HELD}.gate.*"),
    WeightRule(f"{_EXPERT}.gate_proj.*", f"{_EXPERT}.gate_up_proj.*", "gate"),
    WeightRule(f"{_EXPERT}.up_proj.*", f"{_EXPERT}.gate_up_proj.*", "up"),
    WeightRule(f"{_EXPERT}.down_proj.*", f"{_EXPERT}.down_proj.*"),
    *_stack_rules("weight", "", is_transposed=True),
    *_stack_rules("bias", "_bias", is_transposed=False),
)


def read_gpt_oss(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Layers are windowed in turns, beginning with the first, unless ``layer_types`` says otherwise.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    _require_dense(fields)
    present = {name: value for name, value in config.items() if value is not None}
    defaults: dict[str, Any] = {"attention_bias": True, "head_dim": DEFAULT_HEAD_SIZE}
    if not (present.get("rope_parameters") or present.get("rope_scaling")):
        defaults["rope_parameters"] = DEFAULT_ROPE
    if "layer_types" not in present:
        kinds = ("sliding_attention", "full_attention")
        defaults["layer_types"] = [kinds[layer % 2] for layer in range(fields.num_layers())]
    if "sliding_window" in config:
        # An explicit null means that there are none.
        defaults["sliding_window"] = config["sliding_window"]
    dense = DecoderConfig.read({**defaults, **present}, architecture, VARIANT)
    experts = ExpertsConfig(
        sizes=MixtureSizes(dense.hidden_size, dense.intermediate_size, has_bias=True),
        # The softmax over the chosen experts only is the one over all, renormalized.
        routing=replace(softmax_routing(fields, renormalizes=True), has_bias=True),
        layers=(True,) * dense.num_layers,
        rules=RULES,
        clamp=GateClamp(
            slope=fields.positive("swiglu_alpha", DEFAULT_SLOPE), limit=fields.positive("swiglu_limit", DEFAULT_LIMIT)
        ),
    )
    sinks = WeightRule(f"{LAYER}.self_attn.sinks", f"{LAYER}.self_attn.sinks.weight")
    return replace(dense, has_sinks=True, experts=experts, rules=(sinks,))


def _require_dense(fields: ConfigFields) -> None:
    stored = fields.raw.get("quantization_config")
    if isinstance(stored, Mapping) and stored.get("quant_method") == "mxfp4":
        raise UnsupportedModelError(
            f"{fields.architecture}: the experts of this checkpoint are stored in MXFP4 (config field "
            "'quantization_config'), which is not read; use a checkpoint in bfloat16, such as one that transformers "
            "saved after Mxfp4Config(dequantize=True)"
        )


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gpt_oss(ctx: ModelContext, options: NoOptions) -> Model:
    """``GptOssForCausalLM``: attention sinks, alternating windows, experts with biases and clamped gates."""
    del options
    return build_decoder(ctx, read_gpt_oss)
