"""GPT-2 and StarCoder's first generation: learned positions, one fused projection for queries, keys and values."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import (
    ClassicConfig,
    LearnedPositions,
    require_activation,
    require_even_heads,
    size,
    spelled,
)
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields
from hardpoint_torch_runtime.layers import GROUPED, TRANSPOSED

__all__ = ["create_gpt2", "create_gpt_bigcode", "read_gpt2", "read_gpt_bigcode"]

_PREFIXES = ("transformer.", "")
"""The oldest checkpoints hold the model without its head, and so without a prefix."""


def read_gpt2(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for cross-attention and
    unknown activations."""
    fields = ConfigFields(config, architecture)
    record = _read(fields, "gelu_new", transposed=True)
    if fields.flag("scale_attn_by_inverse_layer_idx", False):
        scales = tuple(scale / (index + 1) for index, scale in enumerate(record.attention_scales))
        record = replace(record, attention_scales=scales)
    return record


def read_gpt_bigcode(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises as :func:`read_gpt2` does."""
    fields = ConfigFields(config, architecture)
    record = _read(fields, "gelu_pytorch_tanh", transposed=False)
    return replace(record, num_kv_heads=1) if fields.flag("multi_query", True) else record


def _read(fields: ConfigFields, activation: str, *, transposed: bool) -> ClassicConfig:
    fields.require("add_cross_attention", (False,), False)
    hidden_size = size(fields, "n_embd", "hidden_size")
    num_heads = size(fields, "n_head", "num_attention_heads")
    num_layers = size(fields, "n_layer", "num_hidden_layers", most=MAX_LAYERS)
    head_size = require_even_heads(fields, hidden_size, num_heads)
    is_tied = fields.flag("tie_word_embeddings", True)
    scale = head_size**-0.5 if fields.flag("scale_attn_weights", True) else 1.0
    return ClassicConfig(
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        intermediate_size=fields.integer("n_inner", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        is_tied=is_tied,
        activation=require_activation(fields, "activation_function", activation),
        positions=LearnedPositions(size(fields, "n_positions", "max_position_embeddings")),
        attention_scales=(scale,) * num_layers,
        rules=_rules(is_tied, transposed=transposed),
    )


def _rules(is_tied: bool, *, transposed: bool) -> tuple[WeightRule, ...]:
    linears = {"attn.c_proj": "self_attn.o_proj", "mlp.c_fc": "mlp.up_proj", "mlp.c_proj": "mlp.down_proj"}
    inner: dict[str, str | tuple[str, str] | None] = {
        "ln_1.*": "input_layernorm.*",
        "ln_2.*": "post_attention_layernorm.*",
        # Masks, where older checkpoints stored them.
        "attn.bias": None,
        "attn.masked_bias": None,
    }
    if transposed:
        for stored, held in {"attn.c_attn": "self_attn.qkv_proj", **linears}.items():
            inner |= {f"{stored}.weight": (f"{held}.weight", TRANSPOSED), f"{stored}.bias": f"{held}.bias"}
    else:
        inner["attn.c_attn.*"] = ("self_attn.qkv_proj.*", GROUPED)
        inner |= {f"{stored}.*": f"{held}.*" for stored, held in linears.items()}
    outer: dict[str, str | None] = {
        "wte.weight": "model.embed_tokens.weight",
        "wpe.weight": "model.positions.table.weight",
        "ln_f.*": "model.norm.*",
    }
    head = WeightRule("lm_head.weight", None if is_tied else "lm_head.projection.weight")
    return (head, *spelled(_PREFIXES, "h", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gpt2(ctx: ModelContext, options: NoOptions) -> Model:
    """``GPT2LMHeadModel``: also models saved under that name."""
    del options
    return build_classic(ctx, read_gpt2)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gpt_bigcode(ctx: ModelContext, options: NoOptions) -> Model:
    """``GPTBigCodeForCausalLM``: one head of keys and values for all queries, unless the configuration disagrees."""
    del options
    return build_classic(ctx, read_gpt_bigcode)
