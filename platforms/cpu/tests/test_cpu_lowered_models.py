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
from hardpoint.interfaces.quantization import LinearMethod, LinearShape
from hardpoint_cpu.attention_backend import CpuPagedBackend
from hardpoint_cpu.compiler import NativeCompiler
from hardpoint_cpu.host import Host
from hardpoint_cpu.kernels import KernelProvider, KernelReport, KernelState
from hardpoint_cpu.lowered_stack import LoweredStack
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_testing_torch import (
    LocalDriver,
    TinyModel,
    build_model,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)
from hardpoint_torch_runtime.layers import ParallelLinear, TensorParallel
from hardpoint_torch_runtime.lowering import DescribedStack

TOLERANCE = 1e-5
GEMMA = {
    "head_dim": 16,
    "sliding_window": 7,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "query_pre_attn_scalar": 20,
}
DEEPSEEK = {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "q_lora_rank": None,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 8,
    "v_head_dim": 16,
    "n_routed_experts": 8,
    "num_experts_per_tok": 3,
    "moe_intermediate_size": 20,
    "first_k_dense_replace": 1,
}
BAMBA = {"mamba_n_heads": 6, "mamba_d_state": 8, "attn_layer_indices": [1]}
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}
PARTLY_ROTATED = {"rope_type": "default", "rope_theta": 10000.0, "partial_rotary_factor": 0.5}
STANDARD: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("LlamaForCausalLM", {"head_dim": 16, "tie_word_embeddings": True}),
    "llama_biased": ("LlamaForCausalLM", {"head_dim": 16, "attention_bias": True, "mlp_bias": True}),
    "mistral": ("MistralForCausalLM", {"head_dim": 16, "sliding_window": 7}),
    "qwen2": ("Qwen2ForCausalLM", {"hidden_size": 64}),
    "qwen3": ("Qwen3ForCausalLM", {"head_dim": 16}),
    "gemma2": ("Gemma2ForCausalLM", {**GEMMA, "attn_logit_softcapping": 3.0}),
    "gemma3": ("Gemma3ForCausalLM", GEMMA),
    "phi3": ("Phi3ForCausalLM", {**NO_IDS, "head_dim": 16, "rope_parameters": PARTLY_ROTATED}),
}
OTHERS: dict[str, tuple[str, dict[str, Any], str]] = {
    "mixtral": ("MixtralForCausalLM", {"head_dim": 16, "num_local_experts": 4}, "MixtureOfExperts"),
    "deepseek": ("DeepseekV2ForCausalLM", DEEPSEEK, "LatentAttention"),
    "bamba": ("BambaForCausalLM", BAMBA, "HybridStack"),
    "granite": ("GraniteForCausalLM", {"head_dim": 16, "residual_multiplier": 0.3}, "scales what it adds"),
    "olmo2": ("Olmo2ForCausalLM", {**NO_IDS, "head_dim": 16}, "not normalized"),
    "smollm3": ("SmolLM3ForCausalLM", {**NO_IDS, "head_dim": 16, "no_rope_layers": [1, 0, 1]}, "do not rotate"),
}
STEPS: list[dict[str, list[int]]] = [
    {"a": [3, 14, 15, 92, 65]},
    {"a": [35], "b": [8, 97, 93, 23, 84, 62, 6]},
    {"a": [43], "b": [38], "c": list(range(1, 30))},
    {"a": [33], "b": [83], "c": [27]},
]
Built = tuple[Any, LocalDriver]


def _quick(name: str, *quick: str) -> Any:
    return pytest.param(name, marks=() if name in quick else pytest.mark.slow)


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
        chosen = CpuPagedBackend(kernels) if backend == "cpu_paged" else installed_backend(backend)
        config = worker_config(tiny.info)
        factory, loader = installed_factory("model", architecture), installed_loader("safetensors")
        model, toolkit = build_model(factory, loader, config, chosen)
        return model, LocalDriver(model, toolkit)

    return call


def lower(model: Any, kernels: Any, **changes: Any) -> list[LoweredRange]:
    config = msgspec.structs.replace(worker_config(model.info), **changes)
    return NativeCompiler(kernels, config, logging.getLogger("hardpoint.test")).lower(model)


