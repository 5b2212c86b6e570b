"""Models that break what the fallback takes for granted: each would compute something else, and is refused instead."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.errors import HardpointError, ModelFormatError, UnsupportedModelError
from hardpoint_testing_torch import (
    LocalDriver,
    PlainAttentionBackend,
    StateDictLoader,
    build_model,
    installed_loader,
    make_tiny_model,
    worker_config,
)
from hardpoint_testing_torch.parity import relative_error
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_transformers_models.model import create_transformers

TOKENS: Mapping[str, Any] = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}
PROMPT = [3, 1, 4, 1, 5, 9]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    return make_tiny_model("CohereForCausalLM", tmp_path_factory.mktemp("cohere"), **TOKENS)


def built(tiny: TinyModel, tensors: Mapping[str, torch.Tensor] | None = None) -> tuple[torch.nn.Module, LocalDriver]:
    loader = StateDictLoader(dict(tensors) if tensors is not None else tiny.tensors())
    model, toolkit = build_model(create_transformers, loader, worker_config(tiny.info), PlainAttentionBackend())
    assert isinstance(model, torch.nn.Module)
    return model, LocalDriver(model, toolkit)


class _Altered(torch.nn.Module):
    """A feed-forward block that does more: ``change`` gets what comes out [1, T, C], and the number of calls before."""

    def __init__(self, inner: torch.nn.Module, change: Callable[[torch.Tensor, int], torch.Tensor]) -> None:
        super().__init__()
        self.inner, self.change, self.num_calls = inner, change, 0

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        self.num_calls += 1
        return self.change(self.inner(hidden), self.num_calls)


def places(hidden: torch.Tensor) -> torch.Tensor:
    return torch.arange(hidden.shape[-2]).view(1, -1, 1)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        (lambda hidden, _: hidden, None),
        (lambda hidden, _: hidden + hidden.roll(1, -2), "on their order"),
        (lambda hidden, _: hidden + hidden.roll(-1, -2), "on their order"),
        (lambda hidden, _: hidden + hidden.roll(8, -2), "on their order"),
        (lambda hidden, _: hidden - hidden.mean(-2, keepdim=True), "on others in the batch"),
        (lambda hidden, _: hidden / hidden.abs().amax(), "on others in the batch"),
        (lambda hidden, _: hidden * (1 + 0.1 * places(hidden)), "on their order"),
        (lambda hidden, _: hidden * (1 + 1.0 / hidden.shape[-2]), "on others in the batch"),
        (lambda hidden, count: hidden * (1 + 0.1 * count), "on their order|on forwards before"),
    ],
    ids=["nothing", "shift", "shift back", "far shift", "mean", "largest", "own positions", "length", "state"],
)
def test_tokens_that_meet_outside_of_attention_are_noticed(tiny: TinyModel, change: Any, reason: str | None) -> None:
    """By the first forward, whatever the layer that mixes them is called."""
    model, driver = built(tiny)
    layer: Any = model.get_submodule("model.layers.1")
    layer.mlp = _Altered(layer.mlp, change)
    if reason is None:
        assert relative_error(driver.step({"a": PROMPT})["a"], tiny.logits(PROMPT)) < 1e-5
        return
    for request in ("a", "b"):
        # Not by the first alone: whoever goes on after a refusal gets it again.
        with pytest.raises(UnsupportedModelError, match=f"outside of attention tokens depend {reason}"):
            driver.step({request: PROMPT})


def test_weights_that_are_no_numbers_are_named(tiny: TinyModel) -> None:
    tensors = tiny.tensors()
    tensors["model.layers.1.mlp.up_proj.weight"][3, 5] = float("nan")
    with pytest.raises(ModelFormatError, match="no finite numbers"):
        built(tiny, tensors)[1].step({"a": PROMPT})


def without(tensors: dict[str, torch.Tensor], name: str) -> dict[str, torch.Tensor]:
    return {other: values for other, values in tensors.items() if other != name}


UP = "model.layers.1.mlp.up_proj.weight"


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda stored: without(stored, UP), f"missing {UP}"),
        (lambda stored: stored | {"model.layers.1.mlp.extra.weight": torch.zeros(2)}, "mlp.extra.weight"),
        (lambda stored: stored | {"model.layers.7.mlp.up_proj.weight": stored[UP]}, "model.layers.7.mlp.up_proj"),
        (lambda stored: stored | {UP: stored[UP].T.contiguous()}, UP),
        (lambda stored: stored | {UP: stored[UP].to(torch.int32)}, UP),
    ],
    ids=["missing", "extra", "extra layer", "transposed", "whole numbers"],
)
def test_tensors_that_do_not_fit_are_named(tiny: TinyModel, change: Any, named: str) -> None:
    with pytest.raises(ModelFormatError, match=named):
        built(tiny, change(tiny.tensors()))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("num_hidden_layers", 10**9),
        ("num_experts", 10**9),
        ("n_routed_experts", 10**9),
        ("vocab_size", 10**12),
        ("intermediate_size", 10**12),
    ],
)
def test_sizes_beyond_all_models_are_refused_before_anything_is_built(tiny: TinyModel, field: str, value: int) -> None:
    info = msgspec.structs.replace(tiny.info, config={**tiny.info.config, field: value})
    with pytest.raises(ModelFormatError, match=field):
        build_model(create_transformers, StateDictLoader({}), worker_config(info), PlainAttentionBackend())


def test_a_table_larger_than_the_file_is_refused_by_its_loader(tmp_path: Path) -> None:
    tiny = make_tiny_model("CohereForCausalLM", tmp_path, **TOKENS)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"vocab_size": 10**9}))
    with pytest.raises(ModelFormatError, match="vocab_size"):
        installed_loader("safetensors").describe(tiny.info.artifact)


@pytest.mark.parametrize(
    "fields",
    [
        {"return_dict": False, "use_return_dict": False},
        {"output_attentions": True, "output_hidden_states": True, "use_cache": True},
        {"attn_implementation": "somebody/kernel", "_attn_implementation": "somebody/kernel"},
        {"experts_implementation": "somebody/kernel", "use_kernels": True, "torchscript": True},
        {"dtype": "float16", "torch_dtype": "float16"},
        {"quantization_config": {"quant_method": "fp8"}},
    ],
    ids=lambda fields: next(iter(fields)),
)
def test_fields_about_running_a_model_change_nothing(tiny: TinyModel, fields: Mapping[str, Any]) -> None:
    """Some would fetch code, or have results of another form. (A worker refuses quantized weights before.)"""
    info = msgspec.structs.replace(tiny.info, config={**tiny.info.config, **fields})
    model, toolkit = build_model(
        create_transformers, StateDictLoader(tiny.tensors()), worker_config(info), PlainAttentionBackend()
    )
    logits = LocalDriver(model, toolkit).step({"a": PROMPT})["a"]
    assert relative_error(logits, tiny.logits(PROMPT)) < 1e-5


def test_embeddings_that_were_given_stay_as_they_are(tmp_path: Path) -> None:
    """Some classes scale them in place."""
    tiny = make_tiny_model("CTRLLMHeadModel", tmp_path, **TOKENS)
    model, driver = built(tiny)
    driver.step({"a": PROMPT})
    seen: list[tuple[torch.Tensor, torch.Tensor]] = []
    base: Any = model.get_submodule("transformer")
    base.register_forward_pre_hook(
        lambda _, args, given: seen.append((given["inputs_embeds"], given["inputs_embeds"].clone())), with_kwargs=True
    )
    embedded = model.embed(torch.tensor(PROMPT))  # type: ignore[operator]
    before = embedded.clone()
    with pytest.raises((HardpointError, LookupError, RuntimeError)):
        # Outside of a step there is nothing to attend to; the scaling comes before.
        model(None, torch.arange(len(PROMPT)), embeddings=embedded)
    assert torch.equal(embedded, before)
    assert not torch.equal(*seen[0])


@pytest.mark.parametrize("is_tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize(
    ("architecture", "fields"),
    [("LlamaForCausalLM", {}), ("CohereForCausalLM", {}), ("GPTJForCausalLM", {"rotary_dim": 8})],
)
def test_tied_and_untied_heads_compute_what_the_library_computes(
    architecture: str, fields: Mapping[str, Any], is_tied: bool, tmp_path: Path
) -> None:
    """Also where the head has a bias, as GPT-J's."""
    one = make_tiny_model(architecture, tmp_path, **TOKENS, **fields, tie_word_embeddings=is_tied)
    assert relative_error(built(one)[1].step({"a": PROMPT})["a"], one.logits(PROMPT)) < 1e-5


def test_the_type_that_a_configuration_claims_is_not_looked_up(tmp_path: Path) -> None:
    """The library has its rules for experts, which are stored one by one, by the type of the class."""
    tiny = make_tiny_model("OlmoeForCausalLM", tmp_path, **TOKENS, num_experts=6, num_experts_per_tok=2)
    info = msgspec.structs.replace(tiny.info, config={**tiny.info.config, "model_type": "of_nobody"})
    model, toolkit = build_model(
        create_transformers, StateDictLoader(tiny.tensors()), worker_config(info), PlainAttentionBackend()
    )
    logits = LocalDriver(model, toolkit).step({"a": PROMPT})["a"]
    assert relative_error(logits, tiny.logits(PROMPT)) < 1e-5
