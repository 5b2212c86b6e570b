"""BERT over several tensor-parallel ranks, which run as threads, against the whole model."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from hardpoint_models.bert import create_bert
from hardpoint_testing_torch import LocalDriver, make_tiny_model, relative_error
from hardpoint_testing_torch.rank_threads import RankMeeting, RankThreads, ThreadCommunicator
from hardpoint_testing_torch.tiny_models import TinyModel
from rank_models import rank_model

PROMPTS = {"a": [3, 14, 15, 92, 65], "b": [35], "c": [8, 97 - 1, 7, 9, 3, 2, 3, 8]}


def hidden_states(tiny: TinyModel, rank: int, meeting: RankMeeting) -> dict[str, torch.Tensor]:
    model, toolkit = rank_model(create_bert, tiny, rank, meeting.size, ThreadCommunicator(meeting, rank))
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
    tiny, meeting = make_tiny_model("BertModel", tmp_path, **config), RankMeeting(size)
    found = RankThreads.run(size, lambda rank: hidden_states(tiny, rank, meeting), patience_s=120.0)
    for rank in range(size):
        for name, prompt in PROMPTS.items():
            assert relative_error(found[rank][name], tiny.logits(prompt)) < 1e-4
    assert meeting.num_meetings == 1 + 2 * tiny.info.config["num_hidden_layers"], "the words, and two sums per layer"
