"""Which model plugin runs an architecture, and that a fallback is never taken without a word."""

from __future__ import annotations

import pytest

from hardpoint_torch_runtime.model_choice import ModelChoice, choose_model
from hardpoint_torch_runtime.worker import TorchWorkerOptions

INSTALLED = ("LlamaForCausalLM", "transformers")


def chosen(architecture: str, installed: tuple[str, ...] = INSTALLED, **options: str | None) -> ModelChoice:
    return choose_model(architecture, installed, TorchWorkerOptions.model_validate(options))


def test_an_architecture_has_its_own_plugin() -> None:
    assert chosen("LlamaForCausalLM") == ModelChoice("LlamaForCausalLM")


def test_the_fallback_runs_what_has_none_and_says_so() -> None:
    choice = chosen("CohereForCausalLM")
    assert (choice.plugin, choice.is_fallback) == ("transformers", True)
    assert choice.reason == "no installed model plugin is named 'CohereForCausalLM'"


@pytest.mark.parametrize(("installed", "options"), [(("LlamaForCausalLM",), {}), (INSTALLED, {"fallback_model": None})])
def test_without_a_fallback_the_architecture_is_missed(
    installed: tuple[str, ...], options: dict[str, str | None]
) -> None:
    assert chosen("CohereForCausalLM", installed, **options) == ModelChoice("CohereForCausalLM")


def test_a_plugin_named_by_hand_comes_first() -> None:
    choice = chosen("LlamaForCausalLM", model="transformers")
    assert (choice.plugin, choice.is_fallback) == ("transformers", False)
    assert choice.reason == "worker.torch.model names 'transformers'"
    assert chosen("LlamaForCausalLM", model="LlamaForCausalLM").reason == ""


def test_a_named_plugin_that_is_not_there_is_asked_for_all_the_same() -> None:
    """Or another one would run in its place."""
    assert chosen("LlamaForCausalLM", ("LlamaForCausalLM",), model="ghost").plugin == "ghost"
