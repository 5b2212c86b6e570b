"""Models on a real device: against ``transformers``, by every attention backend, and from captured graphs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from gpu_cases import installed
from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError, PluginError
from hardpoint_testing_torch import ParityCase, run_parity
from model_cases import CASES

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

MODES = ("prefill", "chunk", "decode", "batch", "prefix")
PROMPTS = [f"Tell me about the number {number}." for number in range(9)]
GRAPHS = {"worker": {"torch": {"graph_backend": "cuda_graphs"}}}


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.architecture}-{case.name}")
def test_a_model_computes_what_transformers_does(case: ParityCase, device: torch.device, tmp_path: Path) -> None:
    """Tokens and logits in float32, through the whole engine on the platform that it chooses itself."""
    run_parity(case, tmp_path, modes=MODES).require_ok()


def answers(**settings: Any) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=32, ignore_eos=True)
    with LLM("smollm2", dtype="float32", **settings) as llm:
        return [list(output.outputs[0].token_ids) for output in llm.generate(PROMPTS, params)]


@pytest.fixture(scope="module")
def wanted(device: torch.device) -> list[list[int]]:
    """What the processor answers."""
    return answers(platform="cpu")


@pytest.mark.parametrize("backend", installed("attention_backend"))
def test_the_demo_model_answers_as_on_the_processor(backend: str, wanted: list[list[int]]) -> None:
    """By every backend that accepts it; ties may fall the other way late in an answer."""
    try:
        found = answers(attention_backend=backend)
    except (ConfigError, PluginError) as error:
        pytest.skip(str(error))
    assert [row[:16] for row in found] == [row[:16] for row in wanted]


def test_captured_steps_answer_as_eager_ones(device: torch.device) -> None:
    """R4.53, R4.54: padding and replays change nothing."""
    assert answers(plugins=GRAPHS) == answers()


def test_the_cache_leaves_room_for_the_largest_step(device: torch.device) -> None:
    """A cache sized by profiling: a step of every allowed token, beside a full batch, does not run out of memory."""
    with LLM("smollm2", dtype="bfloat16", max_num_batched_tokens=8192, max_num_seqs=256) as llm:
        params = SamplingParams(temperature=1.0, max_tokens=8, ignore_eos=True, seed=0)
        outputs = llm.generate([PROMPTS[index % 9] * 20 for index in range(256)], params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [8] * 256
