"""What Gemma 3 reads from a configuration, against what Hugging Face makes of the same one."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.gemma3_config import read_gemma3

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 7,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
LINEAR: dict[str, Any] = {"rope_type": "linear", "factor": 8.0}


def read(**changes: Any) -> DecoderConfig:
    return read_gemma3({**BASE, **changes}, "Gemma3ForCausalLM")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"head_dim": 16, "query_pre_attn_scalar": 24, "sliding_window": 9, "rms_norm_eps": 1e-5},
        {"sliding_window_pattern": 3},
        {"layer_types": ["full_attention", *["sliding_attention"] * 6]},
        {"layer_types": ["full_attention"] * 7, "sliding_window": None},
        {"rope_theta": 5e5, "rope_local_base_freq": 2e4},
        {"rope_theta": 1e6, "rope_scaling": LINEAR},
        {"final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0},
        {"tie_word_embeddings": False, "attention_bias": True},
    ],
    ids=lambda changes: "-".join(changes) or "defaults",
)
def test_a_file_means_what_hugging_face_reads_in_it(changes: dict[str, Any]) -> None:
    """Fields left out and older spellings alike: reading the file is reading what Hugging Face would save again."""
    oracle = transformers.Gemma3TextConfig(**{**BASE, **changes})
    config = read(**changes)
    assert config == read_gemma3(oracle.to_dict(), "Gemma3ForCausalLM")
    assert config.windows == tuple(
        oracle.sliding_window if kind == "sliding_attention" else None for kind in oracle.layer_types
    )
    assert config.attention_scale == oracle.query_pre_attn_scalar**-0.5
    assert config.local_rope is not None
    for rope, kind in ((config.rope, "full_attention"), (config.local_rope, "sliding_attention")):
        wanted = oracle.rope_parameters[kind]
        assert (rope.theta, rope.rope_type, rope.factor) == (
            wanted["rope_theta"],
            wanted["rope_type"],
            wanted.get("factor", 1.0),
        )
    assert (config.logits_soft_cap, config.attention_soft_cap) == (
        oracle.final_logit_softcapping,
        oracle.attn_logit_softcapping,
    )
    assert (config.head_size, config.is_tied, config.norm_eps) == (
        oracle.head_dim,
        oracle.tie_word_embeddings,
        oracle.rms_norm_eps,
    )


def test_windowed_layers_keep_their_rotation_where_scaling_is_for_full_ones() -> None:
    config = read(rope_scaling=LINEAR)
    assert config.rope.rope_type == "linear"
    assert config.local_rope is not None
    assert config.local_rope.rope_type == "default"


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"hidden_activation": "silu"}, UnsupportedModelError, "'hidden_activation' is 'silu'"),
        ({"use_bidirectional_attention": True}, UnsupportedModelError, "'use_bidirectional_attention' is True"),
        ({"sliding_window": None}, ModelFormatError, "'sliding_window' is None; a positive integer"),
        ({"query_pre_attn_scalar": 0}, ModelFormatError, "'query_pre_attn_scalar' is 0.0; it must be above 0"),
        ({"final_logit_softcapping": -1}, ModelFormatError, "'final_logit_softcapping' is -1.0"),
        ({"layer_types": ["chunked_attention"] * 7}, UnsupportedModelError, "'layer_types' holds 'chunked_attention'"),
        ({"layer_types": ["full_attention"]}, ModelFormatError, "'layer_types' must list 7 layers"),
        ({"sliding_window_pattern": 0}, ModelFormatError, "'sliding_window_pattern' is 0"),
        ({"num_key_value_heads": 3}, ModelFormatError, "num_attention_heads=4 is no multiple"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read(**changes)
    assert "Gemma3ForCausalLM" in str(caught.value)
