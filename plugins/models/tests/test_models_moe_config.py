"""What Mixtral, Qwen2-MoE and Qwen3-MoE read from a configuration, and what they refuse."""

from __future__ import annotations

from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.moe import read_mixtral, read_qwen2_moe, read_qwen3_moe
from hardpoint_torch_runtime.layers import MixtureSizes

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "num_experts_per_tok": 2,
}
MIXTRAL = {**BASE, "num_local_experts": 4}
QWEN2_MOE = {**BASE, "num_experts": 6, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
QWEN3_MOE = {**BASE, "num_experts": 6, "moe_intermediate_size": 32}


def test_what_mixtral_may_leave_out() -> None:
    config = read_mixtral(MIXTRAL, "MixtralForCausalLM")
    assert config.experts is not None
    routing = config.experts.routing
    assert (routing.num_experts, routing.num_chosen, routing.renormalizes) == (4, 2, True)
    assert config.experts.layers == (True,) * 4
    assert config.experts.sizes.expert_size == 80
    defaults = transformers.MixtralConfig()
    assert (config.rope.theta, config.norm_eps) == (defaults.default_theta, defaults.rms_norm_eps)
    assert config.windows == (defaults.sliding_window,) * 4


def test_what_qwen3_moe_may_leave_out() -> None:
    config = read_qwen3_moe(QWEN3_MOE, "Qwen3MoeForCausalLM")
    assert config.experts is not None
    assert config.experts.routing.renormalizes is transformers.Qwen3MoeConfig().norm_topk_prob
    assert config.experts.sizes.expert_size == 32
    assert config.windows == (None,) * 4
    assert config.qk_norm
    assert read_qwen3_moe({**QWEN3_MOE, "use_sliding_window": True}, "A").windows == (4096,) * 4


def test_what_qwen2_moe_may_leave_out() -> None:
    config = read_qwen2_moe(QWEN2_MOE, "Qwen2MoeForCausalLM")
    defaults = transformers.Qwen2MoeConfig()
    assert config.experts is not None
    assert config.experts.routing.renormalizes is defaults.norm_topk_prob
    assert config.experts.sizes == MixtureSizes(48, 32, 40, weighs_shared=True)
    assert (config.qkv_bias, config.output_bias, config.mlp_bias) == (defaults.qkv_bias, False, False)
    assert config.windows == (None,) * 4
    assert not config.qk_norm


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"max_window_layers": 3},
        {"max_window_layers": 0},
        {"sliding_window": 9},
        {"layer_types": ["full_attention", "full_attention", "sliding_attention", "full_attention"]},
    ],
    ids=str,
)
def test_windows_of_qwen2_moe_are_where_transformers_has_them(changes: dict[str, Any]) -> None:
    changed = {**QWEN2_MOE, **changes, "use_sliding_window": True}
    oracle = transformers.Qwen2MoeConfig(**changed)
    windows = [oracle.sliding_window if kind == "sliding_attention" else None for kind in oracle.layer_types]
    assert list(read_qwen2_moe(changed, "A").windows) == windows
    assert read_qwen2_moe({**changed, "use_sliding_window": False}, "A").windows == (None,) * 4


@pytest.mark.parametrize("spelling", ["num_experts", "num_local_experts"])
def test_both_spellings_of_the_number_of_experts(spelling: str) -> None:
    sizes = {"moe_intermediate_size": 32, "shared_expert_intermediate_size": 40}
    for read in (read_mixtral, read_qwen2_moe, read_qwen3_moe):
        experts = read({**BASE, **sizes, spelling: 5}, "A").experts
        assert experts is not None
        assert experts.routing.num_experts == 5


@pytest.mark.parametrize(
    ("changes", "layers"),
    [
        ({}, (True,) * 4),
        ({"mlp_only_layers": None, "decoder_sparse_step": None}, (True,) * 4),
        ({"decoder_sparse_step": 2}, (False, True, False, True)),
        ({"decoder_sparse_step": 2, "mlp_only_layers": [3]}, (False, True, False, False)),
        ({"mlp_only_layers": [0, 9]}, (False, True, True, True)),
    ],
)
def test_which_layers_have_experts(changes: dict[str, Any], layers: tuple[bool, ...]) -> None:
    for read, base in ((read_qwen2_moe, QWEN2_MOE), (read_qwen3_moe, QWEN3_MOE)):
        experts = read({**base, **changes}, "A").experts
        assert experts is not None
        assert experts.layers == layers


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"num_experts": None}, ModelFormatError, "'num_experts' is None"),
        ({"num_experts": 1}, ModelFormatError, "num_experts_per_tok=2 is more than there are, num_experts=1"),
        ({"num_experts_per_tok": 0}, ModelFormatError, "'num_experts_per_tok' is 0"),
        ({"moe_intermediate_size": "32"}, ModelFormatError, "'moe_intermediate_size' is '32'"),
        ({"norm_topk_prob": 1}, ModelFormatError, "'norm_topk_prob' is 1"),
        ({"mlp_only_layers": 3}, ModelFormatError, "'mlp_only_layers' is 3; a list of layer numbers"),
        ({"mlp_only_layers": [True]}, ModelFormatError, "'mlp_only_layers'"),
        ({"decoder_sparse_step": 0}, ModelFormatError, "'decoder_sparse_step' is 0"),
        ({"use_sliding_window": "yes"}, ModelFormatError, "'use_sliding_window' is 'yes'"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_qwen3_moe({**QWEN3_MOE, **changes}, "Qwen3MoeForCausalLM")
    assert "Qwen3MoeForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"shared_expert_intermediate_size": None}, ModelFormatError, "'shared_expert_intermediate_size' is None"),
        ({"shared_expert_intermediate_size": 0}, ModelFormatError, "'shared_expert_intermediate_size' is 0"),
        ({"qkv_bias": "yes"}, ModelFormatError, "'qkv_bias' is 'yes'"),
        ({"use_sliding_window": True, "max_window_layers": -1}, ModelFormatError, "'max_window_layers' is -1"),
        ({"use_sliding_window": True, "layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "chunked"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_what_qwen2_moe_refuses_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_qwen2_moe({**QWEN2_MOE, **changes}, "Qwen2MoeForCausalLM")
    assert "Qwen2MoeForCausalLM" in str(caught.value)
