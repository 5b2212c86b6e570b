"""Llama 4, the text models: chunks of attention with rotated heads, full layers without positions, large experts."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.building import build_decoder
from hardpoint_models.causal import LAYER, gated_rules
from hardpoint_models.config_fields import ConfigFields, shown
from hardpoint_models.decoder_config import DecoderConfig, ExpertsConfig, QueryTemperature, require_grouped_heads
from hardpoint_models.moe import shared_expert_rules
from hardpoint_torch_runtime.layers import MixtureSizes, RopeParameters, RoutingParameters
from hardpoint_torch_runtime.weights import StackRule

__all__ = ["create_llama4", "read_llama4"]

CHUNKED, FULL = "chunked_attention", "full_attention"
DEFAULT_HEAD_SIZE = 128
DEFAULT_CHUNK = DEFAULT_SPAN = 8192
DEFAULT_INTERVAL = 4
"""Every so many layers one has no positions."""

_HELD, _STORED = f"{LAYER}.mlp", f"{LAYER}.feed_forward"
_EXPERT = f"{_HELD}.experts.*"
RULES: tuple[WeightRule, ...] = (
    *gated_rules("feed_forward"),
    WeightRule(f"{_STORED}.down_proj.*", f"{_HELD}.down_proj.*"),
    WeightRule(f"{_STORED}.router.weight", f"{_HELD}.gate.weight"),
    *shared_expert_rules(f"{_STORED}.shared_expert", is_weighed=False),
    WeightRule(f"{_EXPERT}.gate_proj.*", f"{_EXPERT}.gate_up_proj.*", "gate"),
    WeightRule(f"{_EXPERT}.up_proj.*", f"{_EXPERT}.gate_up_proj.*", "up"),
    WeightRule(f"{_EXPERT}.down_proj.*", f"{_EXPERT}.down_proj.*"),
    StackRule(
        f"{_STORED}.experts.gate_up_proj",
        None,
        unstacked=(f"{_EXPERT}.gate_proj.weight", f"{_EXPERT}.up_proj.weight"),
        is_transposed=True,
    ),
    StackRule(f"{_STORED}.experts.down_proj", None, unstacked=(f"{_EXPERT}.down_proj.weight",), is_transposed=True),
)


def read_llama4(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """``intermediate_size`` is that of experts, ``intermediate_size_mlp`` that of layers without.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    fields.require("hidden_act", ("silu", "swish"), "silu")
    num_heads, num_kv_heads = require_grouped_heads(fields)
    num_layers = fields.num_layers()
    head_size = fields.integer("head_dim", DEFAULT_HEAD_SIZE)
    bias = fields.flag("attention_bias", False)
    is_rotated = _rotated_layers(fields, num_layers)
    present = {name: value for name, value in config.items() if value is not None}
    return DecoderConfig(
        hidden_size=fields.integer("hidden_size"),
        intermediate_size=fields.integer("intermediate_size_mlp", 16384),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("rms_norm_eps", 1e-5),
        is_tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=False,
        qk_norm="rotated" if fields.flag("use_qk_norm", True) else None,
        rope=RopeParameters.from_config({"rope_theta": 500_000.0, **present}),
        windows=(None,) * num_layers,
        chunk_sizes=_chunk_sizes(fields, is_rotated),
        attention_scale=head_size**-0.5,
        pairs_are_neighbors=True,
        rotated_layers=is_rotated,
        query_temperature=_temperature(fields),
        experts=_experts(fields, num_layers),
        rules=RULES,
    )


def _rotated_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """``no_rope_layers`` has, against its name, a one for each layer that rotates. An empty list counts as none."""
    interval = fields.integer("no_rope_layer_interval", DEFAULT_INTERVAL)
    given = fields.raw.get("no_rope_layers")
    if given is None or given == []:
        return tuple((layer + 1) % interval != 0 for layer in range(num_layers))
    is_list = isinstance(given, list | tuple)
    if (
        not is_list
        or len(given) < num_layers
        or any(type(flag) not in (int, bool) or flag not in (0, 1) for flag in given)
    ):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'no_rope_layers' must list a 0 or 1 for each of {num_layers} layers, "
            f"not {shown(given)}"
        )
    return tuple(bool(flag) for flag in given[:num_layers])


def _chunk_sizes(fields: ConfigFields, is_rotated: Sequence[bool]) -> tuple[int | None, ...]:
    """Of layers that rotate, unless ``layer_types`` says otherwise; an explicit null leaves all layers full."""
    is_full = "attention_chunk_size" in fields.raw and fields.raw["attention_chunk_size"] is None
    kinds = fields.raw.get("layer_types")
    if kinds is None:
        kinds = [CHUNKED if rotated and not is_full else FULL for rotated in is_rotated]
    if not isinstance(kinds, list | tuple) or len(kinds) != len(is_rotated):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'layer_types' must list {len(is_rotated)} layers, not {shown(kinds)}"
        )
    for kind in kinds:
        if kind not in (CHUNKED, FULL):
            raise UnsupportedModelError(
                f"{fields.architecture}: config field 'layer_types' holds {shown(kind)}; supported: {CHUNKED!r}, "
                f"{FULL!r}"
            )
    if CHUNKED not in kinds:
        return (None,) * len(kinds)
    # A layer that is said to be chunked needs a size, so that null is refused here.
    size = fields.integer("attention_chunk_size", None if is_full else DEFAULT_CHUNK)
    return tuple(size if kind == CHUNKED else None for kind in kinds)


def _temperature(fields: ConfigFields) -> QueryTemperature | None:
    # Published files have a number in the place of the flag.
    given = fields.raw.get("attn_temperature_tuning")
    is_on = bool(given) if type(given) is int else fields.flag("attn_temperature_tuning", True)
    span, growth = fields.integer("floor_scale", DEFAULT_SPAN), fields.number("attn_scale", 0.1)
    return QueryTemperature(span, growth) if is_on else None


def _experts(fields: ConfigFields, num_layers: int) -> ExpertsConfig:
    size = fields.integer("intermediate_size")
    num_experts, num_chosen = fields.integer("num_local_experts", 16), fields.integer("num_experts_per_tok", 1)
    if num_chosen > num_experts:
        raise ModelFormatError(
            f"{fields.architecture}: num_experts_per_tok={num_chosen} is more than there are, "
            f"num_local_experts={num_experts}"
        )
    return ExpertsConfig(
        sizes=MixtureSizes(fields.integer("hidden_size"), size, shared_size=size),
        routing=RoutingParameters(num_experts, num_chosen, scoring="sigmoid", renormalizes=False, weighs_inputs=True),
        layers=_sparse_layers(fields, num_layers),
        rules=(),
    )


def _sparse_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    step = fields.integer("interleave_moe_layer_step", 1)
    given = fields.raw.get("moe_layers")
    if given is None:
        return tuple((layer + 1) % step == 0 for layer in range(num_layers))
    if not isinstance(given, list | tuple) or any(type(layer) is not int for layer in given):
        raise ModelFormatError(
            f"{fields.architecture}: config field 'moe_layers' is {shown(given)}; a list of layer numbers is needed"
        )
    return tuple(layer in given for layer in range(num_layers))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_llama4(ctx: ModelContext, options: NoOptions) -> Model:
    """``Llama4ForCausalLM``: the text part; layers attend within chunks, or to everything without positions."""
    del options
    return build_decoder(ctx, read_llama4)
