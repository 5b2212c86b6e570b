"""What DeepSeek V2 and V3 read from a configuration, and what they refuse."""

from __future__ import annotations

import math
from typing import Any

import pytest
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_models.decoder_config import DecoderConfig
from hardpoint_models.deepseek_config import read_deepseek_v2, read_deepseek_v3
from hardpoint_torch_runtime.layers import LatentSizes

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 80,
    "moe_intermediate_size": 20,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "vocab_size": 100,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "n_routed_experts": 16,
    "num_experts_per_tok": 4,
}
REAL_V3: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "attention_bias": False,
    "ep_size": 1,
    "first_k_dense_replace": 3,
    "hidden_act": "silu",
    "hidden_size": 7168,
    "intermediate_size": 18432,
    "kv_lora_rank": 512,
    "max_position_embeddings": 163840,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_group": 8,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "norm_topk_prob": True,
    "num_attention_heads": 128,
    "num_experts_per_tok": 8,
    "num_hidden_layers": 61,
    "num_key_value_heads": 128,
    "num_nextn_predict_layers": 1,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "rms_norm_eps": 1e-06,
    "rope_scaling": {
        "beta_fast": 32,
        "beta_slow": 1,
        "factor": 40,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 4096,
        "type": "yarn",
    },
    "rope_theta": 10000,
    "routed_scaling_factor": 2.5,
    "scoring_func": "sigmoid",
    "tie_word_embeddings": False,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "v_head_dim": 128,
    "vocab_size": 129280,
}
"""As the largest published model of the family states it."""


def test_a_published_configuration() -> None:
    config = read_deepseek_v3(REAL_V3, "DeepseekV3ForCausalLM")
    assert config.latent is not None
    assert config.latent.sizes == LatentSizes(
        hidden_size=7168,
        num_heads=128,
        query_rank=1536,
        latent_rank=512,
        plain_size=128,
        rotary_size=64,
        value_size=128,
    )
    assert config.latent.sizes.latent_size == 576
    assert config.attention_scale == pytest.approx(192**-0.5 * (0.1 * math.log(40) + 1) ** 2)
    assert config.pairs_are_neighbors
    assert config.experts is not None
    assert config.experts.layers == (False,) * 3 + (True,) * 58
    assert (config.experts.sizes.expert_size, config.experts.sizes.shared_size) == (2048, 2048)
    routing = config.experts.routing
    assert (routing.num_experts, routing.num_chosen, routing.num_groups, routing.num_kept_groups) == (256, 8, 8, 4)
    assert (routing.scoring, routing.renormalizes, routing.scale) == ("sigmoid", True, 2.5)
    assert routing.has_correction_bias
    assert routing.in_float32


def experts_of(config: DecoderConfig) -> Any:
    assert config.experts is not None
    return config.experts


def test_what_v3_may_leave_out_is_what_hugging_face_takes() -> None:
    given = {**BASE, "n_routed_experts": None, "num_experts_per_tok": None}
    config, defaults = read_deepseek_v3(given, "A"), transformers.DeepseekV3Config()
    assert config.latent is not None
    sizes, experts = config.latent.sizes, experts_of(config)
    assert (sizes.query_rank, sizes.plain_size, sizes.value_size) == (
        defaults.q_lora_rank,
        defaults.qk_nope_head_dim,
        defaults.v_head_dim,
    )
    assert (experts.routing.num_experts, experts.routing.num_chosen) == (
        defaults.n_routed_experts,
        defaults.num_experts_per_tok,
    )
    assert (experts.routing.num_groups, experts.routing.num_kept_groups) == (defaults.n_group, defaults.topk_group)
    assert experts.sizes.shared_size == 20 * defaults.n_shared_experts
    assert experts.layers == tuple(layer >= defaults.first_k_dense_replace for layer in range(4))
    assert (experts.routing.scale, experts.routing.renormalizes) == (
        defaults.routed_scaling_factor,
        defaults.norm_topk_prob,
    )
    assert (config.norm_eps, config.pairs_are_neighbors) == (defaults.rms_norm_eps, defaults.rope_interleave)


def test_what_v2_may_leave_out_is_what_hugging_face_takes() -> None:
    config, defaults = read_deepseek_v2({**BASE, "n_routed_experts": None}, "A"), transformers.DeepseekV2Config()
    experts = experts_of(config)
    assert experts.routing.num_experts == defaults.n_routed_experts
    assert experts.sizes.shared_size == 20 * defaults.n_shared_experts
    assert experts.layers == (True,) * 4
    assert (experts.routing.scale, experts.routing.renormalizes) == (defaults.routed_scaling_factor, False)
    assert (experts.routing.scoring, experts.routing.num_groups) == ("softmax", 1)
    assert not experts.routing.has_correction_bias


