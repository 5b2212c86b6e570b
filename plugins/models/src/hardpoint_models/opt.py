"""OPT: learned positions that begin at the third row of their table, ReLU, norms before or behind the blocks."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import (
    ClassicConfig,
    LearnedPositions,
    require_activation,
    require_even_heads,
    spelled,
)
from hardpoint_models.config_fields import ConfigFields

__all__ = ["create_opt", "read_opt"]

OFFSET = 2
"""Rows of the table that no position has."""
EPSILON = 1e-5


def read_opt(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for unknown activations and
    norms without weights."""
    fields = ConfigFields(config, architecture)
    fields.require("layer_norm_elementwise_affine", (True,), True)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.num_layers()
    head_size = require_even_heads(fields, hidden_size, num_heads)
    is_tied, bias = fields.flag("tie_word_embeddings", True), fields.flag("enable_bias", True)
    norms_first = fields.flag("do_layer_norm_before", True)
    return ClassicConfig(
        hidden_size=hidden_size,
        embedding_size=fields.integer("word_embed_proj_dim", hidden_size),
        intermediate_size=fields.integer("ffn_dim"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=EPSILON,
        is_tied=is_tied,
        activation=require_activation(fields, "activation_function", "relu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        flow="sequential" if norms_first else "post_norm",
        has_final_norm=norms_first and not fields.flag("_remove_final_layer_norm", False),
        positions=LearnedPositions(fields.integer("max_position_embeddings"), OFFSET),
        attention_scales=(head_size**-0.5,) * num_layers,
        rules=_rules(is_tied),
    )


def _rules(is_tied: bool) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {
        "embed_tokens.weight": "model.embed_tokens.weight",
        "embed_positions.weight": "model.positions.table.weight",
        "project_in.*": "model.project_in.*",
        "project_out.*": "model.project_out.*",
        "final_layer_norm.*": "model.norm.*",
    }
    inner: dict[str, str | tuple[str, str] | None] = {
        **{f"self_attn.{part}_proj.*": ("self_attn.qkv_proj.*", part) for part in ("q", "k", "v")},
        "self_attn.out_proj.*": "self_attn.o_proj.*",
        "self_attn_layer_norm.*": "input_layernorm.*",
        "final_layer_norm.*": "post_attention_layernorm.*",
        "fc1.*": "mlp.up_proj.*",
        "fc2.*": "mlp.down_proj.*",
    }
    head = WeightRule("lm_head.weight", None if is_tied else "lm_head.projection.weight")
    return (head, *spelled(("model.decoder.", "decoder.", ""), "layers", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_opt(ctx: ModelContext, options: NoOptions) -> Model:
    """``OPTForCausalLM``: also Galactica."""
    del options
    return build_classic(ctx, read_opt)
