"""What DeepSeek V2 and V3 read from a configuration."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import WeightRule
from hardpoint_models.causal import LAYER
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, ExpertsConfig, LatentConfig
from hardpoint_models.moe import expert_rules
from hardpoint_torch_runtime.layers import LatentSizes, MixtureSizes, RopeParameters, RoutingParameters

__all__ = ["read_deepseek_v2", "read_deepseek_v3"]

DEEPEST_NAME = 5
"""Segments behind a layer's number, at most: ``mlp.experts.0.down_proj.weight``."""


@dataclass(frozen=True, slots=True)
class _Defaults:
    """What the members mean where their configurations leave a field out."""

    num_shared: int
    first_sparse: int
    scale: float
    num_extra_layers: int


V2 = _Defaults(num_shared=2, first_sparse=0, scale=1.0, num_extra_layers=0)
V3 = _Defaults(num_shared=1, first_sparse=3, scale=2.5, num_extra_layers=1)


def read_deepseek_v2(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family
    does not compute."""
    fields = ConfigFields(config, architecture)
    fields.require("scoring_func", ("softmax",), "softmax")
    fields.require("topk_method", ("greedy", "group_limited_greedy"), "greedy")
    fields.require("norm_topk_prob", (False,), False)
    fields.require("mlp_bias", (False,), False)
    num_experts, num_chosen = fields.integer("n_routed_experts", 64), fields.integer("num_experts_per_tok")
    groups = _groups(fields, (1, 1)) if fields.raw.get("topk_method") == "group_limited_greedy" else (1, 1)
    routing = _routing(
        fields,
        num_experts=num_experts,
        num_chosen=num_chosen,
        scoring="softmax",
        renormalizes=False,
        num_groups=groups[0],
        num_kept_groups=groups[1],
        group_score_size=1,
        scale=fields.number("routed_scaling_factor", V2.scale),
    )
    return _read(fields, V2, routing, pairs_are_neighbors=True)


def read_deepseek_v3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises as :func:`read_deepseek_v2`."""
    fields = ConfigFields(config, architecture)
    fields.require("scoring_func", ("sigmoid",), "sigmoid")
    fields.require("topk_method", ("noaux_tc",), "noaux_tc")
    groups = _groups(fields, (8, 4))
    routing = _routing(
        fields,
        num_experts=fields.integer("n_routed_experts", 256),
        num_chosen=fields.integer("num_experts_per_tok", 8),
        scoring="sigmoid",
        renormalizes=fields.flag("norm_topk_prob", True),
        num_groups=groups[0],
        num_kept_groups=groups[1],
        has_correction_bias=True,
        scale=fields.number("routed_scaling_factor", V3.scale),
    )
    return _read(fields, V3, routing, pairs_are_neighbors=fields.flag("rope_interleave", True))


def _read(
    fields: ConfigFields, defaults: _Defaults, routing: RoutingParameters, *, pairs_are_neighbors: bool
) -> DecoderConfig:
    fields.require("hidden_act", ("silu", "swish"), "silu")
    fields.require("pretraining_tp", (1,), 1)
    fields.require("moe_layer_freq", (1,), 1)
    num_layers, num_heads = fields.num_layers(), fields.integer("num_attention_heads")
    hidden_size, intermediate_size = fields.integer("hidden_size"), fields.integer("intermediate_size")
    sizes = _sizes(fields, hidden_size, num_heads)
    rope = RopeParameters.from_config(fields.raw)
    bias = fields.flag("attention_bias", False)
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=sizes.rotary_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        is_tied=fields.flag("tie_word_embeddings", False),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=False,
        qk_norm=None,
        rope=rope,
        windows=(None,) * num_layers,
        attention_scale=_attention_scale(sizes, rope),
        experts=_experts(fields, defaults, routing, hidden_size, num_layers),
        pairs_are_neighbors=pairs_are_neighbors,
        latent=LatentConfig(sizes, _latent_rules(sizes)),
        rules=_extra_layers(fields, defaults, num_layers),
    )