def test_groups_of_v2_count_by_their_best_expert_where_they_count_at_all() -> None:
    given = {**BASE, "n_group": 4, "topk_group": 2}
    assert experts_of(read_deepseek_v2(given, "A")).routing.num_groups == 1
    routing = experts_of(read_deepseek_v2({**given, "topk_method": "group_limited_greedy"}, "A")).routing
    assert (routing.num_groups, routing.num_kept_groups, routing.group_score_size) == (4, 2, 1)


def test_nulls_mean_none() -> None:
    nulls = {"q_lora_rank": None, "n_shared_experts": None, "n_group": None, "topk_group": None}
    config = read_deepseek_v3({**BASE, **nulls, "first_k_dense_replace": 0}, "A")
    assert config.latent is not None
    assert config.latent.sizes.query_rank is None
    experts = experts_of(config)
    assert (experts.sizes.shared_size, experts.layers) == (None, (True,) * 4)
    assert (experts.routing.num_groups, experts.routing.num_kept_groups) == (1, 1)


@pytest.mark.parametrize(
    ("scaling", "factor"),
    [
        (None, 1.0),
        ({"type": "yarn", "factor": 4.0}, 1.0),
        ({"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.0}, 1.0),
        ({"type": "yarn", "factor": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"type": "yarn", "factor": 4.0, "mscale_all_dim": 0.5}, (0.05 * math.log(4) + 1) ** 2),
    ],
)
def test_a_stretched_context_sharpens_scores(scaling: dict[str, Any] | None, factor: float) -> None:
    config = read_deepseek_v3({**BASE, "rope_scaling": scaling, "max_position_embeddings": 64}, "A")
    assert config.attention_scale == pytest.approx((128 + 8) ** -0.5 * factor)


@pytest.mark.parametrize(
    ("changes", "count"), [({}, 1), ({"num_nextn_predict_layers": 0}, 0), ({"num_nextn_predict_layers": 2}, 2)]
)
def test_only_the_extra_layers_that_are_stated_are_ignored(changes: dict[str, Any], count: int) -> None:
    rules = read_deepseek_v3({**BASE, **changes}, "A").rules
    assert {rule.pattern.split(".")[2] for rule in rules} == {str(4 + extra) for extra in range(count)}
    assert all(rule.target is None for rule in rules)
    assert read_deepseek_v2(BASE, "A").rules == ()


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"kv_lora_rank": None}, ModelFormatError, "'kv_lora_rank' is None"),
        ({"kv_lora_rank": 0}, ModelFormatError, "'kv_lora_rank' is 0"),
        ({"qk_rope_head_dim": -8}, ModelFormatError, "'qk_rope_head_dim' is -8"),
        ({"q_lora_rank": 0}, ModelFormatError, "'q_lora_rank' is 0"),
        ({"first_k_dense_replace": -1}, ModelFormatError, "'first_k_dense_replace' is -1"),
        ({"n_shared_experts": "1"}, ModelFormatError, "'n_shared_experts' is '1'"),
        ({"n_group": 3}, ModelFormatError, "n_group=3 .* do not go together"),
        ({"topk_group": 9}, ModelFormatError, "topk_group=9 do not go together"),
        ({"num_experts_per_tok": 17}, ModelFormatError, "num_experts_per_tok=17"),
        ({"norm_topk_prob": 1}, ModelFormatError, "'norm_topk_prob' is 1"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
        ({"scoring_func": "softmax"}, UnsupportedModelError, "'scoring_func' is 'softmax'"),
        ({"topk_method": "greedy"}, UnsupportedModelError, "'topk_method' is 'greedy'"),
        ({"moe_layer_freq": 2}, UnsupportedModelError, "'moe_layer_freq' is 2"),
        ({"pretraining_tp": 2}, UnsupportedModelError, "'pretraining_tp' is 2"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_deepseek_v3({**BASE, **changes}, "DeepseekV3ForCausalLM")
    assert "DeepseekV3ForCausalLM" in str(caught.value)


@pytest.mark.parametrize(
    "changes",
    [{"norm_topk_prob": True}, {"scoring_func": "sigmoid"}, {"topk_method": "noaux_tc"}, {"mlp_bias": True}],
    ids=lambda value: next(iter(value)),
)
def test_what_v2_refuses(changes: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedModelError, match=next(iter(changes))):
        read_deepseek_v2({**BASE, **changes}, "DeepseekV2ForCausalLM")
