"""Gemma 3 through the whole offline engine: windows whose blocks are given back while sequences go on.

Every part is the installed one. The judge is ``transformers``, which sees prompt and generated tokens in one forward.
"""

from __future__ import annotations

import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from hardpoint import LLM, SamplingParams
from hardpoint.interfaces import Prompt, RequestOutput
from hardpoint_model_io.sources.package import PackageSource
from hardpoint_testing_torch import make_tiny_model
from oracle import TransformersOracle
from tiny_llama import write_tiny_llama

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

WINDOW, BLOCK_SIZE, NUM_TOKENS = 12, 4, 64
LIMITS: dict[str, Any] = {
    "dtype": "float32",
    "block_size": BLOCK_SIZE,
    "max_model_len": 224,
    "max_num_batched_tokens": 40,
    "max_num_seqs": 6,
    "num_kv_blocks": 2000,
}
GREEDY = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True)
WITH_LOGPROBS = SamplingParams(temperature=0.0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=5)
MAX_RELATIVE_ERROR = 1e-4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Random weights: five layers with windows to a full one, twice, so that there are six groups of two layers."""
    folder, donor = tmp_path_factory.mktemp("gemma3"), tmp_path_factory.mktemp("donor")
    kinds = [*["sliding_attention"] * 5, "full_attention"] * 2
    make_tiny_model(
        "Gemma3ForCausalLM",
        folder,
        seed=5,
        num_hidden_layers=len(kinds),
        layer_types=kinds,
        sliding_window=WINDOW,
        head_dim=16,
        query_pre_attn_scalar=24,
        final_logit_softcapping=30.0,
        vocab_size=272,
    )
    write_tiny_llama(donor)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(donor / name, folder / name)
    return folder


@pytest.fixture(scope="module")
def oracle(folder: Path) -> TransformersOracle:
    return TransformersOracle(folder)


def prompts(*lengths: int, seed: int = 7) -> list[Prompt]:
    rng = np.random.default_rng(seed)
    return [Prompt(token_ids=rng.integers(3, 270, size=length).tolist()) for length in lengths]


def pairs(outputs: Sequence[RequestOutput]) -> list[tuple[list[int], list[int]]]:
    return [(list(one.prompt_token_ids or ()), list(one.outputs[0].token_ids)) for one in outputs]


@torch.inference_mode()
def logprob_error(oracle: TransformersOracle, outputs: Sequence[RequestOutput]) -> float:
    """Largest deviation of the most likely tokens' log-probabilities, relative to the largest logit."""
    worst = 0.0
    for output in outputs:
        prompt, generated = list(output.prompt_token_ids), list(output.outputs[0].token_ids)
        logits = oracle.model(torch.tensor([prompt + generated])).logits[0, len(prompt) - 1 : -1].float()
        expected = torch.log_softmax(logits, dim=-1)
        positions = output.outputs[0].logprobs or ()
        assert len(positions) == len(generated)
        found = torch.tensor([[one.logprob for one in position.top] for position in positions])
        ids = torch.tensor([[one.token_id for one in position.top] for position in positions])
        worst = max(worst, float((found - expected.gather(1, ids)).abs().max() / logits.abs().max()))
    return worst


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"max_num_batched_tokens": 7},
        {"block_size": 16, "num_kv_blocks": 600},
        {"kv_layout": "block_outermost"},
        {"hybrid_kv_cache": False},
        {"prefix_caching": False},
        {"async_scheduling": True},
    ],
    ids=lambda options: "-".join(options) or "usual",
)
def test_greedy_tokens_alone_together_and_after_a_prefix(
    options: dict[str, Any], folder: Path, oracle: TransformersOracle
) -> None:
    """Prompts from one token to more than ten windows: each alone, all in one batch, and again over what they left."""
    asked = prompts(1, 11, 12, 13, 60, 150)
    with LLM(str(folder), **{**LIMITS, **options}) as llm:
        alone = [llm.generate([one], GREEDY)[0] for one in asked[::2]]
        together, again = (llm.generate(asked, WITH_LOGPROBS) for _ in range(2))
    oracle.require_equal(pairs([*alone, *together]))
    assert pairs(together) == pairs(again)
    assert logprob_error(oracle, [*together, *again]) < MAX_RELATIVE_ERROR
    cached = [one.num_cached_tokens for one in again]
    assert (max(cached) > 2 * WINDOW) == options.get("prefix_caching", True), cached


def test_preempted_requests_are_computed_again(folder: Path, oracle: TransformersOracle) -> None:
    """Room for one sequence of the largest length: six that grow together push one another out."""
    with LLM(str(folder), **{**LIMITS, "num_kv_blocks": 200}) as llm:
        outputs = llm.generate(prompts(90, 91, 92, 93, 94, 95), WITH_LOGPROBS)
        assert llm.core.scheduler.stats().num_preemptions > 0
    oracle.require_equal(pairs(outputs))
    assert logprob_error(oracle, outputs) < MAX_RELATIVE_ERROR


def test_a_sequence_is_longer_than_all_its_windows_could_hold(folder: Path, oracle: TransformersOracle) -> None:
    """R1.28: without giving blocks back, the five groups of windows would need as many as the full layers each."""
    (prompt,) = prompts(150)
    too_few = 6 * (214 // BLOCK_SIZE)
    small = {**LIMITS, "max_num_seqs": 1, "num_kv_blocks": 200, "prefix_caching": False}
    assert small["num_kv_blocks"] < too_few
    with LLM(str(folder), **small) as llm:
        outputs = llm.generate([prompt], GREEDY)
        assert llm.core.scheduler.stats().num_preemptions == 0
    oracle.require_equal(pairs(outputs))


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file of the package, joined from its parts."""
    source = PackageSource(cache_dir=str(tmp_path_factory.mktemp("joined")))
    artifact = source.resolve("gemma3-270m", None) if "gemma3-270m" in source.known_names() else None
    if artifact is None:
        pytest.skip("the package of gemma3-270m is not installed; run `make setup`")
    return Path(artifact.root, artifact.files[0])


STORY = (
    "The keeper of the lighthouse wrote down every ship that passed, its flag, its course and the color of its sails. "
)


def test_the_real_model_gives_the_tokens_of_transformers(real: Path) -> None:
    """The same quantized file, dequantized by either side; the last prompt is longer than the window of 512 tokens."""
    asked = ["The capital of France is", "def fibonacci(n):\n", "Ein Flugzeug fliegt, weil", STORY * 24]
    limits = {**LIMITS, "block_size": 16, "max_model_len": 768, "num_kv_blocks": 700, "max_num_batched_tokens": 256}
    with LLM(str(real), **limits) as llm:
        outputs = llm.generate(asked, GREEDY)
    found = pairs(outputs)
    assert len(found[-1][0]) > 520
    TransformersOracle(real).require_equal(found)
