"""What Gemma 2 and 3 read from a configuration, in either of the spellings found in the wild."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from hardpoint_models.config_fields import ConfigFields
from hardpoint_models.decoder_config import DecoderConfig, require_grouped_heads
from hardpoint_models.layer_kinds import local_layers, local_windows, rotations_by_kind
from hardpoint_torch_runtime.layers import RopeParameters

__all__ = ["read_gemma2", "read_gemma3"]

GLOBAL_THETA, LOCAL_THETA = 1_000_000.0, 10_000.0
GEMMA2_PATTERN, GEMMA3_PATTERN = 2, 6
"""Every so many layers one attends to everything, where the configuration lists no layer types."""
GEMMA2_SCORES_CAP, GEMMA2_LOGITS_CAP = 50.0, 30.0
DEFAULT_HEAD_SIZE = DEFAULT_QUERY_SCALAR = 256
DEFAULT_WINDOW = 4096


def read_gemma2(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Gemma 2: a window in every other layer, one rotation, capped scores and logits. Raises as :func:`read_gemma3`."""
    fields = ConfigFields(config, architecture)
    return _read_gemma(
        fields,
        GEMMA2_PATTERN,
        qk_norm=None,
        rope=RopeParameters.from_config(fields.present()),
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", GEMMA2_SCORES_CAP),
        logits_soft_cap=_soft_cap(fields, "final_logit_softcapping", GEMMA2_LOGITS_CAP),
    )


def read_gemma3(config: Mapping[str, Any], architecture: str) -> DecoderConfig:
    """Raises ``ModelFormatError`` for absent or malformed fields, ``UnsupportedModelError`` for features that are not
    computed here (attention in both directions, other activations)."""
    fields = ConfigFields(config, architecture)
    rope, local_rope = rotations_by_kind(fields, GLOBAL_THETA, fields.number("rope_local_base_freq", LOCAL_THETA))
    return _read_gemma(
        fields,
        fields.integer("sliding_window_pattern", GEMMA3_PATTERN),
        qk_norm="heads",
        rope=rope,
        local_rope=local_rope,
        attention_soft_cap=_soft_cap(fields, "attn_logit_softcapping", None),
        logits_soft_cap=_soft_cap(fields, "final_logit_softcapping", None),
    )


def _read_gemma(fields: ConfigFields, pattern: int, **own: Any) -> DecoderConfig:
    """What generations have in common, with the fields of the record that they have of their ``own``."""
    fields.require("hidden_activation", ("gelu_pytorch_tanh",), "gelu_pytorch_tanh")
    fields.require("use_bidirectional_attention", (False,), False)
    hidden_size = fields.integer("hidden_size")
    num_heads, num_kv_heads = require_grouped_heads(fields)
    num_layers = fields.num_layers()
    is_local = local_layers(fields, num_layers, pattern)
    attention_bias = fields.flag("attention_bias", False)
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
        windows=local_windows(fields, is_local, DEFAULT_WINDOW),
        attention_scale=fields.positive("query_pre_attn_scalar", DEFAULT_QUERY_SCALAR) ** -0.5,
        activation="gelu_tanh",
        local_layers=is_local,
        norm_offset=1.0,
        norm_placement="around",
        embedding_scale=hidden_size**0.5,
        **own,
    )


def _soft_cap(fields: ConfigFields, name: str, default: float | None) -> float | None:
    """The default holds where the configuration does not mention the field; an explicit null means none."""
    return None if fields.raw.get(name, default) is None else fields.positive(name, default or 1.0)
