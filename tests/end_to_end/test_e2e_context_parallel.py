"""Two ranks that deal out the tokens of every sequence between their caches generate what one rank does."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.errors import ConfigError
from hardpoint_testing_torch import make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer
from model_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

MODELS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "one-kv-head": ("LlamaForCausalLM", {"num_key_value_heads": 1}),
    "latent": ("DeepseekV3ForCausalLM", {}),
}
SETTINGS: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 64, "block_size": 4}
SMALL_STEPS: Mapping[str, Any] = {"max_num_batched_tokens": 16, "max_num_seqs": 4}
PREFIX = [(7 * i + 2) % 150 for i in range(19)]
PROMPTS = [[7], [3, 1, 4, 1, 5], [*PREFIX, 9, 8], [(5 * i * i + 3 * i + 1) % 150 for i in range(37)], [*PREFIX, 4]]


def answers(llm: LLM) -> list[list[int]]:
    """Batches that mix prompts in pieces with answers; the last prompt begins like one before it."""
    params = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True)
    found = []
    for prompts in (PROMPTS[:4], PROMPTS[4:]):
        found += [list(output.outputs[0].token_ids) for output in llm.generate(prompts, [params] * len(prompts))]
    return found


def shared_by_two(folder: Path, *, ranks: int = 2, interleave: int = 1, **settings: Any) -> LLM:
    """Ranks as processes of their own, over the platform's communicator."""
    engine = {"tensor_parallel_size": 2, **SETTINGS, **settings}
    options = {"worker": {"torch": {"context_ranks": ranks, "context_interleave": interleave}}}
    return LLM(str(folder), plugins=options, **engine)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    plain = {case.architecture: case.config for case in CASES if case.name == "plain"}
    folders = {}
    for name, (architecture, changes) in MODELS.items():
        folders[name] = folder = tmp_path_factory.mktemp(name) / "model"
        tiny = make_tiny_model(architecture, folder, **{**plain[architecture], **changes})
        write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return folders


@pytest.fixture(scope="module")
def alone(checkpoints: Mapping[str, Path]) -> Mapping[str, list[list[int]]]:
    expected = {}
    for name, folder in checkpoints.items():
        with LLM(str(folder), **SETTINGS) as llm:
            expected[name] = answers(llm)
    return expected


@pytest.mark.parametrize(
    ("name", "interleave", "settings"),
    [
        ("one-kv-head", 1, {}),
        ("one-kv-head", 2, SMALL_STEPS),
        ("one-kv-head", 4, {**SMALL_STEPS, "async_scheduling": True}),
        ("latent", 1, SMALL_STEPS),
    ],
    ids=["plain", "chunks", "ahead", "latent"],
)
def test_two_ranks_that_share_contexts_answer_as_one_does(
    checkpoints: Mapping[str, Path],
    alone: Mapping[str, list[list[int]]],
    name: str,
    interleave: int,
    settings: Mapping[str, Any],
) -> None:
    """I5.2, R5.22, R1.34: prompts at once and in chunks over shares, decodes, and a prefix found again."""
    with shared_by_two(checkpoints[name], interleave=interleave, **settings) as llm:
        assert llm.core.executor.world_size == 2
        assert answers(llm) == alone[name]


def test_ranks_hold_together_what_one_cannot(
    checkpoints: Mapping[str, Path], alone: Mapping[str, list[list[int]]]
) -> None:
    """R1.34: the longest sequence takes 24 blocks of one rank, and 12 of each of two."""
    with pytest.raises(ConfigError, match="max-model-len"):
        LLM(str(checkpoints["latent"]), **{**SETTINGS, "num_kv_blocks": 14})
    with shared_by_two(checkpoints["latent"], num_kv_blocks=14, max_num_batched_tokens=16) as llm:
        assert answers(llm) == alone["latent"]


@pytest.mark.parametrize(
    ("changes", "ranks", "interleave", "reason"),
    [
        ({"num_key_value_heads": 2}, 2, 1, "has 2 key/value heads, of which ranks keep different ones"),
        ({"num_key_value_heads": 1}, 4, 1, "context_ranks is 4, .* tensor_parallel_size is 2"),
        ({"num_key_value_heads": 1}, 2, 3, "context_interleave is 3, which does not divide blocks of 4 tokens"),
    ],
    ids=["heads", "ranks", "interleave"],
)
def test_what_cannot_be_dealt_out_is_refused_at_the_start(
    tmp_path: Path, changes: Mapping[str, Any], ranks: int, interleave: int, reason: str
) -> None:
    """R5.5."""
    plain = {case.architecture: case.config for case in CASES if case.name == "plain"}
    tiny = make_tiny_model("LlamaForCausalLM", tmp_path / "model", **{**plain["LlamaForCausalLM"], **changes})
    write_tiny_tokenizer(tmp_path / "model", tiny.info.vocab_size)
    with pytest.raises(ConfigError, match=reason):
        shared_by_two(tmp_path / "model", ranks=ranks, interleave=interleave)
