"""A prefix that all requests of a batch share, from the prefix cache to attention that reads it once for all."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint_attention.cascade import (
    CascadeQuestion,
    CascadeVerdict,
    decide_cascade,
    estimate_cascade,
    register_cascade_policy,
)
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

ENGINE: Mapping[str, Any] = {
    "dtype": "float32",
    "attention_backend": "torch_reference",
    "max_model_len": 320,
    "num_kv_blocks": 80,
    "block_size": 16,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 512,
    "executor": "uniproc",
}
SHARED = [(7 * i * i + 3 * i + 1) % 150 for i in range(256)]
PROMPTS = [[*SHARED, *((11 * i * row + row + 2) % 150 for i in range(1 + row % 5))] for row in range(8)]
ASKED: list[tuple[CascadeQuestion, CascadeVerdict]] = []


def watch(question: CascadeQuestion) -> CascadeVerdict:
    """The usual decision, on a device that would split keys by as much as the machine of a test does not."""
    verdict = estimate_cascade(question)
    ASKED.append((question, verdict))
    return verdict


def answers(folder: Path, cascade: str) -> list[list[int]]:
    sections = EngineConfig.sections(str(folder), **ENGINE)
    options = {"attention_backend": {"torch_reference": {"cascade": cascade}}}
    config = AppConfig.model_validate({"engines": {"tiny": sections}, "plugins": options})
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM.from_config(config) as llm:
        # The first request leaves the prefix in the cache, where the others find it.
        llm.generate([SHARED], params)
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


def test_reading_the_prefix_once_changes_no_token(tmp_path: Path) -> None:
    """R3.97, R5.80, R5.83, I5.2: the scheduler counts the blocks, the runner hands them on, the backend decides."""
    register_cascade_policy("test-watch", watch)
    folder = write_tiny_llama(tmp_path / "model")
    expected = answers(folder, "never")
    assert answers(folder, "always") == expected
    assert answers(folder, "test-watch") == expected
    assert {question.prefix_tokens for question, _ in ASKED} == {256}
    assert {question.num_rows for question, _ in ASKED} == {8}
    assert any(verdict.is_accepted for _, verdict in ASKED)
    assert all(decide_cascade(question) == verdict for question, verdict in ASKED)
