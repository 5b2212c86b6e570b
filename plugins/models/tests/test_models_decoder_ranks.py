"""Decoders over several tensor-parallel ranks, which run as threads, against the whole model."""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_models.olmo import create_olmo2
from hardpoint_models.phi3 import create_phi3
from hardpoint_testing_torch import make_tiny_model, relative_error
from hardpoint_testing_torch.local_driver import LocalDriver, ModelFactory
from hardpoint_testing_torch.rank_threads import RankMeeting, RankThreads, ThreadCommunicator
from hardpoint_testing_torch.tiny_models import TinyModel
from hardpoint_torch_runtime import forward_context
from rank_models import rank_model

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6]
NO_IDS: dict[str, Any] = {"bos_token_id": None, "eos_token_id": None, "pad_token_id": None}


class OfThread(threading.local):
    """Stands for the contexts of a process, of which each rank has one of its own."""

    def __init__(self) -> None:
        self.held: list[forward_context.ForwardContext] = []

    def __len__(self) -> int:
        return len(self.held)

    def __getitem__(self, index: int) -> forward_context.ForwardContext:
        return self.held[index]

    def __delitem__(self, index: slice) -> None:
        del self.held[index]

    def append(self, context: forward_context.ForwardContext) -> None:
        self.held.append(context)


def logits_of(tiny: TinyModel, factory: ModelFactory, rank: int, meeting: RankMeeting) -> torch.Tensor:
    model, toolkit = rank_model(factory, tiny, rank, meeting.size, ThreadCommunicator(meeting, rank))
    return LocalDriver(model, toolkit).step({"a": PROMPT})["a"]


@pytest.mark.parametrize(
    ("architecture", "factory", "size", "changes"),
    [
        pytest.param("Olmo2ForCausalLM", create_olmo2, 2, {}, id="olmo2-two"),
        pytest.param("Olmo2ForCausalLM", create_olmo2, 4, {"num_key_value_heads": 2}, id="olmo2-four-shared-keys"),
        pytest.param("Phi3ForCausalLM", create_phi3, 2, {}, id="phi3-fused-two"),
        pytest.param("Phi3ForCausalLM", create_phi3, 4, {"num_key_value_heads": 1}, id="phi3-fused-four-one-key"),
    ],
)
def test_ranks_together_are_the_whole(
    architecture: str,
    factory: ModelFactory,
    size: int,
    changes: dict[str, Any],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Norms over all heads see those of other ranks; of fused tensors each rank takes its share of every part."""
    monkeypatch.setattr(forward_context, "_active", OfThread())
    tiny, meeting = make_tiny_model(architecture, tmp_path, **{**NO_IDS, **changes}), RankMeeting(size)
    found = RankThreads.run(size, lambda rank: logits_of(tiny, factory, rank, meeting), patience_s=100.0)
    for logits in found:
        assert relative_error(logits, tiny.logits(PROMPT)) < 1e-4
    per_layer = 3 if architecture == "Olmo2ForCausalLM" else 2
    assert meeting.num_meetings == per_layer * tiny.info.config["num_hidden_layers"] + 2, "and words and logits"
