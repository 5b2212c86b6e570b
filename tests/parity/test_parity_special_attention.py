"""Attention sinks and chunks of attention: which backend serves, and what is said of those that do not."""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Any

import pytest
import transformers

from hardpoint import LLM, Prompt, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint.testing.doctor_device import described_on, parse_device
from hardpoint_cuda.platform import CudaPlatform
from hardpoint_testing_torch import make_tiny_model, worker_config, write_tiny_tokenizer
from hardpoint_testing_torch.tiny_models import TINY_SIZES, model_info
from hardpoint_testing_torch.worker_world import installed_plugins
from hardpoint_torch_runtime.attention_startup import attention_report

SINKS: dict[str, Any] = {"num_local_experts": 2, "num_experts_per_tok": 1, "intermediate_size": 40, "head_dim": 64}
CHUNKS: dict[str, Any] = {
    "num_hidden_layers": 2,
    "no_rope_layers": [1, 0],
    "num_local_experts": 2,
    "intermediate_size_mlp": 80,
    "head_dim": 64,
    "attention_chunk_size": 32,
    "rope_parameters": {"rope_type": "default", "rope_theta": 10000.0},
}


@pytest.mark.parametrize(
    ("architecture", "config", "refusing"),
    [
        ("GptOssForCausalLM", SINKS, {}),
        ("Llama4ForCausalLM", CHUNKS, {"flashinfer": "it has no chunked local attention"}),
    ],
)
def test_on_a_device_that_is_described(
    architecture: str, config: dict[str, Any], refusing: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """R5.3, R5.5: Triton's kernels and torch compute both; whoever refuses says why."""
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    hf_config = getattr(transformers, architecture).config_class(**{**TINY_SIZES, **config})
    hf_config.architectures = [architecture]
    (tmp_path / "config.json").write_text(json.dumps(hf_config.to_dict(), default=str), encoding="utf-8")
    worker = worker_config(model_info(tmp_path, architecture), dtype="bfloat16", block_size=16)
    platform, device = described_on(CudaPlatform(environment={}), parse_device("cuda sm_90 80GiB").description, 1)
    report = attention_report(installed_plugins(), platform, worker, device)
    verdicts = {verdict.name: verdict for verdict in report.candidates}
    assert report.chosen is not None
    assert {verdicts[name].outcome for name in ("triton", "torch_reference")} <= {"chosen", "would accept"}
    for name, reason in refusing.items():
        assert reason in verdicts[name].reason


def served(architecture: str, config: dict[str, Any], folder: Path, caplog: pytest.LogCaptureFixture) -> str:
    """What a start on the CPU logs of its choice, after an answer was computed."""
    tiny = make_tiny_model(architecture, folder, **config)
    write_tiny_tokenizer(folder, tiny.info.vocab_size)
    settings = {"dtype": "float32", "max_model_len": 64, "block_size": 16, "num_kv_blocks": 40}
    document = {"engines": {"tiny": EngineConfig.sections(str(folder), **settings)}}
    with caplog.at_level(logging.INFO, "hardpoint"), LLM.from_config(AppConfig.model_validate(document)) as llm:
        prompt = list(range(3, 40))
        (output,) = llm.generate([Prompt(token_ids=prompt)], SamplingParams(temperature=0.0, max_tokens=4))
    assert list(output.outputs[0].token_ids) == tiny.greedy(prompt, 4)
    return next(record.getMessage() for record in caplog.records if "attention backend:" in record.getMessage())


def test_chunks_on_the_cpu_are_left_to_torch_and_the_log_says_why(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """R5.3."""
    told = served("Llama4ForCausalLM", CHUNKS, tmp_path, caplog)
    assert told.startswith("attention backend: torch_reference on ")
    assert "model.layers.0.self_attn.attn" in told
    assert "chunks of 32): it has no chunked local attention" in told


@pytest.mark.slow
def test_sinks_on_the_cpu(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    told = served("GptOssForCausalLM", SINKS, tmp_path, caplog)
    assert "sinks" in told
    assert told.startswith(("attention backend: cpu_paged on ", "attention backend: torch_reference on "))
