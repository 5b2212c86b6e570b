"""Encoders of models whose decoder attends to an encoder's output (cross-attention).

A request brings one input for the encoder, a :class:`~hardpoint.interfaces.Feature` at the start of its prompt, with as
many encoder tokens as the KV blocks of the cross-attention layers were reserved for. In the step in which it enters,
the input is encoded as a whole, and each cross-attention layer writes the keys and values that it makes of the result
into these blocks; later steps, chunks of the decoder's prompt among them, read them there.
"""

from __future__ import annotations

from collections.abc import Container, Sequence
from dataclasses import replace

import numpy as np
import torch

from hardpoint.interfaces.request import Feature, Int32Array
from hardpoint.interfaces.scheduler import ENCODER_INPUTS
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.encoder_outputs import Content, EncoderModel, EncoderOutputs
from hardpoint_torch_runtime.runner.input_batch import ForeignTokens, InputBatch
from hardpoint_torch_runtime.runner.slot_state import BlockTable, SlotState

__all__ = ["EncoderStage", "refuse_inputs"]


def refuse_inputs(model: EncoderModel, features: Sequence[Feature]) -> str | None:
    """Why a request with these features cannot be computed by ``model``."""
    if len(features) != 1:
        return f"this model's encoder takes one input per request, not {len(features)}"
    feature = features[0]
    if feature.offset != 0 or feature.length < 1:
        return (
            f"an encoder's input belongs to the start of the decoder's prompt, not to {feature.length} positions from "
            f"{feature.offset} on"
        )
    return model.refuse_input(feature)


class EncoderStage:
    """State by slot: which inputs are still to be encoded, and how many encoder tokens a row attends to."""

    def __init__(self, model: EncoderModel, slots: SlotState, device: torch.device) -> None:
        self._outputs = EncoderOutputs(model)
        self._tables = slots.tables
        self._device = device
        self._pending: dict[int, Feature] = {}
        self._lengths: Int32Array = np.zeros(slots.num_slots, dtype=np.int32)
        self._seq_lens = StagedBuffer((slots.num_slots,), torch.int32, device)
        self._nothing = torch.empty(0, dtype=torch.int64, device=device)

    def enter(self, row: NewRow) -> None:
        """See ``StatePart``. Rows without an input attend to nothing; they are refused elsewhere."""
        self._lengths[row.slot] = 0
        self._pending.pop(row.slot, None)
        if row.features:
            self._pending[row.slot] = row.features[0]

    def release(self, slots: Int32Array) -> None:
        self._lengths[slots] = 0
        for slot in slots.tolist():
            self._pending.pop(slot, None)

    @property
    def num_kept(self) -> int:
        """Outputs that the scheduler counts on."""
        return len(self._outputs)

    def join(self, step: SchedulerOutput, batch: InputBatch, refused: Container[int]) -> InputBatch:
        """``batch`` with what its rows attend to; inputs of rows that enter are encoded now.

        ``refused``: slots whose rows fail anyway. Raises ``RuntimeError`` where blocks do not hold an input's tokens.
        """
        plan = step.extensions.get(ENCODER_INPUTS)
        self._outputs.drop_freed(plan)
        entering = self._entering(batch, refused)
        outputs = self._outputs.encode(list(entering.values()), keeps=plan is not None)
        for slot, feature in entering.items():
            self._lengths[slot] = outputs[Content.of(feature)].shape[0]
        host = self._seq_lens.host
        num_rows, padded = batch.num_rows, batch.seq_lens.shape[0]
        host[:num_rows] = self._lengths[batch.slots]
        host[num_rows:padded] = 0
        foreign = ForeignTokens(
            seq_lens=self._seq_lens.upload(padded),
            seq_lens_cpu=host[:padded],
            max_len=int(host[:padded].max(initial=0)),
            hidden=torch.cat([outputs[Content.of(feature)] for feature in entering.values()]) if entering else None,
            slot_mappings=tuple(self._mapping(table, list(entering)) for table in self._tables),
        )
        return replace(batch, foreign=foreign)

    def _entering(self, batch: InputBatch, refused: Container[int]) -> dict[int, Feature]:
        """By slot, in batch order, the inputs of rows that are computed for the first time."""
        if not self._pending:
            return {}
        found = {}
        for slot in batch.slots.tolist():
            feature = self._pending.pop(slot, None)
            if feature is not None and slot not in refused:
                found[slot] = feature
        return found

    def _mapping(self, table: BlockTable, slots: Sequence[int]) -> torch.Tensor | None:
        if not table.is_foreign:
            return None
        if not slots:
            return self._nothing
        places = []
        for slot in slots:
            length = int(self._lengths[slot])
            if length > int(table.counts[slot]) * table.block_size:
                raise RuntimeError(
                    f"slot {slot} has {length} encoder tokens, but holds blocks for "
                    f"{int(table.counts[slot]) * table.block_size}; the scheduler counts num_encoder_tokens"
                )
            blocks, offsets = np.divmod(np.arange(length, dtype=np.int64), table.block_size)
            places.append(table.ids[slot, blocks].astype(np.int64) * table.block_size + offsets)
        return torch.from_numpy(np.concatenate(places)).to(self._device)
