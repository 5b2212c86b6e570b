"""Llama, Mistral, Qwen2 and Qwen3 against Hugging Face on tiny random weights: logits and greedy tokens."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from case_parts import LLAMA3, YARN
from hardpoint.interfaces.model import StageOutput, StageRange
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.llama import create_llama, create_mistral, create_qwen2, create_qwen3
from hardpoint_testing_torch import (
    ParityHarness,
    StateDictLoader,
    build_model,
    check_parity,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory

ODD: dict[str, Any] = {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 20, "rope_parameters": LLAMA3}

CASES: list[Any] = [
    pytest.param("LlamaForCausalLM", create_llama, {}, id="llama"),
    pytest.param("LlamaForCausalLM", create_llama, {**ODD, "tie_word_embeddings": True}, id="llama-odd-tied"),
    pytest.param("LlamaForCausalLM", create_llama, {"attention_bias": True, "mlp_bias": True}, id="llama-biases"),
    pytest.param("LlamaForCausalLM", create_llama, {"num_key_value_heads": 1, "rope_parameters": YARN}, id="llama-mqa"),
    pytest.param("MistralForCausalLM", create_mistral, {"sliding_window": 7}, id="mistral-window"),
    pytest.param("MistralForCausalLM", create_mistral, {"sliding_window": None, "head_dim": 32}, id="mistral"),
    pytest.param("Qwen2ForCausalLM", create_qwen2, {"tie_word_embeddings": True}, id="qwen2-tied"),
    pytest.param(
        "Qwen2ForCausalLM",
        create_qwen2,
        {"use_sliding_window": True, "sliding_window": 9, "max_window_layers": 1},
        id="qwen2-upper-windows",
    ),
    pytest.param("Qwen3ForCausalLM", create_qwen3, {"head_dim": 16}, id="qwen3"),
    pytest.param("Qwen3ForCausalLM", create_qwen3, {**ODD, "attention_bias": True}, id="qwen3-odd-biases"),
]


@pytest.mark.parametrize(("architecture", "factory", "config"), CASES)
def test_prefill_chunks_decode_and_mixed_batches(
    architecture: str, factory: ModelFactory, config: dict[str, Any], tmp_path: Path
) -> None:
    tiny = make_tiny_model(architecture, tmp_path, **config)
    check_parity(tiny, factory, ReferenceBackend())


@pytest.mark.parametrize("block_size", [1, 16])
def test_other_block_sizes(block_size: int, tmp_path: Path) -> None:
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path, **ODD)
    check_parity(tiny, create_llama, ReferenceBackend(), block_size=block_size)


def test_bfloat16_checkpoints_are_widened_exactly(tmp_path: Path) -> None:
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path, dtype=torch.bfloat16)
    assert tiny.info.dtype == "bfloat16"
    assert {tensor.dtype for tensor in tiny.tensors().values()} == {torch.bfloat16}
    assert ParityHarness(tiny, create_llama, ReferenceBackend()).prefill() < 1e-4


def test_computing_in_bfloat16_stays_near(tmp_path: Path) -> None:
    tiny = make_tiny_model("Qwen3ForCausalLM", tmp_path, dtype=torch.bfloat16, head_dim=16)
    config = worker_config(tiny.info, dtype="bfloat16")
    model, toolkit = build_model(create_qwen3, StateDictLoader(tiny.tensors()), config, ReferenceBackend())
    assert {parameter.dtype for parameter in model.parameters()} == {torch.bfloat16}  # type: ignore[attr-defined]
    prompt = [3, 1, 4, 1, 5, 9, 2, 6]
    logits = LocalDriver(model, toolkit).step({"a": prompt})["a"]
    assert relative_error(logits.float(), tiny.logits(prompt)) < 0.05


@pytest.mark.parametrize("is_tied", [False, True])
def test_two_stages_are_the_whole(is_tied: bool, tmp_path: Path) -> None:
    """A split over pipeline stages loads only its own tensors and hands the hidden states on."""
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path, tie_word_embeddings=is_tied)
    stages = [StageRange(0, 1, has_head=False), StageRange(1, 3, has_embedding=False)]
    built = [
        build_model(
            create_llama, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend(), stage=stage
        )
        for stage in stages
    ]
    assert [list(model.kv_cache_specs()) for model, _ in built] == [
        ["model.layers.0.self_attn.attn"],
        ["model.layers.1.self_attn.attn", "model.layers.2.self_attn.attn"],
    ]
    prompt = list(range(2, 40))
    drivers = [LocalDriver(model, toolkit) for model, toolkit in built]
    handed_on = drivers[0].run({"a": prompt})
    assert isinstance(handed_on, StageOutput)
    hidden = drivers[1].run({"a": prompt}, intermediates=handed_on.intermediates)
    assert isinstance(hidden, torch.Tensor)
    assert relative_error(built[1][0].logits(hidden), tiny.logits(prompt)) < 1e-4
    with pytest.raises(RuntimeError, match="holds no head"):
        built[0][0].logits(hidden)
    if not is_tied:
        with pytest.raises(RuntimeError, match="holds no embedding"):
            built[1][0].embed(torch.tensor([1]))


def test_embeddings_may_replace_token_ids_and_stay_untouched(tmp_path: Path) -> None:
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path)
    model, toolkit = build_model(
        create_llama, StateDictLoader(tiny.tensors()), worker_config(tiny.info), ReferenceBackend()
    )
    prompt = [7, 7, 9, 11]
    embeddings = model.embed(torch.tensor(prompt))
    before = embeddings.clone()
    hidden = LocalDriver(model, toolkit).run({"a": prompt}, embeddings=embeddings)
    assert torch.equal(embeddings, before)
    assert isinstance(hidden, torch.Tensor)
    assert relative_error(model.logits(hidden), tiny.logits(prompt)) < 1e-4
    with pytest.raises(ValueError, match="token_ids"):
        model.forward(None, torch.arange(2))
