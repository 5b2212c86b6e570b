"""GPT-NeoX and Pythia: part of each head rotates, and both blocks of a layer work side by side."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint.interfaces.model import Model, ModelContext, WeightRule
from hardpoint.interfaces.plugin import NoOptions, plugin
from hardpoint_models.classic import build_classic
from hardpoint_models.classic_config import ClassicConfig, require_activation, require_even_heads, spelled
from hardpoint_models.config_fields import ConfigFields
from hardpoint_torch_runtime.layers import GROUPED, RopeParameters

__all__ = ["create_gpt_neox", "read_gpt_neox"]


def read_gpt_neox(config: Mapping[str, Any], architecture: str) -> ClassicConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for unknown activations and
    rotations."""
    fields = ConfigFields(config, architecture)
    hidden_size, num_heads = fields.integer("hidden_size"), fields.integer("num_attention_heads")
    num_layers = fields.num_layers()
    head_size = require_even_heads(fields, hidden_size, num_heads)
    is_tied = fields.flag("tie_word_embeddings", False)
    bias = fields.flag("attention_bias", True)
    return ClassicConfig(
        hidden_size=hidden_size,
        embedding_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_heads,
        head_size=head_size,
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("layer_norm_eps", 1e-5),
        is_tied=is_tied,
        activation=require_activation(fields, "hidden_act", "gelu"),
        qkv_bias=bias,
        output_bias=bias,
        flow="parallel" if fields.flag("use_parallel_residual", True) else "sequential",
        rope=_rope(fields),
        attention_scales=(head_size**-0.5,) * num_layers,
        rules=_rules(is_tied),
    )


def _rope(fields: ConfigFields) -> RopeParameters:
    """The family has names of its own for base and share of a head, which give way to the common ones."""
    given = {name: value for name, value in fields.raw.items() if value is not None}
    own = {
        "rope_theta": fields.positive("rotary_emb_base", 10000.0),
        "partial_rotary_factor": fields.positive("rotary_pct", 0.25),
    }
    return RopeParameters.from_config({**own, **given})


def _rules(is_tied: bool) -> tuple[WeightRule, ...]:
    outer: dict[str, str | None] = {
        "embed_in.weight": "model.embed_tokens.weight",
        "final_layer_norm.*": "model.norm.*",
    }
    inner: dict[str, str | tuple[str, str] | None] = {
        "input_layernorm.*": "input_layernorm.*",
        "post_attention_layernorm.*": "post_attention_layernorm.*",
        "attention.query_key_value.*": ("self_attn.qkv_proj.*", GROUPED),
        "attention.dense.*": "self_attn.o_proj.*",
        "mlp.dense_h_to_4h.*": "mlp.up_proj.*",
        "mlp.dense_4h_to_h.*": "mlp.down_proj.*",
        # Frequencies and masks, which older checkpoints stored.
        "attention.rotary_emb.inv_freq": None,
        "attention.bias": None,
        "attention.masked_bias": None,
    }
    head = None if is_tied else "lm_head.projection.weight"
    heads = (WeightRule("embed_out.weight", head), WeightRule("lm_head.weight", head))
    return (*heads, *spelled(("gpt_neox.", ""), "layers", outer, inner))


@plugin("model", capabilities={"tasks": ["generate", "embed"]})
def create_gpt_neox(ctx: ModelContext, options: NoOptions) -> Model:
    """``GPTNeoXForCausalLM``: also Pythia, Dolly and others saved under that name."""
    del options
    return build_classic(ctx, read_gpt_neox)
