"""Two ranks that share every layer generate what one rank does, however they are started and scheduled."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from hardpoint import LLM, SamplingParams
from hardpoint.config import AppConfig, EngineConfig
from hardpoint.errors import ConfigError, PluginNotFoundError
from hardpoint_testing_torch import make_tiny_model
from hardpoint_testing_torch.tiny_tokenizer import write_tiny_tokenizer
from model_cases import CASES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]

FAMILIES = {"dense": "LlamaForCausalLM", "experts": "MixtralForCausalLM", "latent": "DeepseekV3ForCausalLM"}
SETTINGS: Mapping[str, Any] = {"dtype": "float32", "max_model_len": 96, "num_kv_blocks": 64, "block_size": 4}
PROMPTS = [[7], [3, 1, 4, 1, 5], [(5 * i * i + 3 * i + 1) % 150 for i in range(37)]]
NUM_TOKENS = 20


def params() -> list[SamplingParams]:
    """Greedy, with a seed, and with the engine's own draws: a rank that drew otherwise would compute other steps."""
    common: dict[str, Any] = {"max_tokens": NUM_TOKENS, "ignore_eos": True}
    return [
        SamplingParams(temperature=0.0, **common),
        SamplingParams(temperature=1.0, top_p=0.9, seed=11, **common),
        SamplingParams(temperature=1.3, top_k=40, **common),
    ]


def answers(llm: LLM) -> list[list[int]]:
    """Of every prompt under every kind of sampling: batches that mix prompts in pieces with answers."""
    prompts = [prompt for prompt in PROMPTS for _ in params()]
    outputs = llm.generate(prompts, params() * len(PROMPTS))
    return [list(output.outputs[0].token_ids) for output in outputs]


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> Mapping[str, Path]:
    plain = {case.architecture: case.config for case in CASES if case.name == "plain"}
    folders = {}
    for family, architecture in FAMILIES.items():
        folders[family] = folder = tmp_path_factory.mktemp(family) / "model"
        tiny = make_tiny_model(architecture, folder, **plain[architecture])
        write_tiny_tokenizer(folder, tiny.info.vocab_size)
    return folders


@pytest.fixture(scope="module")
def alone(checkpoints: Mapping[str, Path]) -> Mapping[str, list[list[int]]]:
    """What one rank answers, in this process."""
    expected = {}
    for family, folder in checkpoints.items():
        with LLM(str(folder), **SETTINGS) as llm:
            expected[family] = answers(llm)
    return expected


@pytest.mark.parametrize(
    ("family", "settings"),
    [
        ("dense", {"max_num_batched_tokens": 16, "max_num_seqs": 4}),
        ("dense", {"async_scheduling": True, "max_num_batched_tokens": 16, "max_num_seqs": 4}),
        ("experts", {}),
        ("latent", {}),
    ],
    ids=["dense", "dense-ahead", "experts", "latent"],
)
def test_two_ranks_answer_as_one_does(
    checkpoints: Mapping[str, Path], alone: Mapping[str, list[list[int]]], family: str, settings: Mapping[str, Any]
) -> None:
    """Greedy and drawn tokens, planned in turn and ahead. Unseeded draws follow the order of rows, so they are equal
    where the batches are.
    """
    with LLM(str(checkpoints[family]), tensor_parallel_size=2, **SETTINGS, **settings) as llm:
        assert llm.core.executor.world_size == 2
        found = answers(llm)
    is_drawn_alike = [index for index in range(len(found)) if index % 3 != 2 or not settings]
    assert [found[index] for index in is_drawn_alike] == [alone[family][index] for index in is_drawn_alike]
    assert all(len(tokens) == NUM_TOKENS for tokens in found)


SCRIPT = """
import json, os, sys
from test_e2e_tensor_parallel import SETTINGS, answers
from hardpoint import LLM

with LLM(sys.argv[1], executor="external_launcher", tensor_parallel_size=2, **SETTINGS) as llm:
    found = answers(llm)
with open(os.path.join(sys.argv[2], os.environ["RANK"]), "w") as file:
    json.dump(found, file)
"""


def launched(script: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    paths = [str(Path(__file__).parent), *sys.path]
    return subprocess.run(
        [*torchrun, str(script), *map(str, arguments)],
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def test_ranks_started_by_torchrun_agree(
    checkpoints: Mapping[str, Path], alone: Mapping[str, list[list[int]]], tmp_path: Path
) -> None:
    """R4.5: each has an engine of its own, and samples for itself: all of them sample the same."""
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    done = launched(script, checkpoints["dense"], tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    first, second = (json.loads((tmp_path / rank).read_text()) for rank in "01")
    assert first == second == alone["dense"]


def test_heads_that_cannot_be_shared_name_what_can() -> None:
    """SmolLM2 has nine query heads."""
    advice = r"number of query heads is 9.*set --tensor-parallel-size to a divisor: 1, 3, 9"
    with pytest.raises(ConfigError, match=advice):
        LLM("smollm2", tensor_parallel_size=2, **{**SETTINGS, "block_size": 16})


def test_a_communicator_nobody_provides_is_named(checkpoints: Mapping[str, Path]) -> None:
    options = {"worker": {"torch": {"communicator": "semaphore"}}}
    sections = EngineConfig.sections(str(checkpoints["dense"]), tensor_parallel_size=2, **SETTINGS)
    config = AppConfig.model_validate({"engines": {"tiny": sections}, "plugins": options})
    with pytest.raises(PluginNotFoundError) as caught:
        LLM.from_config(config)
    message = str(caught.value)
    assert "tensor_parallel_size is 2" in message
    assert "no communicator plugin 'semaphore'" in message
    assert "gloo" in message
    assert "--tensor-parallel-size 1" in message