def _sizes(fields: ConfigFields, hidden_size: int, num_heads: int) -> LatentSizes:
    # An explicit null means that queries are not compressed.
    is_compressed = fields.raw.get("q_lora_rank", 0) is not None
    return LatentSizes(
        hidden_size=hidden_size,
        num_heads=num_heads,
        query_rank=fields.integer("q_lora_rank", 1536) if is_compressed else None,
        latent_rank=fields.integer("kv_lora_rank"),
        plain_size=fields.integer("qk_nope_head_dim", 128),
        rotary_size=fields.integer("qk_rope_head_dim"),
        value_size=fields.integer("v_head_dim", 128),
    )


def _attention_scale(sizes: LatentSizes, rope: RopeParameters) -> float:
    """A stretched context sharpens scores, by a factor on queries and on keys."""
    scale = float(sizes.query_size**-0.5)
    if rope.rope_type == "default" or not rope.mscale_all_dim or rope.factor <= 1:
        return scale
    sharpening = 0.1 * rope.mscale_all_dim * math.log(rope.factor) + 1.0
    sharpened = scale * sharpening * sharpening
    if not math.isfinite(sharpened):
        raise ModelFormatError(
            f"rotary settings in the model's config.json: mscale_all_dim={rope.mscale_all_dim} makes scores infinite; "
            "it is about 1 in published models"
        )
    return sharpened


def _groups(fields: ConfigFields, defaults: tuple[int, int]) -> tuple[int, int]:
    """(groups of experts, those that are chosen from); an explicit null means one."""
    names = ("n_group", "topk_group")
    given = [
        fields.integer(name, 1 if name in fields.raw else default)
        for name, default in zip(names, defaults, strict=True)
    ]
    return given[0], given[1]


def _routing(fields: ConfigFields, **choices: Any) -> RoutingParameters:
    """Gates are computed in float32 whatever the dtype of the rest."""
    try:
        return RoutingParameters(**choices, in_float32=True)
    except ValueError as error:
        raise ModelFormatError(
            f"{fields.architecture}: n_routed_experts={choices['num_experts']}, "
            f"num_experts_per_tok={choices['num_chosen']}, n_group={choices['num_groups']} and "
            f"topk_group={choices['num_kept_groups']} do not go together: {error}"
        ) from error


def _experts(
    fields: ConfigFields, defaults: _Defaults, routing: RoutingParameters, hidden_size: int, num_layers: int
) -> ExpertsConfig:
    first = fields.count("first_k_dense_replace", defaults.first_sparse)
    size = fields.integer("moe_intermediate_size")
    shared = fields.count("n_shared_experts", defaults.num_shared)
    held = f"{LAYER}.mlp"
    rules = (
        WeightRule(f"{held}.gate.e_score_correction_bias", f"{held}.gate.e_score_correction_bias"),
        WeightRule(f"{held}.shared_experts.gate_proj.*", f"{held}.shared_experts.gate_up_proj.*", "gate"),
        WeightRule(f"{held}.shared_experts.up_proj.*", f"{held}.shared_experts.gate_up_proj.*", "up"),
        WeightRule(f"{held}.shared_experts.down_proj.*", f"{held}.shared_experts.down_proj.*"),
        *expert_rules("mlp", gate="gate_proj", up="up_proj", down="down_proj"),
    )
    return ExpertsConfig(
        sizes=MixtureSizes(hidden_size, size, shared * size if shared else None),
        routing=routing,
        layers=tuple(index >= first for index in range(num_layers)),
        rules=rules,
    )


def _latent_rules(sizes: LatentSizes) -> tuple[WeightRule, ...]:
    queries = ("q_proj.*",) if sizes.query_rank is None else ("q_a_proj.*", "q_a_layernorm.weight", "q_b_proj.*")
    names = (*queries, "kv_a_proj_with_mqa.*", "kv_a_layernorm.weight", "kv_b_proj.*")
    return tuple(WeightRule(f"{LAYER}.self_attn.{name}", f"{LAYER}.self_attn.{name}") for name in names)


def _extra_layers(fields: ConfigFields, defaults: _Defaults, num_layers: int) -> tuple[WeightRule, ...]:
    """Behind the last layer checkpoints hold those that predict further tokens: ignored, whatever they consist of."""
    count = fields.count("num_nextn_predict_layers", defaults.num_extra_layers, MAX_LAYERS)
    return tuple(
        WeightRule(".".join(("model.layers", str(number), *"*" * depth)), None)
        for number in range(num_layers, num_layers + count)
        for depth in range(1, DEEPEST_NAME + 1)
    )
