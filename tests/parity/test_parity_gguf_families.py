"""Every family that GGUF files may hold, written as converters write it, beside Hugging Face on the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from gguf_families import FAMILIES, GgufFamily, make_gguf
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch import ParityHarness, installed_backend, installed_factory, installed_loader

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
def test_factors_for_long_contexts_hold_beyond_the_trained_length(backend: AttentionBackend, tmp_path: Path) -> None:
    """Served longer than trained, all positions have those; transformers only has them for longer sequences."""
    (family,) = [one for one in FAMILIES if str(one) == "phi3-longrope"]
    family = replace(family, config={**family.config, "original_max_position_embeddings": 32})
    tiny = make_gguf(family, tmp_path)
    loader = installed_loader("gguf")
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert harness.prefill(45) < 1e-4
