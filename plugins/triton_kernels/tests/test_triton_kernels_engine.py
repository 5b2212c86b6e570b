"""A whole engine with every override of this distribution, its kernels interpreted."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint_torch_runtime.ops import SEAMS
from tiny_llama import write_tiny_llama

pytest.importorskip("triton")
pytestmark = pytest.mark.slow

NAMED = {seam: f"triton_{seam}" for seam in SEAMS if seam not in ("linear", "embedding")}
PROMPTS = ["abab", "The wing"]
PARAMS = [
    SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True),
    SamplingParams(temperature=0.8, top_k=5, top_p=0.9, seed=3, max_tokens=3, ignore_eos=True),
]


def tokens(model: Path, **worker: Any) -> list[tuple[int, ...]]:
    engine = EngineConfig.sections(str(model), dtype="float32", num_kv_blocks=64, max_model_len=64, executor="uniproc")
    settings = AppConfig.model_validate({"engines": {"tiny": engine}, "plugins": {"worker": {"torch": worker}}})
    with LLM.from_config(settings) as llm:
        return [tuple(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, PARAMS)]


def test_tokens_are_those_of_the_plain_kernels(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """R10.56: greedy and sampled, through prefill and decode."""
    model = write_tiny_llama(tmp_path / "tiny")
    plain = tokens(model)
    with caplog.at_level(logging.INFO, "hardpoint"):
        assert tokens(model, kernel_overrides=NAMED, custom_ops=["triton_ops"]) == plain
    table = next(record.getMessage() for record in caplog.records if "kernels by seam" in record.getMessage())
    assert [name for name in NAMED.values() if f"{name} (named)" not in table] == []
