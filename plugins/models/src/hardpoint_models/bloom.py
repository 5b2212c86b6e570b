"""BLOOM and MPT: positions are slopes on the scores (ALiBi)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import ClassicConfig, alibi_slopes, require_even_heads, size, spelled
from hardpoint_models.config_fields import MAX_LAYERS, ConfigFields, shown
from hardpoint_torch_runtime.layers import GROUPED

__all__ = ["create_bloom", "create_mpt", "read_bloom", "read_mpt"]

_PREFIXES = ("transformer.", "")
WIDENING = 4
"""The feed-forward block's size over the hidden size."""


def read_bloom(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for residuals taken behind
    the norm."""
    fields = ConfigFields(config, architecture)
    fields.require("apply_residual_connection_post_layernorm", (False,), False)
    sizes, is_tied = _sizes(fields, "hidden_size", "n_layer", "n_head"), fields.flag("tie_word_embeddings", True)
    return ClassicConfig(
        **sizes,
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        is_tied=is_tied,
        activation="gelu_pytorch_tanh",
        has_embedding_norm=True,
        alibi_slopes=alibi_slopes(sizes["num_heads"]),
        attention_scales=(sizes["head_size"] ** -0.5,) * sizes["num_layers"],
        rules=_bloom_rules(is_tied),
    )


def read_mpt(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """The steepest slope is the configuration's, as in MPT's own code; ``transformers`` always takes the usual one.

    Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for biases, learned positions,
    shared heads, norms over heads, prefixes and scaled logits.
    """
    fields = ConfigFields(config, architecture)
    given = config.get("attn_config")
    if given is not None and not isinstance(given, Mapping):
        raise ModelFormatError(f"{architecture}: config field 'attn_config' is {shown(given)}; an object is needed")
    attention = ConfigFields(given or {}, f"{architecture}: attn_config")
    for name, allowed in (("no_bias", True), ("logit_scale", None), ("expansion_ratio", WIDENING)):
        fields.require(name, (allowed,), allowed)
    for name, wanted in (("alibi", True), ("qk_ln", False), ("prefix_lm", False), ("attn_uses_sequence_id", False)):
        attention.require(name, (wanted,), wanted)
    attention.require("attn_type", ("multihead_attention",), "multihead_attention")
    sizes, is_tied = _sizes(fields, "d_model", "n_layers", "n_heads"), fields.flag("tie_word_embeddings", True)
    clip = attention.number("clip_qkv", 0.0)
    scale = attention.positive("softmax_scale", sizes["head_size"] ** -0.5)
    return ClassicConfig(
        **sizes,
        norm_eps=fields.epsilon("layer_norm_epsilon", 1e-5),
        is_tied=is_tied,
        activation="gelu",
        qkv_bias=False,
        output_bias=False,
        mlp_bias=False,
        norm_bias=False,
        alibi_slopes=alibi_slopes(sizes["num_heads"], attention.positive("alibi_bias_max", 8.0)),
        attention_scales=(scale,) * sizes["num_layers"],
        qkv_clip=attention.positive("clip_qkv", 1.0) if clip else None,
        rules=_mpt_rules(is_tied),
    )


def _sizes(fields: ConfigFields, hidden: str, layers: str, heads: str) -> dict[str, Any]:
    hidden_size = size(fields, hidden, "hidden_size", "n_embed")
    num_heads = size(fields, heads, "num_attention_heads")
    return {
        "hidden_size": hidden_size,
        "embedding_size": hidden_size,
        "intermediate_size": WIDENING * hidden_size,
        "num_layers": size(fields, layers, "num_hidden_layers", most=MAX_LAYERS),
        "num_heads": num_heads,
        "num_kv_heads": num_heads,
        "head_size": require_even_heads(fields, hidden_size, num_heads),
        "vocab_size": fields.integer("vocab_size"),
    }


def _bloom_rules(is_tied: bool) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {
        "word_embeddings.weight": "model.embed_tokens.weight",
        "word_embeddings_layernorm.*": "model.embedding_norm.*",
        "ln_f.*": "model.norm.*",
    }
    inner: dict[str, str | tuple[str, str] | None] = {
        "input_layernorm.*": "input_layernorm.*",
        "post_attention_layernorm.*": "post_attention_layernorm.*",
        "self_attention.query_key_value.*": ("self_attn.qkv_proj.*", GROUPED),
        "self_attention.dense.*": "self_attn.o_proj.*",
        "mlp.dense_h_to_4h.*": "mlp.up_proj.*",
        "mlp.dense_4h_to_h.*": "mlp.down_proj.*",
    }
    head = WeightRule("lm_head.weight", None if is_tied else "lm_head.projection.weight")
    return (head, *spelled(_PREFIXES, "h", outer, inner))


def _mpt_rules(is_tied: bool) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {"wte.weight": "model.embed_tokens.weight", "norm_f.weight": "model.norm.weight"}
    inner: dict[str, str | tuple[str, str] | None] = {
        "norm_1.weight": "input_layernorm.weight",
        "norm_2.weight": "post_attention_layernorm.weight",
        "attn.Wqkv.*": "self_attn.qkv_proj.*",
        "attn.out_proj.*": "self_attn.o_proj.*",
        "ffn.up_proj.*": "mlp.up_proj.*",
        "ffn.down_proj.*": "mlp.down_proj.*",
    }
    head = WeightRule("lm_head.weight", None if is_tied else "lm_head.projection.weight")
    return (head, *spelled(_PREFIXES, "blocks", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_bloom(ctx: ModelContext, options: NoOptions) -> Model:
    """``BloomForCausalLM``: what enters the first layer is normalized."""
    del options
    return build_classic(ctx, read_bloom)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_mpt(ctx: ModelContext, options: NoOptions) -> Model:
    """``MptForCausalLM``: no biases anywhere, queries, keys and values perhaps clipped."""
    del options
    return build_classic(ctx, read_mpt)
