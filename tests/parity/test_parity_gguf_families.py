"""Every family that GGUF files may hold, written as converters write it, beside Hugging Face on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import msgspec
import pytest

from gguf_descriptions import decoder
from gguf_families import FAMILIES, GgufFamily, make_gguf
from gguf_writing import write_file
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint_testing_torch import (
    ParityHarness,
    installed_backend,
    installed_factory,
    installed_loader,
    make_tiny_model,
)
from model_cases_vision import VISION_CASES

READS_AND_SEES = "Qwen2VLForConditionalGeneration"
QUICK = ("phi3", "gptneox", "qwen2moe")


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


def cases() -> list[object]:
    return [
        pytest.param(family, id=str(family), marks=() if str(family) in QUICK else pytest.mark.slow)
        for family in FAMILIES
    ]


@pytest.mark.parametrize("family", cases())
def test_a_file_computes_what_it_was_written_from(
    family: GgufFamily, backend: AttentionBackend, tmp_path: Path
) -> None:
    tiny = make_gguf(family, tmp_path)
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    assert info.architecture == family.architecture
    assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert max(harness.prefill(), harness.batched()) < 1e-4


@pytest.mark.slow
def test_the_half_of_qwen2_vl_that_reads(backend: AttentionBackend, tmp_path: Path) -> None:
    """Converters write it alone; of a text without images it is a Qwen2."""
    (case,) = [case for case in VISION_CASES if case.architecture == READS_AND_SEES and case.name == "plain"]
    tiny = make_tiny_model(READS_AND_SEES, tmp_path, **case.config)
    text = tiny.info.config["text_config"]
    tensors = {
        name.replace("language_model.", ""): values.float().numpy()
        for name, values in tiny.tensors().items()
        if "visual" not in name
    }
    write_file(tmp_path / "tiny.gguf", "qwen2vl", decoder(text), tensors, text["num_hidden_layers"])
    artifact = ModelArtifact(name="tiny", root=str(tmp_path), files=("tiny.gguf",), source="local")
    tiny = replace(tiny, info=msgspec.structs.replace(tiny.info, artifact=artifact))
    loader = installed_loader("gguf")
    assert loader.describe(artifact).architecture == "Qwen2ForCausalLM"
    harness = ParityHarness(tiny, installed_factory("model", "Qwen2ForCausalLM"), backend, loader=loader)
    assert max(harness.prefill(), harness.batched()) < 1e-4


@pytest.mark.slow
def test_factors_for_long_contexts_hold_beyond_the_trained_length(backend: AttentionBackend, tmp_path: Path) -> None:
    """Served longer than trained, all positions have those; transformers only has them for longer sequences."""
    (family,) = [one for one in FAMILIES if str(one) == "phi3-longrope"]
    family = replace(family, config={**family.config, "original_max_position_embeddings": 32})
    tiny = make_gguf(family, tmp_path)
    loader = installed_loader("gguf")
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert harness.prefill(45) < 1e-4