def is_waiting(compiler: NativeCompiler) -> bool:
    return compiler.is_waiting


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


@pytest.mark.parametrize("family", [_quick(name, "llama", "gemma3") for name in STANDARD])
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


@pytest.mark.parametrize("family", [_quick(name, "mixtral") for name in OTHERS])
def test_other_models_keep_their_layers_with_native_linears_and_the_reason(
    family: str, build: Callable[..., Built], kernels: KernelProvider
) -> None:
    architecture, fields, named = OTHERS[family]
    made = [build(architecture, "torch_reference", **fields) for _ in range(2)]
    linears, *refused = lower(made[0][0], kernels)
    assert len(linears.layer_names) > 3
    assert any(named in str(one.reason) for one in refused)
    assert stack_of(made[0][0]) is None
    require_equal(made[0][1], made[1][1])


class TestSteps:
    @pytest.fixture
    def made(self, build: Callable[..., Built], kernels: KernelProvider) -> tuple[Built, Built]:
        architecture, fields = STANDARD["llama"]
        lowered, plain = build(architecture, **fields), build(architecture, **fields)
        lower(lowered[0], kernels)
        return lowered, plain

    def test_a_row_has_the_same_bits_whatever_comes_with_it(self, made: tuple[Built, Built]) -> None:
        """Prompts whole or in chunks, alone or among others."""
        driver, prompt = made[0][1], list(range(40, 75))
        alone = driver.step({"alone": prompt})["alone"]
        driver.step({"other": [5, 6, 7]})
        first = driver.step({"other": [8], "cut": prompt[:11]})["cut"]
        second = driver.step({"cut": prompt[11:], "third": [9] * 17})["cut"]
        assert torch.equal(torch.cat((first, second)), alone)

    def test_padding_runs_the_layers_themselves(
        self, made: tuple[Built, Built], caplog: pytest.LogCaptureFixture
    ) -> None:
        (_, lowered), (_, plain) = made
        step = {"a": [3, 14, 15]}
        with caplog.at_level(logging.INFO, logger="hardpoint.test"):
            found = [lowered.step(step, num_padding=2)["a"] for _ in range(2)]
        assert [record.message for record in caplog.records] == [
            "steps are not run as native calls where they are captured as graphs or padded"
        ]
        expected = [plain.step(step, num_padding=2)["a"] for _ in range(2)]
        assert relative_error(found[1], expected[1]) < TOLERANCE

    def test_an_adapter_is_heard_from_the_next_step_on(
        self, made: tuple[Built, Built], caplog: pytest.LogCaptureFixture
    ) -> None:
        (model, lowered), (other, plain) = made
        for one in (model, other):
            one.model.layers["1"].mlp.down_proj.adapter = lambda x, y: y + x.sum(-1, keepdim=True)
        with caplog.at_level(logging.INFO, logger="hardpoint.test"):
            require_equal(lowered, plain)
        assert "an adapter is set on a layer" in caplog.text

    def test_positions_beyond_the_table_are_an_error(self, made: tuple[Built, Built]) -> None:
        stack = stack_of(made[0][0])
        assert stack is not None
        with pytest.raises(ValueError, match=r"token 1 is at position 256, but the rotation has 256"):
            stack._native.before_attention(0, torch.zeros(2, 48), torch.tensor([0, 256]), torch.zeros(2, 128))


