"""Rotary embedding against Hugging Face, for every supported scaling and both spellings of its settings."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding, apply_rotary_pos_emb

from hardpoint.errors import ConfigError, ModelFormatError, UnsupportedModelError
from hardpoint_torch_runtime.layers import RopeParameters, RotaryEmbedding

CPU = torch.device("cpu")
LLAMA3 = {
    "rope_type": "llama3",
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 64,
}
YARN = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
LONGROPE = {
    "rope_type": "longrope",
    "short_factor": [1.0, 2.0],
    "long_factor": [2.0, 4.0],
    "original_max_position_embeddings": 64,
}
SCALINGS: list[dict[str, Any]] = [
    {"rope_type": "default"},
    {"rope_type": "linear", "factor": 3.0},
    LLAMA3,
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "truncate": False, "beta_fast": 16},
    {"rope_type": "yarn", "factor": 40.0, "original_max_position_embeddings": 64, "mscale": 1.0, "mscale_all_dim": 0.7},
    {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64, "attention_factor": 1.3},
]


@pytest.mark.parametrize("scaling", SCALINGS, ids=lambda scaling: "-".join(map(str, scaling.values())))
@pytest.mark.parametrize("head_size", [16, 20])
def test_rotation_equals_hugging_face(scaling: dict[str, Any], head_size: int) -> None:
    rope = {"rope_theta": 5000.0, **scaling}
    config = LlamaConfig(hidden_size=4 * head_size, num_attention_heads=4, head_dim=head_size,
                         max_position_embeddings=256, rope_parameters=rope)  # fmt: skip
    positions = torch.tensor([0, 1, 63, 64, 65, 200, 255])
    query, key = torch.randn(7, 4, head_size), torch.randn(7, 2, head_size)
    cos, sin = LlamaRotaryEmbedding(config)(query, positions[None])
    expected_q, expected_k = apply_rotary_pos_emb(query.transpose(0, 1)[None], key.transpose(0, 1)[None], cos, sin)

    rotary = RotaryEmbedding(head_size, 256, RopeParameters.from_config(config.to_dict()), CPU)
    actual_q, actual_k = rotary(positions, query.clone(), key.clone())
    torch.testing.assert_close(actual_q, expected_q[0].transpose(0, 1), rtol=2e-5, atol=2e-5)
    torch.testing.assert_close(actual_k, expected_k[0].transpose(0, 1), rtol=2e-5, atol=2e-5)


def test_the_older_spelling_means_the_same() -> None:
    old = {"rope_theta": 1e6, "rope_scaling": {**LLAMA3, "type": "llama3"}, "max_position_embeddings": 512}
    new = {"rope_parameters": {**LLAMA3, "rope_theta": 1e6}}
    assert RopeParameters.from_config(old) == RopeParameters.from_config(new)


def test_settings_per_layer_type() -> None:
    config = {
        "rope_parameters": {
            "full_attention": {"rope_type": "linear", "factor": 8.0, "rope_theta": 1e6},
            "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        }
    }
    assert RopeParameters.from_config(config, "full_attention").factor == 8.0
    assert RopeParameters.from_config(config, "sliding_attention").theta == 1e4


@pytest.mark.parametrize("rope_type", ["axial", "no-such-type"])
def test_an_unsupported_type_is_named(rope_type: str) -> None:
    with pytest.raises(UnsupportedModelError, match=f"rope_type '{rope_type}'.*supported: default, linear"):
        RopeParameters.from_config({"rope_scaling": {"rope_type": rope_type, "factor": 2.0}})


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"rope_scaling": {"type": "linear"}}, "'linear'.*needs 'factor'"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0}}, "original_max_position_embeddings: None is no length"),
        ({"rope_scaling": ["linear"]}, "an object is needed"),
        ({"rope_theta": "big"}, "'rope_theta'.*'big'"),
        ({"rope_theta": float("nan")}, "'rope_theta'.*nan"),
        ({"rope_theta": 1}, r"rope_theta: 1\.0 is not above 1"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 0}}, "factor: 0.0 is not positive"),
        ({"rope_parameters": {**LLAMA3, "low_freq_factor": 4.0}}, "high_freq_factor: 4.0 is not above"),
        ({"partial_rotary_factor": 1.5}, r"partial_rotary_factor: 1\.5"),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, "original_max_position_embeddings: None is no length"),
        ({"rope_scaling": {"type": "longrope", "long_factor": [1.0]}}, "'longrope'.*needs 'short_factor'"),
        ({"rope_scaling": {**LONGROPE, "long_factor": 2.0}}, "'long_factor'.*2.0; a list is needed"),
        ({"rope_scaling": {**LONGROPE, "long_factor": [1.0, "2"]}}, "'long_factor'.*'2'; a number is needed"),
        ({"rope_scaling": {**LONGROPE, "short_factor": [1.0, 0]}}, "short_factor: 0.0 is not positive"),
        ({"rope_scaling": {**LONGROPE, "original_max_position_embeddings": 1}}, "1 is no length"),
        ({"rope_scaling": {**YARN, "beta_fast": 0}}, r"beta_fast: 0\.0 is not above 0"),
        ({"rope_scaling": {**YARN, "beta_slow": -1}}, r"beta_slow: -1\.0 is not above 0"),
        ({"rope_scaling": {**YARN, "beta_fast": 1e300}}, r"beta_fast: 1e\+300 is not .* at most"),
        ({"rope_scaling": {**LLAMA3, "original_max_position_embeddings": 1e300}}, "0 is no length"),
        ({"rope_scaling": {"type": "mrope", "mrope_section": [4, 4]}}, r"mrope_section: \[4, 4\] are not 3 counts"),
    ],
    ids=str,
)
def test_a_missing_or_impossible_value_is_named(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelFormatError, match=message):
        RopeParameters.from_config(config)


@pytest.mark.parametrize(("head_size", "factor"), [(7, 1.0), (16, 0.05), (20, 0.25)])
def test_an_odd_number_of_rotated_values_is_refused(head_size: int, factor: float) -> None:
    with pytest.raises(ModelFormatError, match="turns pairs"):
        RotaryEmbedding(head_size, 8, RopeParameters(partial_factor=factor), CPU)


@pytest.mark.parametrize("claimed", [20_000_000, 2**31 - 1, 2**62])
def test_no_table_is_made_for_a_context_that_nothing_has_room_for(claimed: int) -> None:
    """A configuration may claim any length, and tables come before the cache that would not fit."""
    with pytest.raises(ConfigError, match="set --max-model-len to at most 8388608"):
        RotaryEmbedding(128, claimed, RopeParameters(), CPU)


def test_only_a_part_of_the_head_may_rotate() -> None:
    rope = RopeParameters(partial_factor=0.5)
    whole = RotaryEmbedding(8, 32, RopeParameters(), CPU)
    half = RotaryEmbedding(16, 32, rope, CPU)
    heads, positions = torch.randn(3, 2, 16), torch.tensor([3, 9, 31])
    rotated = half.rotate_(heads.clone(), *half.lookup(positions))
    torch.testing.assert_close(rotated[..., 8:], heads[..., 8:])
    expected = whole.rotate_(heads[..., :8].clone(), *whole.lookup(positions))
    torch.testing.assert_close(rotated[..., :8], expected)


def test_low_precision_heads_are_rotated_in_float32() -> None:
    rotary = RotaryEmbedding(16, 64, RopeParameters(), CPU)
    heads = torch.randn(5, 2, 16).bfloat16()
    factors = rotary.lookup(torch.arange(59, 64))
    exact = rotary.rotate_(heads.float(), *factors)
    assert torch.equal(rotary.rotate_(heads.clone(), *factors), exact.bfloat16())
