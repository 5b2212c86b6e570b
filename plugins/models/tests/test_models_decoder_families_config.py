"""What decoder families read from configurations, against what Hugging Face makes of the same; what they refuse."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.gemma3_config import read_gemma2
from hardpoint_models.granite import read_granite, read_granite_moe
from hardpoint_models.olmo import read_olmo2, read_olmo3
from hardpoint_models.phi3 import read_phi3
from hardpoint_models.smollm3 import read_smollm3

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
}
READERS: Mapping[str, Callable[[Mapping[str, Any], str], DecoderConfig]] = {
    "Gemma2ForCausalLM": read_gemma2,
    "GraniteForCausalLM": read_granite,
    "GraniteMoeForCausalLM": read_granite_moe,
    "Olmo2ForCausalLM": read_olmo2,
    "Olmo3ForCausalLM": read_olmo3,
    "Phi3ForCausalLM": read_phi3,
    "SmolLM3ForCausalLM": read_smollm3,
}
KINDS = ["full_attention", "sliding_attention", "sliding_attention", "full_attention"]
YARN: dict[str, Any] = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE: dict[str, Any] = {"rope_type": "longrope", "short_factor": [1.0, 1.5, 2.0], "long_factor": [2.0, 4.0, 8.0]}


def read(architecture: str, **changes: Any) -> DecoderConfig:
    return READERS[architecture]({**BASE, **changes}, architecture)


@pytest.mark.parametrize(
    ("architecture", "changes"),
    [
        ("Gemma2ForCausalLM", {}),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": None, "final_logit_softcapping": 20.0, "head_dim": 16}),
        ("Gemma2ForCausalLM", {"sliding_window": 9, "layer_types": KINDS, "query_pre_attn_scalar": 24}),
        ("GraniteForCausalLM", {}),
        ("GraniteForCausalLM", {"attention_multiplier": 0.2, "logits_scaling": 8.0, "residual_multiplier": 0.22}),
        ("GraniteForCausalLM", {"embedding_multiplier": 12, "attention_bias": True, "mlp_bias": True}),
        ("GraniteMoeForCausalLM", {}),
        ("GraniteMoeForCausalLM", {"num_local_experts": 6, "num_experts_per_tok": 3}),
        ("Olmo2ForCausalLM", {}),
        ("Olmo2ForCausalLM", {"rope_theta": 5e5, "attention_bias": True, "tie_word_embeddings": True}),
        ("Olmo3ForCausalLM", {}),
        ("Olmo3ForCausalLM", {"rope_theta": 5e5, "rope_scaling": YARN, "sliding_window": 9, "layer_types": KINDS}),
        ("Phi3ForCausalLM", {}),
        ("Phi3ForCausalLM", {"sliding_window": 2047, "rope_theta": 250000.0}),
        ("Phi3ForCausalLM", {"rope_scaling": {**LONGROPE, "type": "longrope"}, "partial_rotary_factor": 0.5}),
        ("SmolLM3ForCausalLM", {}),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0, 0, 1], "rope_theta": 5e6}),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 2, "use_sliding_window": True, "sliding_window": 9}),
        ("SmolLM3ForCausalLM", {"layer_types": KINDS, "use_sliding_window": True, "sliding_window": 9}),
        ("SmolLM3ForCausalLM", {"layer_types": KINDS, "sliding_window": 9}),
    ],
    ids=lambda value: value if isinstance(value, str) else "-".join(value) or "defaults",
)
def test_a_file_means_what_hugging_face_reads_in_it(architecture: str, changes: dict[str, Any]) -> None:
    """Fields left out and older spellings alike: reading the file is reading what Hugging Face would save again."""
    oracle = getattr(transformers, architecture).config_class(**{**BASE, **changes})
    assert read(architecture, **changes) == READERS[architecture](oracle.to_dict(), architecture)


def test_gemma2_has_caps_unless_they_are_null_and_windows_in_every_other_layer() -> None:
    config = read("Gemma2ForCausalLM", sliding_window=9)
    assert (config.attention_soft_cap, config.logits_soft_cap) == (50.0, 30.0)
    assert config.windows == (9, None, 9, None)
    assert config.qk_norm is None
    assert read("Gemma2ForCausalLM", final_logit_softcapping=None).logits_soft_cap is None


def test_granite_scores_have_the_factor_of_the_file_alone() -> None:
    config = read("GraniteForCausalLM", attention_multiplier=0.2, embedding_multiplier=12, logits_scaling=8)
    assert (config.attention_scale, config.input_scale, config.logits_divisor) == (0.2, 12.0, 8.0)
    assert (config.residual_scale, config.embedding_scale) == (1.0, None)


def test_only_full_layers_of_olmo3_are_stretched() -> None:
    config = read("Olmo3ForCausalLM", rope_scaling=YARN, sliding_window=9)
    assert config.windows == (9, 9, 9, None)
    assert config.rope.rope_type == "yarn"
    assert config.local_rope is not None
    assert (config.local_rope.rope_type, config.local_rope.theta) == ("default", 500000.0)
    assert [config.rotation_of(layer) for layer in range(4)] == [1, 1, 1, 0]


def test_the_older_name_of_a_stretched_phi_and_its_lengths() -> None:
    scaling = {**LONGROPE, "type": "su"}
    del scaling["rope_type"]
    config = read("Phi3ForCausalLM", rope_scaling=scaling, partial_rotary_factor=0.5, max_position_embeddings=131072)
    assert (config.rope.rope_type, config.rope.partial_factor) == ("longrope", 0.5)
    assert (config.rope.original_length, config.rope.factor) == (4096, 32.0)


def test_layers_of_smollm3_without_rotation() -> None:
    config = read("SmolLM3ForCausalLM")
    assert config.rotated_layers == (True, True, True, False)
    assert [config.rotation_of(layer) for layer in range(4)] == [0, 0, 0, None]
    assert config.windows == (None,) * 4
    longer = read("SmolLM3ForCausalLM", no_rope_layers=[0, 1, 1, 1, 0, 0])
    assert longer.rotated_layers == (False, True, True, True)


@pytest.mark.parametrize(
    ("architecture", "changes", "error", "message"),
    [
        ("Gemma2ForCausalLM", {"hidden_activation": "silu"}, UnsupportedModelError, "'hidden_activation' is 'silu'"),
        ("Gemma2ForCausalLM", {"attn_logit_softcapping": 0}, ModelFormatError, "'attn_logit_softcapping' is 0"),
        ("Gemma2ForCausalLM", {"sliding_window": None}, ModelFormatError, "'sliding_window' is None"),
        ("GraniteForCausalLM", {"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
        ("GraniteForCausalLM", {"logits_scaling": 0}, ModelFormatError, "'logits_scaling' is 0.0; it must be above 0"),
        ("GraniteForCausalLM", {"residual_multiplier": "x"}, ModelFormatError, "'residual_multiplier' is 'x'"),
        ("GraniteMoeForCausalLM", {"num_experts_per_tok": 9}, ModelFormatError, "num_experts_per_tok=9 is more than"),
        ("Olmo2ForCausalLM", {"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
        ("Olmo2ForCausalLM", {"num_key_value_heads": 3}, ModelFormatError, "num_attention_heads=4 is no multiple"),
        ("Olmo3ForCausalLM", {"layer_types": KINDS[:2]}, ModelFormatError, "'layer_types' must list 4 layers"),
        ("Olmo3ForCausalLM", {"layer_types": ["chunked"] * 4}, UnsupportedModelError, "'layer_types' holds 'chunked'"),
        ("Phi3ForCausalLM", {"rope_scaling": YARN}, UnsupportedModelError, "rope_type is 'yarn'; supported: 'default'"),
        ("Phi3ForCausalLM", {"rope_scaling": {"type": "su"}}, ModelFormatError, "needs 'short_factor'"),
        ("Phi3ForCausalLM", {"sliding_window": "wide"}, ModelFormatError, "'sliding_window' is 'wide'"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 0]}, ModelFormatError, r"'no_rope_layers' is \[1, 0\]"),
        ("SmolLM3ForCausalLM", {"no_rope_layers": [1, 2, 1, 1]}, ModelFormatError, "a 0 or 1 for each of 4 layers"),
        ("SmolLM3ForCausalLM", {"no_rope_layer_interval": 0}, ModelFormatError, "'no_rope_layer_interval' is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    architecture: str, changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message):
        read(architecture, **changes)