class TestRefusals:
    @pytest.fixture
    def model(self, build: Callable[..., Built]) -> Any:
        return build("LlamaForCausalLM", head_dim=16)[0]

    def test_other_compute_dtypes(self, model: Any, kernels: KernelProvider) -> None:
        (refused,) = lower(model, kernels, dtype="bfloat16")
        assert refused.reason == "kernels compute in float32, and --dtype is bfloat16"

    def test_layers_of_several_ranks(self, model: Any, kernels: KernelProvider) -> None:
        for module in model.modules():
            if isinstance(module, ParallelLinear):
                module.parallel = TensorParallel(0, 2)
        linears, layers = lower(model, kernels)
        assert linears.tokens is not None
        assert "divided among 2 ranks" in str(layers.reason)

    def test_an_adapter_that_was_there_before(self, model: Any, kernels: KernelProvider) -> None:
        model.model.layers["0"].self_attn.o_proj.adapter = lambda x, y: y
        _, layers = lower(model, kernels)
        assert layers.reason == "an adapter is set on model.layers.0.self_attn.o_proj"

    def test_a_method_that_does_not_tell_what_it_stores(self, model: Any, kernels: KernelProvider) -> None:
        model.model.layers["0"].mlp.down_proj.method = Secretive()
        _, linear, layers = lower(model, kernels)
        assert linear.layer_names == ("model.layers.0.mlp.down_proj",)
        assert linear.reason == "Secretive does not tell how the weight is stored"
        assert layers.reason == "model.layers.0.mlp.down_proj has no kernel"

    def test_kernels_that_are_switched_off(self, model: Any) -> None:
        (refused,) = lower(model, KernelProvider(Host(), is_enabled=False))
        assert refused.reason == "there are no kernels: plugins.platform.cpu.kernels is off"


class TestLateKernels:
    """What is lowered once the compilers that run in the background are done."""

    class Late(KernelProvider):
        """Kernels that come, or fail to, when a test says so."""

        def __init__(self, real: KernelProvider) -> None:
            super().__init__(Host())
            self.real, self.state = real, KernelState.COMPILING

        def library(self) -> NativeLibrary | None:
            return self.real.library() if self.state is KernelState.READY else None

        def wait(self) -> NativeLibrary | None:
            self.state = KernelState.READY
            return self.library()

        def report(self) -> KernelReport:
            return KernelReport("generic", self.state, None, "out of registers")

    def test_the_model_changes_over_between_two_steps(
        self, build: Callable[..., Built], kernels: KernelProvider
    ) -> None:
        architecture, fields = STANDARD["qwen3"]
        (model, lowered), (_, plain) = build(architecture, **fields), build(architecture, **fields)
        late = self.Late(kernels)
        compiler = NativeCompiler(late, worker_config(model.info), logging.getLogger("hardpoint.test"))
        (waiting,) = compiler.lower(model)
        assert "are being compiled" in str(waiting.reason)
        assert is_waiting(compiler)
        require_equal(lowered, plain, STEPS[:2])
        assert compiler.resume() is None
        late.state = KernelState.READY
        assert [one.reason for one in compiler.resume() or ()] == [None, None]
        assert not is_waiting(compiler)
        assert stack_of(model) is not None
        require_equal(lowered, plain, STEPS[2:])

    def test_a_run_that_must_not_change_bits_waits_for_them(
        self, build: Callable[..., Built], kernels: KernelProvider
    ) -> None:
        model, _ = build("LlamaForCausalLM", head_dim=16)
        linears, layers = lower(model, self.Late(kernels), batch_invariant=True)
        assert linears.tokens == layers.tokens is not None

    def test_a_failed_compilation_is_reported_and_final(
        self, build: Callable[..., Built], kernels: KernelProvider
    ) -> None:
        model, _ = build("LlamaForCausalLM", head_dim=16)
        late = self.Late(kernels)
        compiler = NativeCompiler(late, worker_config(model.info), logging.getLogger("hardpoint.test"))
        compiler.lower(model)
        late.state = KernelState.UNAVAILABLE
        (refused,) = compiler.resume() or [LoweredRange((), None)]
        assert refused.reason == "there are no kernels: out of registers"
        assert not is_waiting(compiler)
        assert compiler.resume() is None


class Secretive(LinearMethod):
    """Stores what it likes, where only it knows."""

    def create_weights(self, layer: torch.nn.Module, shape: LinearShape) -> None: ...

    def apply(self, layer: torch.nn.Module, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        return x[..., :1]


def test_stored_weights_go_once_they_are_packed(build: Callable[..., Built], kernels: KernelProvider) -> None:
    model, _ = build("LlamaForCausalLM", head_dim=16, tie_word_embeddings=True)
    lower(model, kernels)
    linears = [module for module in model.modules() if isinstance(module, ParallelLinear)]
    assert [linear.get_parameter("weight").numel() for linear in linears] == [0] * len(linears)
    assert model.model.embed_tokens.weight.numel() == 160 * 48
