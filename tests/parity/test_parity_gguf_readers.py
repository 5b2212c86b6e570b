"""Files of every family read in other ways: as packed blocks, by the reader of Hugging Face, and damaged."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import msgspec
import pytest
import torch
import transformers

from gguf_families import FAMILIES, GgufFamily, make_gguf
from hardpoint.errors import ModelFormatError
from hardpoint.interfaces.model_source import ModelArtifact
from hardpoint.interfaces.plugin import ProcessRole, declaration_of
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_testing_torch import (
    LocalDriver,
    PlainAttentionBackend,
    build_model,
    installed_factory,
    installed_loader,
    relative_error,
    worker_config,
)

PROMPT = [(7 * number) % 160 for number in range(45)]
KNOWN = [family for family in FAMILIES if family.is_known_to_transformers]
PACKED = [family for family in FAMILIES if not family.name or family.gguf == "granitehybrid"]


def logits(artifact: ModelArtifact, *, packed: bool) -> torch.Tensor:
    """Of ``PROMPT``, with blocks unpacked while loading or, over whole activations, only where they are needed."""
    info = installed_loader("gguf").describe(artifact)
    config = worker_config(info)
    method: Any = None
    if packed:
        config = msgspec.structs.replace(config, quantization="gguf")
        roles = frozenset({ProcessRole.WORKER})
        context = WorkerContext(
            name="gguf", api_version=1, roles=roles, rank=0, config=config, device=torch.device("cpu")
        )
        factory = installed_factory("quantization", "gguf")
        declared = declaration_of(factory)
        assert declared is not None
        method = factory(context, declared.options(activations="float"))
    loader = installed_loader("gguf", packed=packed)
    factory = installed_factory("model", info.architecture)
    model, toolkit = build_model(factory, loader, config, PlainAttentionBackend(), quantization=method)
    return LocalDriver(model, toolkit).step({"prompt": PROMPT})["prompt"]


@pytest.mark.slow
@pytest.mark.parametrize("family", PACKED, ids=str)
def test_packed_blocks_compute_what_unpacked_ones_do(family: GgufFamily, tmp_path: Path) -> None:
    tiny = make_gguf(family, tmp_path, kind=gguf.GGMLQuantizationType.Q8_0)
    whole = logits(tiny.info.artifact, packed=False)
    assert relative_error(logits(tiny.info.artifact, packed=True), whole) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", KNOWN, ids=str)
def test_the_reader_of_hugging_face_agrees(family: GgufFamily, tmp_path: Path) -> None:
    vocabulary = {"tokenizer.ggml.model": "gpt2", "tokenizer.ggml.tokens": [f"t{number}" for number in range(160)]}
    tiny = make_gguf(family, tmp_path, changes=vocabulary)
    artifact = tiny.info.artifact
    reference = transformers.AutoModelForCausalLM.from_pretrained(
        artifact.root, gguf_file=artifact.files[0], dtype=torch.float32
    )
    with torch.inference_mode():
        expected = reference(torch.tensor([PROMPT])).logits[0]
    assert relative_error(logits(artifact, packed=False), expected) < 1e-4


@pytest.mark.parametrize(
    ("name", "key", "value"),
    [
        ("mamba", "ssm.inner_size", None),
        ("mamba2", "ssm.inner_size", 1000),
        ("jamba", "attention.head_count_kv", [0, 2]),
        ("granitehybrid", "rope.scaling.finetuned", 3),
        ("qwen3next", "ssm.group_count", 0),
        ("deepseek2", "attention.key_length_mla", 4),
        ("gpt-oss", "attention.sliding_window", None),
        ("phi2", "rope.dimension_count", 99),
        ("phi3", "context_length", "long"),
        ("gemma2", "final_logit_softcapping", float("nan")),
        ("granite", "embedding_scale", -1.0),
        ("falcon", "block_count", 1 << 31),
        ("mpt", "attention.clamp_kqv", "much"),
        ("gptneox", "use_parallel_residual", "yes"),
    ],
)
def test_metadata_that_cannot_be_is_named(name: str, key: str, value: Any, tmp_path: Path) -> None:
    """Class 11: a file's counts are its word."""
    family = next(one for one in FAMILIES if one.gguf == name and not one.name)
    tiny = make_gguf(family, tmp_path, changes={key: value})
    with pytest.raises(ModelFormatError, match=rf"{name}\.{key.replace('.', '[.]')}"):
        installed_loader("gguf").describe(tiny.info.artifact)
