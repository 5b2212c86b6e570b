"""What Bamba and Granite 4 read from a configuration, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.hybrid_config import read_bamba, read_granite_hybrid
from hardpoint_torch_runtime.layers import MambaSizes

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "mamba_n_heads": 6,
}


def test_what_bamba_may_leave_out() -> None:
    config = read_bamba(BASE, "BambaForCausalLM")
    defaults = transformers.BambaConfig()
    assert isinstance(config.mixer, MambaSizes)
    assert config.recurrent == (True,) * 3
    assert config.norm_eps == defaults.rms_norm_eps
    assert config.mixer.state_size == defaults.mamba_d_state
    assert config.mixer.conv_width == defaults.mamba_d_conv
    assert config.mixer.has_conv_bias is defaults.mamba_conv_bias
    assert (config.mixer.num_groups, config.mixer.head_size) == (defaults.mamba_n_groups, 16)
    assert config.mixer.step_limits == (0.0, math.inf)
    assert config.rope is not None
    assert config.rope.partial_factor == 0.5


def test_what_granite_may_leave_out() -> None:
    config = read_granite_hybrid(BASE, "GraniteMoeHybridForCausalLM")
    defaults = transformers.GraniteMoeHybridConfig()
    assert config.experts is not None
    assert config.experts.routing.num_experts == defaults.num_local_experts
    assert config.experts.routing.num_chosen == defaults.num_experts_per_tok
    assert config.experts.sizes.shared_size == defaults.shared_intermediate_size
    assert config.norm_eps == defaults.rms_norm_eps
    assert config.rope is None
    assert config.recurrent == (True,) * 3
    scales = (config.embedding_scale, config.residual_scale, config.attention_scale, config.logits_divisor)
    assert scales == (1.0,) * 4


@pytest.mark.parametrize("kinds", [["mamba", "attention", "mamba"], ["linear_attention", "full_attention", "mamba"]])
def test_old_and_new_names_of_layers(kinds: list[str]) -> None:
    config = read_granite_hybrid({**BASE, "layer_types": kinds}, "A")
    assert config.recurrent == (True, False, True)


@pytest.mark.parametrize("position", [None, "nope", "rope"])
def test_granite_rotates_only_where_it_says_so(position: str | None) -> None:
    config = read_granite_hybrid({**BASE, "position_embedding_type": position, "rope_theta": 5e5}, "A")
    assert (config.rope is not None) == (position == "rope")
    assert config.rope is None or config.rope.theta == 5e5


@pytest.mark.parametrize("largest", [math.inf, {"__float__": "Infinity"}])
def test_limits_without_an_upper_end(largest: object) -> None:
    mixer = read_bamba({**BASE, "time_step_limit": [0.5, largest]}, "A").mixer
    assert isinstance(mixer, MambaSizes)
    assert mixer.step_limits == (0.5, math.inf)


def test_granite_without_experts() -> None:
    config = read_granite_hybrid({**BASE, "num_local_experts": 0, "shared_intermediate_size": 24}, "A")
    assert config.experts is None
    assert config.intermediate_size == 24


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"attn_layer_indices": [3]}, ModelFormatError, r"'attn_layer_indices' is \[3\].*num_hidden_layers=3"),
        ({"attn_layer_indices": "all"}, ModelFormatError, "'attn_layer_indices' is 'all'"),
        ({"attn_layer_indices": [True]}, ModelFormatError, "'attn_layer_indices'"),
        ({"mamba_n_heads": 7}, ModelFormatError, "mamba_n_heads=7 heads of mamba_d_head=auto do not make up the 96"),
        ({"mamba_d_head": 8}, ModelFormatError, "mamba_n_heads=6 heads of mamba_d_head=8"),
        ({"mamba_d_head": "wide"}, ModelFormatError, "'mamba_d_head' is 'wide'"),
        ({"mamba_n_groups": 4}, ModelFormatError, "num_heads=6 is no multiple of num_groups=4"),
        ({"mamba_d_conv": 1}, ModelFormatError, "conv_width=1 must be 2 or more"),
        ({"time_step_limit": [1.0]}, ModelFormatError, r"'time_step_limit' is \[1.0\]"),
        ({"time_step_limit": [1.0, 0.5]}, ModelFormatError, "'time_step_limit'"),
        ({"time_step_limit": [0.0, "much"]}, ModelFormatError, "'time_step_limit'"),
        ({"time_step_limit": 0.5}, ModelFormatError, "'time_step_limit' is 0.5"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
        ({"mamba_d_state": 0}, ModelFormatError, "'mamba_d_state' is 0"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_bamba_refuses_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_bamba({**BASE, **changes}, "BambaForCausalLM")
    assert "BambaForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"layer_types": ["mamba"]}, ModelFormatError, "'layer_types' must list 3 layers"),
        ({"layer_types": ["mamba", "mamba", "rwkv"]}, UnsupportedModelError, "'layer_types' holds 'rwkv'"),
        ({"layer_types": ["mamba", "mamba", None]}, UnsupportedModelError, "'layer_types' holds None"),
        ({"position_embedding_type": "alibi"}, UnsupportedModelError, "'position_embedding_type' is 'alibi'"),
        ({"num_local_experts": 1}, ModelFormatError, "num_experts_per_tok=2 is more than there are, num_local_exp"),
        ({"num_local_experts": -1}, ModelFormatError, "'num_local_experts' is -1"),
        ({"logits_scaling": 0}, ModelFormatError, "'logits_scaling' is 0.0; it must be above 0"),
        ({"residual_multiplier": "x"}, ModelFormatError, "'residual_multiplier' is 'x'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_granite_refuses_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_granite_hybrid({**BASE, **changes}, "GraniteMoeHybridForCausalLM")
    assert "GraniteMoeHybridForCausalLM" in str(caught.value)
