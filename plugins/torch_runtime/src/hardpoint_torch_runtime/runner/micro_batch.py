"""A batch computed in two halves, so that one half's communication can overlap with the other's computation.

Here are the hooks: where a batch is cut, each half's inputs and metadata, and a forward context for each. The halves
run one after the other; what overlaps is up to whoever supplies ``run``. Legend as in ``input_batch``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch

from hardpoint.interfaces.step import SchedulerOutput
from hardpoint_torch_runtime.forward_context import ForwardContext, GraphMode
from hardpoint_torch_runtime.forward_scope import ForwardScopes
from hardpoint_torch_runtime.runner.attention_groups import AttentionGroups
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.input_batch import InputBatch

__all__ = ["Half", "MicroBatches", "cut_row"]


def cut_row(num_scheduled: np.ndarray) -> int | None:
    """The first row of the second half: the boundary nearest to the middle of the tokens. None for less than two rows.

    ``num_scheduled`` int [R], all positive.
    """
    if len(num_scheduled) < 2:
        return None
    ends = np.cumsum(num_scheduled)
    return int(np.abs(2 * ends[:-1] - ends[-1]).argmin()) + 1


@dataclass(frozen=True, slots=True)
class Half:
    """``tokens`` are the half's place in the tensors of the whole batch; padding goes to the second half."""

    batch: InputBatch
    tokens: slice


class MicroBatches:
    """Cuts batches of at least ``min_tokens``.

    ``groups`` are two sets of metadata builders, because a builder's metadata is valid until its next build only. The
    second one's ``query_start_loc`` begins at 0 again, in a buffer of its own.
    """

    def __init__(
        self,
        groups: tuple[AttentionGroups, AttentionGroups],
        *,
        max_rows: int,
        device: torch.device,
        min_tokens: int = 2,
    ) -> None:
        self._groups = groups
        self._min_tokens = min_tokens
        self._starts = StagedBuffer((max_rows + 1,), torch.int32, device)

    def cut(self, batch: InputBatch) -> tuple[Half, Half] | None:
        """Both halves, as views of ``batch``; None for one row, or too few tokens."""
        row = cut_row(batch.num_scheduled) if batch.num_tokens >= self._min_tokens else None
        if row is None:
            return None
        token = int(batch.query_start_loc_cpu[row])
        rest = len(batch.query_start_loc_cpu) - row
        starts = self._starts.host[:rest]
        np.subtract(batch.query_start_loc_cpu[row:], token, out=starts)
        first = _part(batch, slice(0, row), slice(0, token), batch.query_start_loc_cpu[: row + 1])
        first = replace(first, query_start_loc=batch.query_start_loc[: row + 1])
        second = _part(batch, slice(row, None), slice(token, None), starts)
        second = replace(second, query_start_loc=self._starts.upload(rest))
        return Half(first, slice(0, token)), Half(second, slice(token, None))

    def run(
        self,
        halves: tuple[Half, Half],
        step: SchedulerOutput,
        facts: ForwardContext,
        scopes: ForwardScopes,
        run: Callable[[Half], torch.Tensor],
    ) -> torch.Tensor:
        """Hidden states [T', C] of both halves, each computed by ``run`` in its own scope within that of the whole.

        ``facts`` are those of the whole batch, without metadata.
        """
        built = [groups.build(half.batch, step) for groups, half in zip(self._groups, halves, strict=True)]
        whole = replace(facts, attention_metadata={}, half_metadata=(built[0][0], built[1][0]))
        outputs = []
        with scopes.enter(whole, is_replay=True):
            for half, (metadata, mappings) in zip(halves, built, strict=True):
                with scopes.enter(_facts(facts, half, metadata, mappings)):
                    outputs.append(run(half))
        return torch.cat(outputs)


def _part(batch: InputBatch, rows: slice, tokens: slice, starts: np.ndarray) -> InputBatch:
    """Rows and tokens of ``batch``; nothing samples, which is the whole batch's affair."""
    scheduled, seq_lens = batch.num_scheduled[rows], batch.seq_lens_cpu[rows]
    return replace(
        batch,
        num_rows=len(scheduled),
        num_tokens=int(scheduled.sum()),
        step_rows=batch.step_rows[rows],
        slots=batch.slots[rows],
        num_computed=batch.num_computed[rows],
        num_scheduled=scheduled,
        token_ids=batch.token_ids[tokens],
        positions=batch.positions[..., tokens],
        query_start_loc_cpu=starts,
        seq_lens=batch.seq_lens[rows],
        seq_lens_cpu=seq_lens,
        max_query_len=int(scheduled.max()),
        max_seq_len=int(seq_lens.max()),
        block_tables=tuple(table[rows] for table in batch.block_tables),
        slot_mappings=tuple(mapping[tokens] for mapping in batch.slot_mappings),
        mm_ranges=None if batch.mm_ranges is None else batch.mm_ranges[rows],
        sample_rows=batch.sample_rows[:0],
        logits_indices=batch.logits_indices[:0],
    )


def _facts(
    facts: ForwardContext, half: Half, metadata: dict[str, Any], mappings: dict[str, torch.Tensor]
) -> ForwardContext:
    mask = facts.padding_mask
    return replace(
        facts,
        attention_metadata=metadata,
        slot_mapping=mappings,
        num_tokens=half.batch.num_tokens,
        # Recordings are of whole batches.
        graph_mode=GraphMode.NONE,
        batch_descriptor=None,
        padding_mask=None if mask is None else mask[half.tokens],
    )
