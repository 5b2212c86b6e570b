"""Architectures without a plugin of their own compute what ``transformers`` computes, step by step and from files."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint.errors import UnsupportedModelError
from hardpoint.interfaces.kv_cache_specs import FullAttentionSpec, SlidingWindowSpec
from hardpoint_testing_torch import (
    LocalDriver,
    PlainAttentionBackend,
    StateDictLoader,
    build_model,
    check_parity,
    create_model,
    installed_loader,
    make_tiny_model,
    worker_config,
)
from hardpoint_torch_runtime.layers import ParallelLinear, VocabEmbedding
from hardpoint_transformers_models.model import create_transformers

TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
WINDOWS: Mapping[str, Any] = {"layer_types": ["sliding_attention", "full_attention"] * 2, "sliding_window": 7}
EXPERTS: Mapping[str, Any] = {"num_experts": 6, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
QUICK = ("CohereForCausalLM", "OlmoeForCausalLM")
CASES: Mapping[str, Mapping[str, Any]] = {
    "AfmoeForCausalLM": TOKENS,
    "ApertusForCausalLM": TOKENS,
    "ArceeForCausalLM": {},
    "BitNetForCausalLM": TOKENS,
    "Cohere2ForCausalLM": {**TOKENS, **WINDOWS, "num_hidden_layers": 4},
    "CohereForCausalLM": TOKENS,
    "Ernie4_5ForCausalLM": TOKENS,
    "Ernie4_5_MoeForCausalLM": TOKENS,
    "Exaone4ForCausalLM": {**TOKENS, **WINDOWS, "num_hidden_layers": 4},
    "FlexOlmoForCausalLM": TOKENS,
    "Glm4ForCausalLM": {**TOKENS, "head_dim": 16},
    "Glm4MoeForCausalLM": {**TOKENS, "head_dim": 16},
    "GlmForCausalLM": {**TOKENS, "head_dim": 16},
    "GraniteSWAForCausalLM": TOKENS,
    "HeliumForCausalLM": {**TOKENS, "head_dim": 12},
    "HyperCLOVAXForCausalLM": TOKENS,
    "Jais2ForCausalLM": TOKENS,
    "LlamaForCausalLM": {"tie_word_embeddings": True, "attention_bias": True},
    "MiMoV2FlashForCausalLM": TOKENS,
    "MiniMaxM2ForCausalLM": TOKENS,
    "Ministral3ForCausalLM": TOKENS,
    "NanoChatForCausalLM": TOKENS,
    "NemotronForCausalLM": TOKENS,
    "OlmoForCausalLM": {**TOKENS, "clip_qkv": 0.5},
    "OlmoeForCausalLM": {**TOKENS, **EXPERTS},
    "PersimmonForCausalLM": TOKENS,
    "PhimoeForCausalLM": TOKENS,
    "SeedOssForCausalLM": TOKENS,
    "SolarOpenForCausalLM": TOKENS,
}


@pytest.mark.parametrize(
    "architecture", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_logits_and_tokens_are_those_of_transformers(architecture: str, tmp_path: Path) -> None:
    """Whole prompts, chunks, single tokens, mixed batches, shared prefixes and prompts computed again."""
    tiny = make_tiny_model(architecture, tmp_path, **CASES[architecture])
    check_parity(tiny, create_transformers, PlainAttentionBackend(), loader=installed_loader("safetensors"))


def test_each_layer_keeps_what_its_own_window_needs(tmp_path: Path) -> None:
    tiny = make_tiny_model("Cohere2ForCausalLM", tmp_path, **CASES["Cohere2ForCausalLM"])
    model, toolkit = create_model(create_transformers, worker_config(tiny.info), PlainAttentionBackend())
    specs = list(model.kv_cache_specs().values())
    assert [type(spec) for spec in specs] == [SlidingWindowSpec, FullAttentionSpec] * 2
    assert [spec.sliding_window for spec in specs if isinstance(spec, SlidingWindowSpec)] == [7, 7]
    assert [name for name, _ in model.named_layers()] == [f"model.layers.{index}" for index in range(4)]
    assert list(toolkit.attention_layers) == list(model.kv_cache_specs())


def test_linear_layers_table_and_head_are_the_workers(tmp_path: Path) -> None:
    """So that they are quantized and divided as anywhere else."""
    tiny = make_tiny_model("CohereForCausalLM", tmp_path, **TOKENS)
    model, _ = create_model(create_transformers, worker_config(tiny.info), PlainAttentionBackend())
    assert isinstance(model, torch.nn.Module)
    parts = list(model.modules())
    assert not [part for part in parts if isinstance(part, torch.nn.Linear | torch.nn.Embedding)]
    assert sum(isinstance(part, ParallelLinear) for part in parts) == 7 * 3
    assert sum(isinstance(part, VocabEmbedding) for part in parts) == 1


def test_models_in_one_process_do_not_disturb_one_another(tmp_path: Path) -> None:
    """The functions that layers call are registered once, for all models there are, those of the oracle included."""
    folders = [tmp_path / name for name in "ab"]
    first, second = (
        make_tiny_model("CohereForCausalLM", folder, seed=index, **TOKENS) for index, folder in enumerate(folders)
    )
    for tiny in (first, second, first):
        check_parity(tiny, create_transformers, PlainAttentionBackend())


class _Shifted(torch.nn.Module):
    """A feed-forward block that also sees the token before."""

    def __init__(self, inner: torch.nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        output: torch.Tensor = self.inner(hidden) + hidden.roll(1, dims=-2)
        return output


def test_tokens_that_meet_outside_of_attention_are_noticed(tmp_path: Path) -> None:
    """By the first forward, whatever the layer that mixes them is called."""
    tiny = make_tiny_model("CohereForCausalLM", tmp_path, **TOKENS)

    def build(is_shifted: bool) -> LocalDriver:
        model, toolkit = build_model(
            create_transformers, StateDictLoader(tiny.tensors()), worker_config(tiny.info), PlainAttentionBackend()
        )
        assert isinstance(model, torch.nn.Module)
        layer: Any = model.get_submodule("model.layers.1")
        if is_shifted:
            layer.mlp = _Shifted(layer.mlp)
        return LocalDriver(model, toolkit)

    assert len(build(False).step({"a": [3, 1, 4]})["a"]) == 3
    with pytest.raises(UnsupportedModelError, match="outside of attention tokens depend on those before them"):
        build(True).step({"a": [3, 1, 4]})
