"""GPT-OSS: what it reads and refuses, and what it computes beside Hugging Face on tiny random weights."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.gpt_oss import create_gpt_oss, read_gpt_oss
from hardpoint_testing_torch import StateDictLoader, build_model, check_parity, make_tiny_model, worker_config

BASE: dict[str, Any] = {
    "hidden_size": 48,
    "intermediate_size": 40,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 100,
    "num_local_experts": 6,
    "num_experts_per_tok": 3,
}
TINY: dict[str, Any] = {
    "num_hidden_layers": 2,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "intermediate_size": 40,
    "head_dim": 16,
    "sliding_window": 7,
}


def test_what_may_be_left_out() -> None:
    config = read_gpt_oss(BASE, "GptOssForCausalLM")
    defaults = transformers.GptOssConfig()
    assert config.head_size == defaults.head_dim
    assert config.windows == (defaults.sliding_window, None, defaults.sliding_window, None)
    assert (config.qkv_bias, config.output_bias) == (defaults.attention_bias,) * 2
    assert config.norm_eps == defaults.rms_norm_eps
    rope = {**defaults.rope_parameters, "rope_theta": defaults.default_theta}
    assert (config.rope.rope_type, config.rope.theta) == (rope["rope_type"], rope["rope_theta"])
    assert (config.rope.factor, config.rope.truncate) == (rope["factor"], rope["truncate"])
    assert config.rope.original_max_position == rope["original_max_position_embeddings"]
    assert config.experts is not None
    assert config.experts.clamp is not None
    assert (config.experts.clamp.slope, config.experts.clamp.limit) == (defaults.swiglu_alpha, defaults.swiglu_limit)
    assert config.has_sinks


@pytest.mark.parametrize(
    ("changes", "windows"),
    [
        ({"sliding_window": 9}, (9, None, 9, None)),
        ({"sliding_window": None}, (None,) * 4),
        ({"layer_types": ["full_attention"] * 3 + ["sliding_attention"]}, (None, None, None, 128)),
    ],
    ids=str,
)
def test_windows(changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert read_gpt_oss({**BASE, **changes}, "A").windows == windows


def test_the_fields_of_the_published_configuration() -> None:
    """Of gpt-oss-20b, which writes its rotation in the older way."""
    scaling = {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 32.0,
        "original_max_position_embeddings": 4096,
        "rope_type": "yarn",
        "truncate": False,
    }
    config = read_gpt_oss(
        {
            **BASE,
            "rope_scaling": scaling,
            "rope_theta": 150000,
            "initial_context_length": 4096,
            "experts_per_token": 3,
            "swiglu_limit": 7.0,
            "sliding_window": 128,
        },
        "GptOssForCausalLM",
    )
    assert config.rope == read_gpt_oss(BASE, "GptOssForCausalLM").rope


@pytest.mark.parametrize(
    ("changes", "error", "message"),
    [
        ({"quantization_config": {"quant_method": "mxfp4"}}, UnsupportedModelError, "MXFP4 .*; use a checkpoint in bf"),
        ({"num_experts_per_tok": 7}, ModelFormatError, "num_experts_per_tok=7 is more than there are"),
        ({"swiglu_limit": 0}, ModelFormatError, "'swiglu_limit' is 0"),
        ({"swiglu_alpha": "1"}, ModelFormatError, "'swiglu_alpha' is '1'"),
        ({"attention_bias": 1}, ModelFormatError, "'attention_bias' is 1"),
        ({"layer_types": ["sliding_attention"]}, ModelFormatError, "'layer_types' must list 4 layers"),
        ({"layer_types": ["chunked_attention"] * 4}, UnsupportedModelError, "'layer_types' holds 'chunked_attention'"),
        ({"hidden_act": "gelu"}, UnsupportedModelError, "'hidden_act' is 'gelu'"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_is_refused_names_field_and_value(
    changes: dict[str, Any], error: type[HardpointError], message: str
) -> None:
    with pytest.raises(error, match=message) as caught:
        read_gpt_oss({**BASE, **changes}, "GptOssForCausalLM")
    assert "GptOssForCausalLM" in str(caught.value)


def test_prefill_chunks_decode_mixed_batches_and_greedy_tokens(tmp_path: Path) -> None:
    tiny = make_tiny_model("GptOssForCausalLM", tmp_path, **TINY, swiglu_limit=0.8)
    check_parity(tiny, create_gpt_oss, ReferenceBackend())


def test_bfloat16_keeps_sinks_in_float32(tmp_path: Path) -> None:
    tiny = make_tiny_model("GptOssForCausalLM", tmp_path, dtype=torch.bfloat16, **TINY)
    config = worker_config(tiny.info, dtype="bfloat16")
    model, _ = build_model(create_gpt_oss, StateDictLoader(tiny.tensors()), config, ReferenceBackend())
    assert isinstance(model, torch.nn.Module)
    parameters = dict(model.named_parameters())
    sinks = parameters["model.layers.1.self_attn.sinks.weight"]
    assert sinks.dtype == torch.float32
    assert torch.equal(sinks, tiny.oracle.model.layers[1].self_attn.sinks)
    assert parameters["model.layers.1.mlp.gate.bias"].dtype == torch.bfloat16


def test_experts_stored_one_by_one(tmp_path: Path) -> None:
    """As files of other formats have them: gate and up apart, a matrix for each expert."""
    tiny = make_tiny_model("GptOssForCausalLM", tmp_path, **TINY)
    apart: dict[str, torch.Tensor] = {}
    for name, tensor in tiny.tensors().items():
        stem, _, stack = name.rpartition(".experts.")
        if not stem:
            apart[name] = tensor
            continue
        part, kind = stack.removesuffix("_bias"), "bias" if stack.endswith("_bias") else "weight"
        rows = tensor if kind == "bias" else tensor.transpose(1, 2)
        for number, expert in enumerate(rows):
            parts = {"gate_proj": expert[0::2], "up_proj": expert[1::2]} if part == "gate_up_proj" else {part: expert}
            for piece, values in parts.items():
                apart[f"{stem}.experts.{number}.{piece}.{kind}"] = values.contiguous()
    assert len(apart) > len(tiny.tensors())
    models = [
        build_model(create_gpt_oss, StateDictLoader(tensors), worker_config(tiny.info), ReferenceBackend())[0]
        for tensors in (tiny.tensors(), apart)
    ]
    stacked, single = (dict(model.named_parameters()) for model in models if isinstance(model, torch.nn.Module))
    assert stacked.keys() == single.keys()
    assert all(torch.equal(parameter, single[name]) for name, parameter in stacked.items())
