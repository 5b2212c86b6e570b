"""What Mamba, Mamba-2, Jamba and Qwen3-Next read from a configuration, and what they refuse."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.jamba import read_jamba
from hardpoint_models.mamba_config import read_mamba, read_mamba2
from hardpoint_models.qwen3_next import read_qwen3_next
from hardpoint_torch_runtime.layers import DeltaSizes, MambaSizes, SelectiveSizes

PURE: dict[str, Any] = {"hidden_size": 48, "num_hidden_layers": 3, "vocab_size": 100}
MAMBA2: dict[str, Any] = {**PURE, "num_heads": 6, "head_dim": 16, "n_groups": 2}
HYBRID: dict[str, Any] = {**PURE, "intermediate_size": 80, "num_attention_heads": 4, "num_key_value_heads": 2}
SPARSE: dict[str, Any] = {**HYBRID, "num_experts": 6, "num_experts_per_tok": 2}


def test_what_mamba_may_leave_out() -> None:
    config, defaults = read_mamba(PURE, "MambaForCausalLM"), transformers.MambaConfig(hidden_size=48)
    assert isinstance(config.mixer, SelectiveSizes)
    assert (config.is_tied, config.keeps_residual_exact) == (defaults.tie_word_embeddings, defaults.residual_in_fp32)
    assert config.norm_eps == defaults.layer_norm_epsilon
    assert (config.mixer.inner_size, config.mixer.state_size) == (defaults.intermediate_size, defaults.state_size)
    assert (config.mixer.step_rank, config.mixer.conv_width) == (defaults.time_step_rank, defaults.conv_kernel)
    assert (config.mixer.has_bias, config.mixer.has_conv_bias) == (defaults.use_bias, defaults.use_conv_bias)


def test_the_inner_size_of_mamba_counts_before_its_expansion() -> None:
    """Falcon's checkpoints have an ``expand`` that their inner size is not a multiple of."""
    mixer = read_mamba({**PURE, "expand": 16, "intermediate_size": 84}, "MambaForCausalLM").mixer
    assert isinstance(mixer, SelectiveSizes)
    assert mixer.inner_size == 84


def test_what_mamba2_may_leave_out() -> None:
    config, defaults = read_mamba2({**PURE, "hidden_size": 4096}, "Mamba2ForCausalLM"), transformers.Mamba2Config()
    assert isinstance(config.mixer, MambaSizes)
    assert config.is_tied is defaults.tie_word_embeddings
    assert (config.mixer.num_heads, config.mixer.head_size) == (defaults.num_heads, defaults.head_dim)
    assert (config.mixer.num_groups, config.mixer.state_size) == (defaults.n_groups, defaults.state_size)
    assert config.mixer.step_limits == (0.0, math.inf)


def test_what_jamba_may_leave_out() -> None:
    config = read_jamba({**HYBRID, "num_hidden_layers": 9}, "JambaForCausalLM")
    defaults = transformers.JambaConfig(num_hidden_layers=9, hidden_size=48)
    assert isinstance(config.mixer, SelectiveSizes)
    assert config.experts is not None
    assert [not recurrent for recurrent in config.recurrent] == [
        kind == "attention" for kind in defaults.layers_block_type
    ]
    assert list(config.experts.layers) == [count > 1 for count in defaults.layers_num_experts]
    assert (config.experts.routing.num_experts, config.experts.routing.num_chosen) == (16, 2)
    assert config.experts.routing.renormalizes is False
    assert (config.mixer.step_rank, config.mixer.norm_eps) == (defaults.mamba_dt_rank, defaults.rms_norm_eps)
    assert config.rope is None


def test_one_expert_of_jamba_is_a_dense_block() -> None:
    assert read_jamba({**HYBRID, "num_experts": 1, "num_experts_per_tok": 1}, "A").experts is None


