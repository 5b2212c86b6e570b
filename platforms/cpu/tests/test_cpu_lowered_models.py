"""Models of every family as native calls, held against themselves in plain torch."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.interfaces.compiler import LoweredRange
from hardpoint.interfaces.plugin import NoOptions, PluginContext
from hardpoint_cpu.attention_backend import CpuPagedBackend
from hardpoint_cpu.compiler import NativeCompiler
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider
from hardpoint_cpu.lowered_stack import LoweredStack
from hardpoint_testing_torch import (
    LocalDriver,
    TinyModel,
    build_model,
    installed_factory,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_torch_runtime.lowering import DescribedStack

TOLERANCE = 1e-5
GEMMA = {
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
}
STANDARD = {
    "llama": ("LlamaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama_biased": ("LlamaForCausalLM", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"head_dim": 16, "sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
}
OTHERS = {
    "mixtral": ("MixtralForCausalLM", {"head_dim": 16, "num_local_experts": 4}, "MixtureOfExperts"),
    "deepseek": ("DeepseekV2ForCausalLM", None, "LatentAttention"),
}
STEPS: list[dict[str, list[int]]] = [
    {"a": [3, 14, 15, 92, 65]},
    {"a": [35], "b": [8, 97, 93, 23, 84, 62, 6]},
    {"a": [43], "b": [38], "c": list(range(1, 30))},
    {"a": [33], "b": [83], "c": [27]},
]
Built = tuple[Any, LocalDriver]


@pytest.fixture(scope="module")
def kernels() -> KernelProvider:
    provider = KernelProvider(Host(), build="wait")
    assert provider.library() is not None, provider.report().reason
    return provider


@pytest.fixture
def build(kernels: KernelProvider, tmp_path: Path) -> Callable[..., Built]:
    """``build(architecture, fields)``: the same tiny model at every call."""
    made: dict[str, TinyModel] = {}

    def call(architecture: str, backend: str = "cpu_paged", **fields: Any) -> Built:
        tiny = made.setdefault(architecture, make_tiny_model(architecture, tmp_path, **fields))
        context = PluginContext(name=backend, api_version=1, roles=frozenset())
        chosen = (
            CpuPagedBackend(kernels)
            if backend == "cpu_paged"
            else installed_factory("attention_backend", backend)(context, NoOptions())
        )
        config = worker_config(tiny.info)
        factory, loader = installed_factory("model", architecture), installed_loader("safetensors")
        model, toolkit = build_model(factory, loader, config, chosen)
        return model, LocalDriver(model, toolkit)

    return call


def lower(model: Any, kernels: Any, **changes: Any) -> list[LoweredRange]:
    config = msgspec.structs.replace(worker_config(model.info), **changes)
    return NativeCompiler(kernels, config, logging.getLogger("hardpoint.test")).lower(model)


def stack_of(model: Any) -> LoweredStack | None:
    (stack,) = (module for module in model.modules() if isinstance(module, DescribedStack))
    assert stack.lowered is None or isinstance(stack.lowered, LoweredStack)
    return stack.lowered


def require_equal(one: LocalDriver, other: LocalDriver, steps: list[dict[str, list[int]]] = STEPS) -> None:
    for step in steps:
        found, expected = one.step(step), other.step(step)
        for name in step:
            assert relative_error(found[name], expected[name]) < TOLERANCE
            assert torch.equal(found[name].argmax(-1), expected[name].argmax(-1))


@pytest.mark.parametrize("family", STANDARD)
def test_lowered_models_compute_what_they_are(
    family: str, build: Callable[..., Built], kernels: KernelProvider
) -> None:
    """I9.2: prompts, chunks and decoding rows, alone and mixed."""
    architecture, fields = STANDARD[family]
    (model, lowered), (_, plain) = build(architecture, **fields), build(architecture, **fields)
    linears, layers = lower(model, kernels)
    assert linears.tokens == layers.tokens
    assert layers.layer_names == tuple(name for name, _ in model.named_layers())
    stack = stack_of(model)
    assert stack is not None
    assert stack.attends
    require_equal(lowered, plain)


@pytest.mark.parametrize("family", ["qwen3", "gemma3"])
def test_other_attention_runs_between_native_calls_and_the_reason_is_given(
    family: str, build: Callable[..., Built], kernels: KernelProvider
) -> None:
    architecture, fields = STANDARD[family]
    made = [build(architecture, "torch_reference", **fields) for _ in range(2)]
    *_, layers, attention = lower(made[0][0], kernels)
    assert layers.tokens is not None
    assert attention.reason == "attention is computed by torch_reference, between two native calls per layer"
    require_equal(made[0][1], made[1][1])
