"""Tiny models with every rotary scaling, from files through the installed loader, against Hugging Face.

Frequencies go by the longest sequence that the worker serves, so the oracle is asked about sequences of that length:
what comes after a token does not change its logits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.interfaces.model_source import ModelArtifact, ModelInfo, WeightLoader, WeightTensor
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.llama import create_llama
from hardpoint_models.phi3 import create_phi3
from hardpoint_testing_torch import TinyModel, check_parity, installed_loader, make_tiny_model

pytestmark = pytest.mark.slow

TRAINED = 96
"""Tokens; the longest sequence of a check has 75."""
HEAD_SIZE = 12
FACTORS = [1.0, 1.3, 1.9, 2.6, 3.4, 4.5]
LONGROPE: dict[str, Any] = {
    "rope_type": "longrope",
    "rope_theta": 10000.0,
    "short_factor": FACTORS,
    "long_factor": [7 * factor for factor in FACTORS],
    "original_max_position_embeddings": TRAINED,
}
DYNAMIC: dict[str, Any] = {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 4.0}


class ServedLoader(WeightLoader):
    """The installed loader, for a worker whose longest sequence is ``length``."""

    def __init__(self, length: int) -> None:
        self.length = length
        self.loader = installed_loader("safetensors")

    def accepts(self, artifact: ModelArtifact) -> bool:
        return self.loader.accepts(artifact)

    def describe(self, artifact: ModelArtifact) -> ModelInfo:
        return msgspec.structs.replace(self.loader.describe(artifact), max_position=self.length)

    def num_bytes(self, info: ModelInfo) -> int:
        return self.loader.num_bytes(info)

    def tensors(self, info: ModelInfo) -> Iterator[WeightTensor]:
        return iter(self.loader.tensors(info))


@dataclasses.dataclass(frozen=True, slots=True)
class LongSequence:
    """Logits of the first tokens of a sequence that is ``length`` tokens long."""

    tiny: TinyModel
    length: int

    @property
    def info(self) -> ModelInfo:
        return self.tiny.info

    def tensors(self) -> dict[str, torch.Tensor]:
        return self.tiny.tensors()

    def logits(self, token_ids: list[int]) -> torch.Tensor:
        return self.tiny.logits(token_ids + [0] * (self.length - len(token_ids)))[: len(token_ids)]


@pytest.mark.parametrize(
    ("rope", "configured", "served"),
    [
        pytest.param({"rope_type": "default", "rope_theta": 500.0}, 256, 256, id="default"),
        pytest.param({"rope_type": "linear", "rope_theta": 10000.0, "factor": 3.0}, 256, 256, id="linear"),
        pytest.param(DYNAMIC, TRAINED, TRAINED, id="dynamic-as-trained"),
        pytest.param(DYNAMIC, 32, 192, id="dynamic-beyond"),
        pytest.param(LONGROPE, 4 * TRAINED, TRAINED, id="longrope-short"),
        pytest.param(LONGROPE, 4 * TRAINED, 4 * TRAINED, id="longrope-long"),
        pytest.param({**LONGROPE, "factor": 2.0}, 4 * TRAINED, TRAINED + 1, id="longrope-just-long"),
    ],
)
def test_logits_and_64_greedy_tokens(rope: dict[str, Any], configured: int, served: int, tmp_path: Path) -> None:
    tiny = make_tiny_model(
        "LlamaForCausalLM", tmp_path, rope_parameters=rope, max_position_embeddings=configured, head_dim=HEAD_SIZE
    )
    report = check_parity(
        LongSequence(tiny, served), create_llama, ReferenceBackend(), loader=ServedLoader(served), block_size=8
    )
    assert "greedy" in {result.mode for result in report.results}


@pytest.mark.parametrize("served", [pytest.param(TRAINED, id="short"), pytest.param(4 * TRAINED, id="long")])
def test_a_part_of_each_head_is_stretched(served: int, tmp_path: Path) -> None:
    """As Phi-4-mini has it: a part of each head rotates, each pair with a divisor of its own."""
    tiny = make_tiny_model(
        "Phi3ForCausalLM",
        tmp_path,
        rope_parameters={
            **LONGROPE,
            "partial_rotary_factor": 0.5,
            "short_factor": FACTORS[:3],
            "long_factor": [7 * factor for factor in FACTORS[:3]],
        },
        original_max_position_embeddings=TRAINED,
        max_position_embeddings=4 * TRAINED,
        bos_token_id=None,
        eos_token_id=None,
        pad_token_id=None,
    )
    check_parity(LongSequence(tiny, served), create_phi3, ReferenceBackend(), loader=ServedLoader(served), block_size=8)
