"""What hybrids of recurrent layers and attention read from a configuration, as one frozen record."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import WeightRule
from hardpoint_models.causal import LAYER, gated_rules
from hardpoint_models.config_fields import ConfigFields, finite, shown
from hardpoint_models.decoder_config import ExpertsConfig, require_grouped_heads
from hardpoint_models.granite_rules import EXPERT_RULES
from hardpoint_torch_runtime.layers import (
    DeltaSizes,
    MambaSizes,
    MixtureSizes,
    RopeParameters,
    RoutingParameters,
    SelectiveSizes,
)

__all__ = [
    "HybridConfig",
    "mixer_rules",
    "read_bamba",
    "read_granite_hybrid",
    "read_layer_kinds",
    "read_sizes",
    "read_step_limits",
    "unchanged_rules",
]

LAYER_KINDS = {"linear_attention": True, "mamba": True, "full_attention": False, "attention": False}
"""Old and new names of the kinds of layers, and whether each is recurrent."""


@dataclass(frozen=True, slots=True)
class HybridConfig:
    """Sizes are those of the whole model; ``recurrent`` holds one entry per layer, False for attention.

    Attributes:
        intermediate_size: of the feed-forward block of layers without experts.
        mixer: of the recurrent layers.
        qk_norm: heads of queries and keys are normalized before they rotate.
        gates_output: queries come with as many gates for what attention yields.
        norm_offset: what checkpoints leave off the weights of norms, those within mixers apart.
        rope: None where attention sees no positions.
        attention_scale: factor on the products of queries and keys.
        embedding_scale: factor on embeddings, given ones too.
        residual_scale: factor on what a block adds to its residual.
        logits_divisor: logits are divided by this.
        rules: where checkpoints keep what the family names otherwise.
    """

    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_size: int
    vocab_size: int
    norm_eps: float
    is_tied: bool
    attention_bias: bool
    mlp_bias: bool
    attention_scale: float
    mixer: MambaSizes | SelectiveSizes | DeltaSizes
    recurrent: tuple[bool, ...]
    rules: tuple[WeightRule, ...]
    rope: RopeParameters | None
    experts: ExpertsConfig | None = None
    qk_norm: bool = False
    gates_output: bool = False
    norm_offset: float = 0.0
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logits_divisor: float = 1.0


BAMBA_RULES = (
    WeightRule("model.final_layernorm.weight", "model.norm.weight"),
    WeightRule(f"{LAYER}.pre_ff_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"),
    *gated_rules("feed_forward"),
    WeightRule(f"{LAYER}.feed_forward.down_proj.*", f"{LAYER}.mlp.down_proj.*"),
)


def _shared_rules(held: str) -> tuple[WeightRule, ...]:
    """Of the block that all tokens pass: checkpoints hold gate and up as one, files of other formats apart."""
    return (
        WeightRule(f"{LAYER}.shared_mlp.input_linear.*", held),
        *(WeightRule(f"{LAYER}.shared_mlp.{part}_proj.*", held, part) for part in ("gate", "up")),
    )


GRANITE_RULES = (
    WeightRule("model.norm.weight", "model.norm.weight"),
    WeightRule(f"{LAYER}.post_attention_layernorm.weight", f"{LAYER}.post_attention_layernorm.weight"),
)
GRANITE_DENSE_RULES = (
    *GRANITE_RULES,
    *_shared_rules(f"{LAYER}.mlp.gate_up_proj.*"),
    WeightRule(f"{LAYER}.shared_mlp.output_linear.*", f"{LAYER}.mlp.down_proj.*"),
)

GRANITE_SPARSE_RULES = (
    *GRANITE_RULES,
    *_shared_rules(f"{LAYER}.mlp.shared_experts.gate_up_proj.*"),
    WeightRule(f"{LAYER}.shared_mlp.output_linear.*", f"{LAYER}.mlp.shared_experts.down_proj.*"),
    *EXPERT_RULES,
)


def read_bamba(config: Mapping[str, Any], architecture: str) -> HybridConfig:
    """Attention in the layers of ``attn_layer_indices``, half of each head rotated.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features this family does
    not compute.
    """
    fields = ConfigFields(config, architecture)
    shared = read_sizes(fields, default_eps=1e-5)
    attending = fields.raw.get("attn_layer_indices")
    attending = [] if attending is None else attending
    num_layers = shared["num_layers"]
    if not isinstance(attending, list | tuple) or any(type(n) is not int or not 0 <= n < num_layers for n in attending):
        raise ModelFormatError(
            f"{architecture}: config field 'attn_layer_indices' is {shown(attending)}; a list of layer numbers below "
            f"num_hidden_layers={num_layers} is needed"
        )
    present = fields.present()
    return HybridConfig(
        **shared,
        intermediate_size=fields.integer("intermediate_size"),
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=fields.flag("mlp_bias", False),
        mixer=_mixer(fields, shared["hidden_size"], shared["norm_eps"]),
        attention_scale=shared["head_size"] ** -0.5,
        recurrent=tuple(layer not in attending for layer in range(num_layers)),
        rules=BAMBA_RULES,
        rope=RopeParameters.from_config({"partial_rotary_factor": 0.5, **present}),
    )


def read_granite_hybrid(config: Mapping[str, Any], architecture: str) -> HybridConfig:
    """Granite 4: scaled embeddings, residuals and logits, and perhaps experts. Raises as :func:`read_bamba`."""
    fields = ConfigFields(config, architecture)
    fields.require("position_embedding_type", (None, "nope", "rope"), None)
    shared = read_sizes(fields, default_eps=1e-6)
    rotates = fields.raw.get("position_embedding_type") == "rope"
    present = fields.present()
    shared_size = fields.integer("shared_intermediate_size", 1024)
    experts = _experts(fields, shared_size)
    return HybridConfig(
        **shared,
        intermediate_size=shared_size,
        attention_bias=fields.flag("attention_bias", False),
        mlp_bias=False,
        mixer=_mixer(fields, shared["hidden_size"], shared["norm_eps"]),
        attention_scale=fields.number("attention_multiplier", 1.0),
        recurrent=read_layer_kinds(fields, shared["num_layers"]),
        rules=GRANITE_DENSE_RULES if experts is None else GRANITE_SPARSE_RULES,
        rope=RopeParameters.from_config(present) if rotates else None,
        experts=experts,
        embedding_scale=fields.number("embedding_multiplier", 1.0),
        residual_scale=fields.number("residual_multiplier", 1.0),
        logits_divisor=fields.positive("logits_scaling", 1.0),
    )


def read_sizes(fields: ConfigFields, *, default_eps: float, head_size: int | None = None) -> dict[str, Any]:
    """Fields of :class:`HybridConfig` that all hybrids name alike; heads divide the hidden size unless ``head_size`` is
    their default. Raises as :func:`read_bamba`."""
    fields.require("hidden_act", ("silu", "swish"), "silu")
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads = require_grouped_heads(fields)
    return {
        "hidden_size": hidden_size,
        "num_layers": fields.num_layers(),
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": fields.integer("head_dim", head_size or max(hidden_size // num_heads, 1)),
        "vocab_size": fields.integer("vocab_size"),
        "norm_eps": fields.epsilon("rms_norm_eps", default_eps),
        "is_tied": fields.flag("tie_word_embeddings", False),
    }


def _mixer(fields: ConfigFields, hidden_size: int, norm_eps: float) -> MambaSizes:
    inner_size = fields.integer("mamba_expand", 2) * hidden_size
    num_heads = fields.integer("mamba_n_heads", 128)
    given = fields.raw.get("mamba_d_head", "auto")
    head_size = inner_size // num_heads if given == "auto" else fields.integer("mamba_d_head")
    if num_heads * head_size != inner_size:
        raise ModelFormatError(
            f"{fields.architecture}: mamba_n_heads={num_heads} heads of mamba_d_head={given} do not make up the "
            f"{inner_size} of mamba_expand times hidden_size"
        )
    try:
        return MambaSizes(
            hidden_size=hidden_size,
            num_heads=num_heads,
            head_size=head_size,
            num_groups=fields.integer("mamba_n_groups", 1),
            state_size=fields.integer("mamba_d_state", 256),
            conv_width=fields.integer("mamba_d_conv", 4),
            norm_eps=norm_eps,
            has_bias=fields.flag("mamba_proj_bias", False),
            has_conv_bias=fields.flag("mamba_conv_bias", True),
            step_limits=read_step_limits(fields),
        )
    except ValueError as error:
        raise ModelFormatError(
            f"{fields.architecture}: mamba_n_heads, mamba_n_groups or mamba_d_conv cannot be: {error}"
        ) from error


def read_step_limits(fields: ConfigFields) -> tuple[float, float]:
    """The smallest and the largest step of ``time_step_limit``; ``ModelFormatError`` for anything but two such."""
    given = fields.raw.get("time_step_limit")
    if given is None:
        return 0.0, math.inf
    limits = [_step_limit(limit) for limit in given] if isinstance(given, list | tuple) else []
    if len(limits) != 2 or None in limits or limits[0] > limits[1]:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'time_step_limit' is {shown(given)}; a smallest and a largest number "
            "are needed"
        )
    return limits[0], limits[1]


def _step_limit(given: Any) -> Any:
    """A float, or None. What JSON has no number for is also stored as ``{"__float__": "Infinity"}``."""
    if given == {"__float__": "Infinity"}:
        return math.inf
    return math.inf if given == math.inf else finite(given)


def read_layer_kinds(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    """Per layer whether it is recurrent; all are where the configuration says nothing."""
    given = fields.raw.get("layer_types")
    if given is None:
        return (True,) * num_layers
    if not isinstance(given, list | tuple) or len(given) != num_layers:
        raise ModelFormatError(
            f"{fields.architecture}: config field 'layer_types' must list {num_layers} layers, not {shown(given)}"
        )
    return tuple(_is_recurrent(fields, kind) for kind in given)


def _is_recurrent(fields: ConfigFields, kind: Any) -> bool:
    if not isinstance(kind, str) or kind not in LAYER_KINDS:
        raise UnsupportedModelError(
            f"{fields.architecture}: config field 'layer_types' holds {shown(kind)}; supported: "
            f"{', '.join(map(repr, LAYER_KINDS))}"
        )
    return LAYER_KINDS[kind]


def _experts(fields: ConfigFields, shared_size: int) -> ExpertsConfig | None:
    """In all layers or none; where checkpoints keep them is said elsewhere."""
    if fields.raw.get("num_local_experts") == 0:
        return None
    num_experts = fields.integer("num_local_experts", 8)
    num_chosen = fields.integer("num_experts_per_tok", 2)
    if num_chosen > num_experts:
        raise ModelFormatError(
            f"{fields.architecture}: num_experts_per_tok={num_chosen} is more than there are, "
            f"num_local_experts={num_experts}"
        )
    sizes = MixtureSizes(fields.integer("hidden_size"), fields.integer("intermediate_size"), shared_size)
    routing = RoutingParameters(num_experts, num_chosen, renormalizes=True)
    return ExpertsConfig(sizes, routing, layers=(True,) * fields.num_layers(), rules=())


def mixer_rules(mixer_name: str, names: Sequence[str]) -> tuple[WeightRule, ...]:
    """Of what a mixer has, under the same names."""
    return tuple(WeightRule(f"{LAYER}.{mixer_name}.{name}", f"{LAYER}.mixer.{name}") for name in names)


def unchanged_rules() -> Sequence[WeightRule]:
    """Of what all checkpoints of the family name alike."""
    names = ("model.embed_tokens.weight", f"{LAYER}.input_layernorm.weight", f"{LAYER}.self_attn.o_proj.*")
    return [
        *(WeightRule(name, name) for name in names),
        *mixer_rules("mamba", ("A_log", "D", "dt_bias", "in_proj.*", "conv1d.*", "norm.*", "out_proj.*")),
    ]
