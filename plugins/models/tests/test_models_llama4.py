"""Llama 4, text: what it reads and refuses, and what it computes beside Hugging Face on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.decoder_attention import query_factors
from hardpoint_models.decoder_config import QueryTemperature
from hardpoint_models.llama4 import create_llama4, read_llama4
from hardpoint_testing_torch import StateDictLoader, build_model, check_parity, make_tiny_model, worker_config
from hardpoint_torch_runtime.lowering import DescribedStack, NotStandard

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "num_local_experts": 4,
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 4,
    "num_local_experts": 3,
    "intermediate_size": 40,
    "intermediate_size_mlp": 80,
    "head_dim": 16,
    "interleave_moe_layer_step": 2,
    "attention_chunk_size": 8,
    "floor_scale": 8,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"no_rope_layer_interval": 2},
        {"no_rope_layers": [1, 0, 0, 1, 1]},
        {"no_rope_layers": []},
        {"attention_chunk_size": None},
        {"attention_chunk_size": 64, "layer_types": ["full_attention"] * 4 + ["chunked_attention"]},
        {"interleave_moe_layer_step": 2},
        {"moe_layers": [0, 3]},
        {"use_qk_norm": False},
    ],
    ids=str,
)
def test_layers_are_what_transformers_makes_of_them(changes: dict[str, Any]) -> None:
    given = {**BASE, **changes}
    config, oracle = read_llama4(given, "Llama4ForCausalLM"), transformers.Llama4TextConfig(**given)
    assert config.rotated_layers == tuple(map(bool, oracle.no_rope_layers))
    chunks = [oracle.attention_chunk_size if kind == "chunked_attention" else None for kind in oracle.layer_types]
    assert list(config.chunk_sizes) == chunks
    assert config.experts is not None
    assert [layer for layer in range(5) if config.experts.layers[layer]] == oracle.moe_layers
    assert config.qk_norm == ("rotated" if oracle.use_qk_norm else None)
    assert (config.head_size, config.norm_eps) == (oracle.head_dim, oracle.rms_norm_eps)
    assert (config.rope.theta, config.experts.routing.num_chosen) == (oracle.default_theta, oracle.num_experts_per_tok)


@pytest.mark.parametrize("given", [True, 4, 1])
def test_temperatures_may_be_switched_on_by_a_number(given: Any) -> None:
    config = read_llama4({**BASE, "attn_temperature_tuning": given, "floor_scale": 16, "attn_scale": 0.5}, "A")
    assert config.query_temperature == QueryTemperature(16, 0.5)


@pytest.mark.parametrize("given", [False, 0])
def test_temperatures_may_be_switched_off(given: Any) -> None:
    assert read_llama4({**BASE, "attn_temperature_tuning": given}, "A").query_temperature is None


def test_queries_grow_with_each_span() -> None:
    factors = query_factors(QueryTemperature(8, 0.5), torch.arange(32))
    assert factors.shape == (32, 1, 1)
    assert factors[:7].unique().tolist() == [1.0]
    expected = 1 + 0.5 * torch.log1p(torch.tensor([1.0, 1.0, 2.0]))
    torch.testing.assert_close(factors[[7, 14, 15], 0, 0], expected)


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"no_rope_layers": [1, 0]}, ModelFormatError, "'no_rope_layers' must list a 0 or 1 for each of 5 layers"),
        ({"no_rope_layers": [1, 0, 2, 1, 1]}, ModelFormatError, "'no_rope_layers'"),
        ({"no_rope_layer_interval": 0}, ModelFormatError, "'no_rope_layer_interval' is 0"),
        ({"layer_types": ["full_attention"]}, ModelFormatError, "'layer_types' must list 5 layers"),
        ({"layer_types": ["sliding_attention"] * 5}, UnsupportedModelError, "'layer_types' holds 'sliding_attention'"),
        ({"attention_chunk_size": 0}, ModelFormatError, "'attention_chunk_size' is 0"),
        (
            {"attention_chunk_size": None, "layer_types": ["chunked_attention"] * 5},
            ModelFormatError,
            "'attention_chunk_size' is None",
        ),
        ({"moe_layers": 3}, ModelFormatError, "'moe_layers' is 3; a list of layer numbers"),
        ({"interleave_moe_layer_step": 0}, ModelFormatError, "'interleave_moe_layer_step' is 0"),
        ({"num_experts_per_tok": 5}, ModelFormatError, "num_experts_per_tok=5 is more than there are"),
        ({"floor_scale": 0}, ModelFormatError, "'floor_scale' is 0"),
        ({"attn_temperature_tuning": "on"}, ModelFormatError, "'attn_temperature_tuning' is 'on'"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
    ],
    ids=lambda value: next(reversed(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_llama4({**BASE, **changes}, "Llama4ForCausalLM")
    assert "Llama4ForCausalLM" in str(caught.value)


def test_prefill_chunks_decode_mixed_batches_and_greedy_tokens(tmp_path: Path) -> None:
    check_parity(make_tiny_model("Llama4ForCausalLM", tmp_path, **TINY), create_llama4, ReferenceBackend())


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"moe_layers": []}, "heads of model.layers.0 are normalized after they rotate"),
        ({"moe_layers": [], "use_qk_norm": False}, "heads of model.layers.3 do not rotate"),
        ({"moe_layers": [0]}, "the feed-forward block of model.layers.0 is a MixtureOfExperts"),
    ],
    ids=["norms", "positions", "experts"],
)
def test_compilers_are_told_what_no_standard_block_computes(
    changes: dict[str, Any], reason: str, tmp_path: Path
) -> None:
    tiny = make_tiny_model("Llama4ForCausalLM", tmp_path, **{**TINY, **changes})
    model, _ = build_model(create_llama4, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend())
    assert isinstance(model, torch.nn.Module)
    stacks = [module for module in model.modules() if isinstance(module, DescribedStack)]
    assert [stack.describe() for stack in stacks] == [NotStandard(reason)]
