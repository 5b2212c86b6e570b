"""Log-probabilities of prompt tokens, for the positions computed in this step."""

from __future__ import annotations

import numpy as np
import torch

from hardpoint.interfaces.model import Model
from hardpoint.interfaces.step import LogprobArrays
from hardpoint_torch_runtime.runner.batch_state import BatchState
from hardpoint_torch_runtime.runner.input_batch import InputBatch
from hardpoint_torch_runtime.sampling.logprobs import gather_logprobs, join_logprobs

__all__ = ["prompt_logprobs"]

_POSITIONS_AT_ONCE = 128
"""Bounds the [positions, vocabulary] scratch."""


def prompt_logprobs(model: Model, hidden: torch.Tensor, batch: InputBatch, state: BatchState) -> LogprobArrays | None:
    """Entry i of a row belongs to its computed position i and names the prompt token after it.

    The last prompt position is left out: what follows it is sampled.
    """
    if not state.sampling.owes_prompt_logprobs:
        return None
    asking, counts = state.sampling.prompt_logprob_counts(batch.slots)
    parts: list[LogprobArrays] = []
    for row, count in zip(asking.tolist(), counts.tolist(), strict=True):
        slot, first = int(batch.slots[row]), int(batch.num_computed[row])
        last = min(first + int(batch.num_scheduled[row]), int(state.slots.num_prompt_tokens[slot]) - 1)
        start = int(batch.query_start_loc_cpu[row]) - first
        for begin in range(first, last, _POSITIONS_AT_ONCE):
            end = min(begin + _POSITIONS_AT_ONCE, last)
            logits = model.logits(hidden[start + begin : start + end]).to(torch.float32)
            following = state.slots.token_ids[slot, begin + 1 : end + 1].astype(np.int64)
            entries = end - begin
            parts.append(
                gather_logprobs(
                    torch.log_softmax(logits, dim=-1),
                    torch.from_numpy(following).to(logits.device),
                    np.full(entries, count, dtype=np.int64),
                    np.full(entries, batch.step_rows[row], dtype=np.int32),
                )
            )
    return join_logprobs(parts)