def test_what_qwen3_next_may_leave_out() -> None:
    config = read_qwen3_next({**HYBRID, "num_hidden_layers": 9}, "Qwen3NextForCausalLM")
    defaults = transformers.Qwen3NextConfig(num_hidden_layers=9)
    assert isinstance(config.mixer, DeltaSizes)
    assert config.experts is not None
    assert config.rope is not None
    assert list(config.recurrent) == [kind == "linear_attention" for kind in defaults.layer_types]
    assert config.head_size == defaults.head_dim
    assert config.rope.partial_factor == 0.25
    assert (config.mixer.num_heads, config.mixer.head_size) == (32, defaults.linear_value_head_dim)
    assert (config.mixer.num_groups, config.mixer.key_size) == (16, defaults.linear_key_head_dim)
    assert (config.experts.routing.num_experts, config.experts.routing.num_chosen) == (512, 10)
    assert config.experts.routing.renormalizes is defaults.norm_topk_prob
    assert (config.experts.sizes.expert_size, config.experts.sizes.shared_size) == (512, 512)
    assert config.experts.layers == (True,) * 9


def test_qwen3_next_with_dense_layers_and_an_interval() -> None:
    config = read_qwen3_next(
        {**SPARSE, "full_attention_interval": 2, "mlp_only_layers": [2], "decoder_sparse_step": 1}, "A"
    )
    assert config.recurrent == (True, False, True)
    assert config.experts is not None
    assert config.experts.layers == (True, True, False)
    assert read_qwen3_next({**SPARSE, "num_experts": 0}, "A").experts is None


@pytest.mark.parametrize(
    ("read", "base", "changes", "error", "message"),
    [
        (read_mamba, PURE, {"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'; supported"),
        (read_mamba, PURE, {"conv_kernel": 1}, ModelFormatError, "conv_kernel cannot be: conv_width=1"),
        (read_mamba, PURE, {"time_step_rank": "many"}, ModelFormatError, "'time_step_rank' is 'many'"),
        (read_mamba, PURE, {"expand": 1.5}, ModelFormatError, "'expand' is 1.5; a positive integer is needed"),
        (read_mamba, PURE, {"state_size": 0}, ModelFormatError, "'state_size' is 0"),
        (read_mamba2, MAMBA2, {"num_heads": 5}, ModelFormatError, "num_heads=5 heads of head_dim=16 do not make up"),
        (read_mamba2, MAMBA2, {"n_groups": 4}, ModelFormatError, "num_heads=6 is no multiple of num_groups=4"),
        (read_mamba2, MAMBA2, {"time_step_limit": [1]}, ModelFormatError, r"'time_step_limit' is \[1\]"),
        (read_jamba, HYBRID, {"attn_layer_offset": 8}, ModelFormatError, "attn_layer_offset=8 must be below"),
        (read_jamba, HYBRID, {"expert_layer_offset": 2}, ModelFormatError, "expert_layer_offset=2 must be below"),
        (read_jamba, HYBRID, {"num_experts": 2, "num_experts_per_tok": 3}, ModelFormatError, "per_tok=3 is more than"),
        (read_jamba, HYBRID, {"num_key_value_heads": 3}, ModelFormatError, "num_attention_heads=4 is no multiple"),
        (read_jamba, HYBRID, {"mamba_d_conv": 1}, ModelFormatError, "mamba_d_conv cannot be: conv_width=1"),
        (
            read_qwen3_next,
            SPARSE,
            {"layer_types": ["mamba2"] * 3},
            UnsupportedModelError,
            "'layer_types' holds 'mamba2'",
        ),
        (read_qwen3_next, SPARSE, {"layer_types": []}, ModelFormatError, "'layer_types' must list 3 layers"),
        (read_qwen3_next, SPARSE, {"linear_num_key_heads": 3}, ModelFormatError, "num_heads=32 is no multiple of"),
        (read_qwen3_next, SPARSE, {"num_experts_per_tok": 7}, ModelFormatError, "num_experts_per_tok=7 is more than"),
        (read_qwen3_next, SPARSE, {"partial_rotary_factor": 1.5}, ModelFormatError, "partial_rotary_factor"),
    ],
)
def test_what_is_refused(
    read: Callable[[Mapping[str, Any], str], Any],
    base: dict[str, Any],
    changes: dict[str, Any],
    error: type[HardpointError],
    message: str,
) -> None:
    read(base, "A")
    with pytest.raises(error, match=message):
        read({**base, **changes}, "A")
