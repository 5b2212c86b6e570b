"""Encoders in GGUF files, alone, with labels and beside a decoder, and rerankers that answer, against Hugging Face on
the same weights."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from gguf_descriptions import decoder
from gguf_encoders import ENCODER_DECODERS, ENCODERS, JUDGES, make_stacks
from gguf_families import GgufFamily, make_gguf
from gguf_writing import Config, Tensors
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_testing_torch import (
    LocalDriver,
    ParityHarness,
    build_model,
    check_parity,
    installed_backend,
    installed_factory,
    installed_loader,
    relative_error,
    worker_config,
)

PROMPTS = {"a": [9, 3, 5, 14, 15, 5, 8], "b": [35], "c": [8, 5, 7, 9, 3, 2, 3, 8, *range(40, 60)]}


@pytest.fixture
def backend() -> AttentionBackend:
    return installed_backend("torch_reference")


@pytest.mark.parametrize("family", ENCODERS, ids=str)
def test_a_file_computes_what_it_was_written_from(
    family: GgufFamily, backend: AttentionBackend, tmp_path: Path
) -> None:
    """Padding's own token among those of a text too, which RoBERTa does not count; its position is one of zeros."""
    tiny = make_gguf(family, tmp_path)
    if "pad_token_id" in family.config:
        with torch.no_grad():
            tiny.oracle.embeddings.position_embeddings.weight[: family.config["pad_token_id"] + 1] = 0
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    assert (info.architecture, info.tasks) == (family.architecture, ("embed",))
    assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert max(harness.prefill(), harness.batched()) < 1e-5
    padding = info.config.get("pad_token_id", 0)
    prompt = [9, padding, 8, padding, padding, 7]
    assert relative_error(harness.driver.step({"p": prompt})["p"], tiny.logits(prompt)) < 1e-5


@pytest.mark.parametrize("family", JUDGES, ids=str)
@pytest.mark.parametrize("labels", [1, 3])
def test_scores_of_a_file_are_those_that_it_was_written_from(
    family: GgufFamily, labels: int, backend: AttentionBackend, tmp_path: Path
) -> None:
    names = [f"class {number}" for number in range(labels)]
    changes = {"classifier.output_labels": names} if labels > 1 else {}
    config = {**family.config, "num_labels": labels}
    tiny = make_gguf(replace(family, config=config), tmp_path, changes=changes)
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    assert (info.architecture, info.tasks) == (family.architecture, ("embed", "classify"))
    assert list(info.config["id2label"].values()) == (names if labels > 1 else ["LABEL_0"])
    factory = installed_factory("model", family.architecture)
    model: Any
    model, toolkit = build_model(factory, loader, worker_config(info), backend)
    for name, states in LocalDriver(model, toolkit).step(PROMPTS).items():
        pooled = states.mean(0) if "Modern" in family.architecture else states[0]
        assert relative_error(model.score_head(pooled[None])[0], tiny.scores(PROMPTS[name])) < 1e-5


@pytest.mark.slow
@pytest.mark.parametrize("is_tied", [True, False])
def test_a_reranker_is_judged_by_what_it_would_answer(is_tied: bool, backend: AttentionBackend, tmp_path: Path) -> None:
    """Converters keep the rows of both answers, and of a head that is not tied nothing else."""
    yes, no = 31, 17

    def answers_alone(tensors: Tensors, config: Config) -> Tensors:
        head = tensors["model.embed_tokens.weight"] if config["tie_word_embeddings"] else tensors.pop("lm_head.weight")
        return {**tensors, "cls.output.weight": head[[yes, no]]}

    sizes = {"head_dim": 24, "tie_word_embeddings": is_tied}
    family = GgufFamily("Qwen3ForCausalLM", "qwen3", decoder, sizes, (answers_alone,))
    tiny = make_gguf(family, tmp_path, changes={"pooling_type": 4, "classifier.output_labels": ["yes", "no"]})
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    factory = installed_factory("model", info.architecture)
    model: Any
    model, toolkit = build_model(factory, loader, worker_config(info), backend)
    assert model.score_head.activation == "softmax", "shares of no and yes"
    for name, states in LocalDriver(model, toolkit).step(PROMPTS).items():
        would_answer = tiny.logits(PROMPTS[name])[-1, [no, yes]]
        assert relative_error(model.score_head(states[-1:])[0], would_answer) < 1e-5


@pytest.mark.parametrize("family", ENCODER_DECODERS, ids=str)
def test_both_stacks_of_a_file(family: GgufFamily, backend: AttentionBackend, tmp_path: Path) -> None:
    tiny = make_stacks(family, tmp_path)
    loader = installed_loader("gguf")
    info = loader.describe(tiny.info.artifact)
    assert (info.architecture, info.tasks, info.max_position) == (family.architecture, ("generate",), 256)
    assert info.generation == {"decoder_prompt_token_ids": [0]}
    assert loader.num_bytes(info) == sum(tensor.data.nbytes for tensor in loader.tensors(info))
    harness = ParityHarness(tiny, installed_factory("model", family.architecture), backend, loader=loader)
    assert max(harness.prefill(), harness.batched(), harness.chunked()) < 1e-4


@pytest.mark.slow
@pytest.mark.parametrize("family", ENCODER_DECODERS, ids=str)
def test_every_way_of_computing_and_greedy_tokens(
    family: GgufFamily, backend: AttentionBackend, tmp_path: Path
) -> None:
    tiny = make_stacks(family, tmp_path)
    check_parity(tiny, installed_factory("model", family.architecture), backend, loader=installed_loader("gguf"))
