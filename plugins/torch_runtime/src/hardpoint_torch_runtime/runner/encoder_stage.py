"""Encoders of models whose decoder attends to an encoder's output (cross-attention).

A request brings one input for the encoder, a :class:`~hardpoint.interfaces.Feature` at the start of its prompt, with as
many encoder tokens as the KV blocks of the cross-attention layers were reserved for. In the step in which it enters,
the input is encoded as a whole, and each cross-attention layer writes the keys and values that it makes of the result
into these blocks; later steps, chunks of the decoder's prompt among them, read them there.

Outputs are kept by the content they show for as long as the scheduler counts on them (``EncoderInputs.freed`` names
those to drop): sequences of one prompt share an encoding, and a preempted request may find its own again. What no plan
of the scheduler speaks of is used in its step and dropped.
"""

from __future__ import annotations

from collections.abc import Container, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple, Protocol, runtime_checkable

import numpy as np
import torch

from hardpoint.interfaces.request import Feature, Int32Array
from hardpoint.interfaces.scheduler import ENCODER_INPUTS
from hardpoint.interfaces.step import NewRow, SchedulerOutput
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.input_batch import ForeignTokens, InputBatch
from hardpoint_torch_runtime.runner.slot_state import BlockTable, SlotState

__all__ = ["EncoderModel", "EncoderStage", "refuse_inputs"]


@runtime_checkable
class EncoderModel(Protocol):
    """A model with an encoder. Its decoder finds ``encoder_hidden`` in the forward context."""

    def refuse_input(self, feature: Feature) -> str | None:
        """Why the encoder cannot take ``feature``, in words a client may see, or None. Looks at sizes before data."""

    def encode(self, features: Sequence[Feature]) -> Sequence[torch.Tensor]:
        """Of each feature [its ``num_encoder_tokens``, C]. None of them was refused."""

    def example_input(self, num_tokens: int) -> Feature:
        """A made-up input of about ``num_tokens`` encoder tokens, or of the only length there is."""


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


class _Content(NamedTuple):
    """What an input shows. Its size is part of it: no claim about content may make blocks too small."""

    hash: str
    num_tokens: int | None

    @classmethod
    def of(cls, feature: Feature) -> _Content:
        return cls(feature.content_hash, feature.num_encoder_tokens)


class EncoderStage:
    """State by slot: which inputs are still to be encoded, and how many encoder tokens a row attends to."""

    def __init__(self, model: EncoderModel, slots: SlotState, device: torch.device) -> None:
        self._model = model
        self._tables = slots.tables
        self._device = device
        self._pending: dict[int, Feature] = {}
        self._lengths: Int32Array = np.zeros(slots.num_slots, dtype=np.int32)
        self._seq_lens = StagedBuffer((slots.num_slots,), torch.int32, device)
        self._kept: dict[_Content, torch.Tensor] = {}
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
        return len(self._kept)

    def join(self, step: SchedulerOutput, batch: InputBatch, refused: Container[int]) -> InputBatch:
        """``batch`` with what its rows attend to; inputs of rows that enter are encoded now.

        ``refused``: slots whose rows fail anyway. Raises ``RuntimeError`` where blocks do not hold an input's tokens.
        """
        plan = step.extensions.get(ENCODER_INPUTS)
        if self._kept and (freed := set(_freed(plan))):
            self._kept = {content: output for content, output in self._kept.items() if content.hash not in freed}
        entering = self._entering(batch, refused)
        outputs = self._encode(list(entering.values()), keeps=plan is not None)
        for slot, feature in entering.items():
            self._lengths[slot] = outputs[_Content.of(feature)].shape[0]
        host = self._seq_lens.host
        num_rows, padded = batch.num_rows, batch.seq_lens.shape[0]
        host[:num_rows] = self._lengths[batch.slots]
        host[num_rows:padded] = 0
        foreign = ForeignTokens(
            seq_lens=self._seq_lens.upload(padded),
            seq_lens_cpu=host[:padded],
            max_len=int(host[:padded].max(initial=0)),
            hidden=torch.cat([outputs[_Content.of(feature)] for feature in entering.values()]) if entering else None,
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

    def _encode(self, features: Sequence[Feature], *, keeps: bool) -> Mapping[_Content, torch.Tensor]:
        """Outputs by content, kept ones and new ones; equal inputs are encoded once."""
        new = {_Content.of(feature): feature for feature in features if _Content.of(feature) not in self._kept}
        made = dict(zip(new, self._model.encode(list(new.values())), strict=True)) if new else {}
        if keeps:
            self._kept.update(made)
        return {**self._kept, **made}

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


def _freed(plan: Any) -> Sequence[str]:
    """The struct itself within one process; fields by name from another one."""
    if plan is None:
        return ()
    freed: Sequence[str] = plan.get("freed", ()) if isinstance(plan, Mapping) else plan.freed
    return freed
