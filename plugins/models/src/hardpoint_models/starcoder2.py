"""StarCoder2 and Phi: rotated heads with biases everywhere, under names of the Llama lineage."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import ClassicConfig, require_activation, require_even_heads, spelled
from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import require_grouped_heads
from hardpoint_torch_runtime.layers import RopeParameters

__all__ = ["create_phi", "create_starcoder2", "read_phi", "read_starcoder2"]

Inner = Mapping[str, str | tuple[str, str] | None]
_SHARED: Inner = {
    **{f"self_attn.{part}_proj.*": ("self_attn.qkv_proj.*", part) for part in ("q", "k", "v")},
    "input_layernorm.*": "input_layernorm.*",
    # Frequencies, which older checkpoints stored.
    "self_attn.rotary_emb.inv_freq": None,
}
_STARCODER2: Inner = {
    **_SHARED,
    "post_attention_layernorm.*": "post_attention_layernorm.*",
    "self_attn.o_proj.*": "self_attn.o_proj.*",
    "mlp.c_fc.*": "mlp.up_proj.*",
    "mlp.c_proj.*": "mlp.down_proj.*",
}
_PHI: Inner = {
    **_SHARED,
    "self_attn.dense.*": "self_attn.o_proj.*",
    "mlp.fc1.*": "mlp.up_proj.*",
    "mlp.fc2.*": "mlp.down_proj.*",
}


def read_starcoder2(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for unknown activations and
    rotations."""
    # Left out, heads of keys and values are two here, and not as many as queries have.
    fields = ConfigFields({"num_key_value_heads": 2, **_present(config)}, architecture)
    is_tied, bias = fields.flag("tie_word_embeddings", True), fields.flag("use_bias", True)
    window = None if fields.raw.get("sliding_window") is None else fields.integer("sliding_window")
    head_size = fields.integer("head_dim", _head_size(fields) if "head_dim" not in fields.raw else None)
    return ClassicConfig(
        **_sizes(fields, head_size),
        norm_eps=fields.epsilon("norm_epsilon", 1e-5),
        is_tied=is_tied,
        activation=require_activation(fields, "hidden_act", "gelu_pytorch_tanh"),
        qkv_bias=bias,
        output_bias=bias,
        mlp_bias=bias,
        rope=RopeParameters.from_config(fields.raw),
        windows=(window,) * fields.num_layers(),
        rules=_rules("norm", _STARCODER2, None if is_tied else "lm_head.projection.*"),
    )


def read_phi(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for unknown activations and
    rotations, norms over heads and tied heads."""
    fields = ConfigFields(_present(config), architecture)
    fields.require("qk_layernorm", (False,), False)
    # A tied head would be without the bias that the family has.
    fields.require("tie_word_embeddings", (False,), False)
    return ClassicConfig(
        **_sizes(fields, _head_size(fields)),
        norm_eps=fields.epsilon("layer_norm_eps", 1e-5),
        is_tied=False,
        activation=require_activation(fields, "hidden_act", "gelu_new"),
        flow="parallel",
        has_second_norm=False,
        rope=RopeParameters.from_config({"partial_rotary_factor": 0.5, **fields.raw}),
        head_bias=True,
        rules=_rules("final_layernorm", _PHI, "lm_head.projection.*"),
    )


def _present(config: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in config.items() if value is not None}


def _head_size(fields: ConfigFields) -> int:
    return require_even_heads(fields, fields.integer("hidden_size"), fields.integer("num_attention_heads"))


def _sizes(fields: ConfigFields, head_size: int) -> dict[str, Any]:
    num_heads, num_kv_heads = require_grouped_heads(fields)
    hidden_size, num_layers = fields.integer("hidden_size"), fields.num_layers()
    return {
        "hidden_size": hidden_size,
        "embedding_size": hidden_size,
        "intermediate_size": fields.integer("intermediate_size"),
        "num_layers": num_layers,
        "num_heads": num_heads,
        "num_kv_heads": num_kv_heads,
        "head_size": head_size,
        "vocab_size": fields.integer("vocab_size"),
        "attention_scales": (head_size**-0.5,) * num_layers,
    }


def _rules(norm: str, inner: Inner, head: str | None) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {"embed_tokens.weight": "model.embed_tokens.weight", f"{norm}.*": "model.norm.*"}
    return (WeightRule("lm_head.*", head), *spelled(("model.", ""), "layers", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_starcoder2(ctx: ModelContext, options: NoOptions) -> Model:
    """``Starcoder2ForCausalLM``: every layer has the sliding window, if there is one."""
    del options
    return build_classic(ctx, read_starcoder2)


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_phi(ctx: ModelContext, options: NoOptions) -> Model:
    """``PhiForCausalLM``: Phi-1 to Phi-2, with one norm for both blocks of a layer and a bias on the head."""
    del options
    return build_classic(ctx, read_phi)
