"""BERT over several tensor-parallel ranks, which run as threads, against the whole model."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch

from hardpoint.interfaces.model import ModelContext
from hardpoint.interfaces.plugin import NoOptions, ProcessRole
from hardpoint.interfaces.worker import ParallelSlice
from hardpoint_attention.reference import ReferenceBackend
from hardpoint_models.bert import create_bert
from hardpoint_testing_torch import LocalDriver, StateDictLoader, make_tiny_model, relative_error, worker_config
from hardpoint_testing_torch.rank_threads import RankThreads
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import LayerToolkit, load_weights

PROMPTS = {"a": [3, 14, 15, 92, 65], "b": [35], "c": [8, 97 - 1, 7, 9, 3, 2, 3, 8]}


@dataclass
class Meeting:
    """Where ranks leave their parts and take those of all."""

    size: int
    patience_s: float = 60.0
    parts: dict[int, torch.Tensor] = field(default_factory=dict)
    num_meetings: int = 0

    def __post_init__(self) -> None:
        self.barrier = threading.Barrier(self.size, timeout=self.patience_s)

    def exchange(self, rank: int, part: torch.Tensor) -> list[torch.Tensor]:
        self.parts[rank] = part.clone()
        self.barrier.wait()
        if rank == 0:
            self.num_meetings += 1
        parts = [self.parts[other] for other in range(self.size)]
        self.barrier.wait()
        return parts


@dataclass(frozen=True)
class ThreadCommunicator:
    meeting: Meeting
    rank: int

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.meeting.exchange(self.rank, tensor)).sum(0)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.meeting.exchange(self.rank, tensor), dim)

    def close(self) -> None:
        """Nothing is held."""


def hidden_states(tiny: TinyModel, rank: int, meeting: Meeting) -> dict[str, torch.Tensor]:
    parallel = ParallelSlice(world_size=meeting.size, rank=rank, tensor_parallel_size=meeting.size)
    config = msgspec.structs.replace(worker_config(tiny.info), parallel=parallel)
    toolkit = LayerToolkit.create(
        config,
        device=torch.device("cpu"),
        dtype=torch.float32,
        attention_backend=ReferenceBackend(),
        communicator=ThreadCommunicator(meeting, rank),
    )
    roles = frozenset({ProcessRole.WORKER})
    context = ModelContext(name="BertModel", api_version=1, roles=roles, config=config, layers=toolkit)
    model = create_bert(context, NoOptions())
    load_weights(model, StateDictLoader(tiny.tensors()), tiny.info, show_progress=False, rank=rank)
    return LocalDriver(model, toolkit).step(PROMPTS)


@pytest.mark.parametrize(
    ("size", "config"),
    [
        pytest.param(2, {}, id="two"),
        pytest.param(
            3,
            {"hidden_size": 36, "num_attention_heads": 12, "intermediate_size": 42, "vocab_size": 97},
            id="three-uneven-vocabulary",
        ),
    ],
)
def test_ranks_together_are_the_whole(size: int, config: dict[str, Any], tmp_path: Path) -> None:
    """Heads, feed-forward and vocabulary are split; every rank ends up with all hidden states."""
    tiny, meeting = make_tiny_model("BertModel", tmp_path, **config), Meeting(size)
    found = RankThreads.run(size, lambda rank: hidden_states(tiny, rank, meeting), patience_s=120.0)
    for rank in range(size):
        for name, prompt in PROMPTS.items():
            assert relative_error(found[rank][name], tiny.logits(prompt)) < 1e-4
    assert meeting.num_meetings == 1 + 2 * tiny.info.config["num_hidden_layers"], "the words, and two sums per layer"
