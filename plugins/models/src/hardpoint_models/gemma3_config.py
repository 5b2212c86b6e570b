"""What Gemma 3 reads from a configuration, in either of the spellings found in the wild."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, require_grouped_heads, require_layer_types
from hardpoint_torch_runtime.layers import RopeParameters

__all__ = ["read_gemma3"]

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
DEFAULT_PATTERN = 6
"""Every so many layers one attends to everything, where the configuration lists no layer types."""
DEFAULT_HEAD_SIZE = DEFAULT_QUERY_SCALAR = 256
DEFAULT_WINDOW = 4096


def read_gemma3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
    computed here (attention in both directions, other activations)."""
    fields = ConfigFields(config, architecture)
    fields.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.require("use_bidirectional_attention", (False,), False)
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads = require_grouped_heads(fields)
    num_layers = fields.num_layers()
    is_local = _local_layers(fields, num_layers)
    attention_bias = fields.flag("attention_bias", False)
    rope, local_rope = _ropes(fields)
    return DecoderConfig(
        hidden_size=hidden_size,
        intermediate_size=fields.integer("intermediate_size"),
        num_layers=num_layers,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_size=fields.integer("head_dim", DEFAULT_HEAD_SIZE),
        vocab_size=fields.integer("vocab_size"),
        norm_eps=fields.epsilon("rms_norm_eps", 1e-6),
        is_tied=fields.flag("tie_word_embeddings", True),
        qkv_bias=attention_bias,
        output_bias=attention_bias,
        mlp_bias=False,
        qk_norm="heads",
        rope=rope,
        windows=_windows(fields, is_local),
        attention_scale=fields.positive("query_pre_attn_scalar", DEFAULT_QUERY_SCALAR) ** -0.5,
        activation="gelu_tanh",
        local_rope=local_rope,
        local_layers=is_local,
        norm_offset=1.0,
        norm_placement="around",
        embedding_scale=hidden_size**0.5,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping"),
        logits_soft_cap=_soft_cap(fields, "final_logit_softcapping"),
    )


def _local_layers(fields: ConfigFields, num_layers: int) -> tuple[bool, ...]:
    layer_types = fields.raw.get("layer_types")
    if layer_types is not None:
        kinds = require_layer_types(fields, layer_types, num_layers)
        return tuple(kind == "sliding_attention" for kind in kinds)
    pattern = fields.integer("sliding_window_pattern", DEFAULT_PATTERN)
    return tuple((index + 1) % pattern != 0 for index in range(num_layers))


def _windows(fields: ConfigFields, is_local: tuple[bool, ...]) -> tuple[int | None, ...]:
    if not any(is_local):
        return (None,) * len(is_local)
    # An explicit null leaves windowed layers without a width, which is refused.
    stated = "sliding_window" in fields.raw
    window = fields.integer("sliding_window", None if stated else DEFAULT_WINDOW)
    return tuple(window if local else None for local in is_local)


def _ropes(fields: ConfigFields) -> tuple[RopeParameters, RopeParameters]:
    """Rotation of full and of windowed layers. Older files scale the former alone and give the latter's base apart."""
    present = {name: value for name, value in fields.raw.items() if value is not None}
    whole = RopeParameters.from_config({"rope_theta": GLOBAL_THETA, **present}, "full_attention")
    by_type = present.pop("rope_parameters", {})
    present.pop("rope_scaling", None)
    present["rope_theta"] = fields.number("rope_local_base_freq", LOCAL_THETA)
    if isinstance(by_type, Mapping) and by_type.get("sliding_attention"):
        present["rope_parameters"] = by_type["sliding_attention"]
    return whole, RopeParameters.from_config(present)


def _soft_cap(fields: ConfigFields, name: str) -> float | None:
    return None if fields.raw.get(name) is None else fields.positive(name, 1.0)
