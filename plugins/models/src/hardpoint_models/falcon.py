"""Falcon: one or a few heads of keys and values, both blocks of a layer side by side; the oldest with ALiBi."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from hardpoint.errors import ModelFormatError, UnsupportedModelError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import (
    ClassicConfig,
    alibi_slopes,
    require_activation,
    require_even_heads,
    size,
    spelled,
)
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields, shown
from hardpoint_torch_runtime.layers import GROUPED, RopeParameters

__all__ = ["create_falcon", "read_falcon"]


def read_falcon(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for unknown activations and
    rotations, and for arrangements of blocks that no checkpoint of the family has."""
    fields = ConfigFields(config, architecture)
    hidden_size = size(fields, "hidden_size", "n_embed")
    num_heads = size(fields, "num_attention_heads", "n_head")
    num_layers = size(fields, "num_hidden_layers", "n_layer", most=MAX_LAYERS)
    head_size = require_even_heads(fields, hidden_size, num_heads)
    is_tied, bias = fields.flag("tie_word_embeddings", True), _switch(fields, "bias", False)
    is_new, has_slopes = _switch(fields, "new_decoder_architecture", False), _switch(fields, "alibi", False)
    num_norms = _num_norms(fields, is_new=is_new)
    return ClassicConfig(
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        intermediate_size=fields.integer("ffn_hidden_size", 4 * hidden_size),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=_num_kv_heads(fields, num_heads, is_new=is_new),
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        is_tied=is_tied,
        activation=require_activation(fields, "activation", "gelu"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        flow="parallel" if is_new or _switch(fields, "parallel_attn", True) else "sequential",
        has_second_norm=num_norms == 2,
        rope=None if has_slopes else _rope(config),
        alibi_slopes=_slopes(num_heads, head_size) if has_slopes else (),
        attention_scales=(head_size**-0.5,) * num_layers,
        rules=_rules(is_tied),
    )


def _switch(fields: ConfigFields, name: str, default: bool) -> bool:
    """The family's null is a no, unlike a field left out."""
    return fields.flag(name, default and name not in fields.raw)


def _num_norms(fields: ConfigFields, *, is_new: bool) -> int:
    is_parallel = _switch(fields, "parallel_attn", True)
    given = fields.raw.get("num_ln_in_parallel_attn")
    if not is_new:
        # Only the newer decoder can have two norms side by side.
        fields.require("num_ln_in_parallel_attn", (1,) if is_parallel else (1, 2), 1)
        return 1 if is_parallel else 2
    if not is_parallel:
        raise UnsupportedModelError(
            f"{fields.architecture}: config field 'parallel_attn' is {shown(fields.raw.get('parallel_attn'))} with "
            "new_decoder_architecture=True, whose blocks always work side by side; supported: True"
        )
    fields.require("num_ln_in_parallel_attn", (1, 2), 2)
    return 2 if given is None else fields.integer("num_ln_in_parallel_attn")


def _num_kv_heads(fields: ConfigFields, num_heads: int, *, is_new: bool) -> int:
    if not is_new and _switch(fields, "multi_query", True):
        return 1
    num_kv_heads = size(fields, "num_kv_heads", "n_head_kv", default=num_heads)
    if num_heads % num_kv_heads or (not is_new and num_kv_heads != num_heads):
        raise ModelFormatError(
            f"{fields.architecture}: num_kv_heads={num_kv_heads} does not fit {num_heads} attention heads with "
            f"new_decoder_architecture={is_new} and multi_query=False"
        )
    return num_kv_heads


def _rope(config: Mapping[str, Any]) -> RopeParameters:
    """Heads rotate as a whole, whatever shares other families have."""
    given = {name: value for name, value in config.items() if value is not None and name != "partial_rotary_factor"}
    return RopeParameters.from_config(given)


def _slopes(num_heads: int, head_size: int) -> tuple[float, ...]:
    """The family rounds slopes to bfloat16, and divides them like the scores they are added to."""
    rounded = torch.tensor(alibi_slopes(num_heads)).bfloat16().tolist()
    return tuple(slope * head_size**-0.5 for slope in rounded)


def _rules(is_tied: bool) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {"word_embeddings.weight": "model.embed_tokens.weight", "ln_f.*": "model.norm.*"}
    inner: dict[str, str | tuple[str, str] | None] = {
        "input_layernorm.*": "input_layernorm.*",
        "post_attention_layernorm.*": "post_attention_layernorm.*",
        "ln_attn.*": "input_layernorm.*",
        "ln_mlp.*": "post_attention_layernorm.*",
        "self_attention.query_key_value.*": ("self_attn.qkv_proj.*", GROUPED),
        "self_attention.dense.*": "self_attn.o_proj.*",
        "mlp.dense_h_to_4h.*": "mlp.up_proj.*",
        "mlp.dense_4h_to_h.*": "mlp.down_proj.*",
        # Frequencies, which older checkpoints stored.
        "self_attention.rotary_emb.inv_freq": None,
        "self_attention.maybe_rotary.inv_freq": None,
    }
    head = WeightRule("lm_head.weight", None if is_tied else "lm_head.projection.weight")
    return (head, *spelled(("transformer.", ""), "h", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_falcon(ctx: ModelContext, options: NoOptions) -> Model:
    """``FalconForCausalLM``: of all three generations, with one head of keys and values, a few, or all."""
    del options
    return build_classic(ctx, read_falcon)
