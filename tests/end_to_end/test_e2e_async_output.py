"""Whole engines whose worker answers with promises give what engines give whose worker waits."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "max_model_len": 64,
    "num_kv_blocks": 20,
    "block_size": 4,
    "max_num_seqs": 5,
    "max_num_batched_tokens": 16,
}
PROMPTS = [[(5 * i * i + 3 * j + 1) % 150 for i in range(2 + 3 * j)] for j in range(6)]


def params() -> list[SamplingParams]:
    common: dict[str, Any] = {"max_tokens": 10, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, logprobs=1, **common),
        SamplingParams(temperature=1.2, top_p=0.9, seed=5, **common),
        SamplingParams(temperature=0.7, seed=6, repetition_penalty=1.3, **common),
    ] * 2


def answers(folder: Path, *, is_async: bool, **engine: Any) -> list[list[int]]:
    """Too few blocks for all: requests are preempted, and come back."""
    sections = EngineConfig.sections(str(folder), **ENGINE, **engine)
    worker = {"torch": {"asynchronous_output": is_async}}
    config = AppConfig.model_validate({"engines": {"tiny": sections}, "plugins": {"worker": worker}})
    with LLM.from_config(config) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params())]


@pytest.mark.parametrize("executor", ["uniproc", "multiproc"])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_promises_change_no_token(tmp_path: Path, executor: str, is_ahead: bool) -> None:
    """R4.38, R4.70: in this process and in one of its own, planned in turn and ahead."""
    folder = write_tiny_llama(tmp_path / "model")
    expected = answers(folder, is_async=False, executor="uniproc")
    assert answers(folder, is_async=True, executor=executor, async_scheduling=is_ahead) == expected
