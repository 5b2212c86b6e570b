"""Applies the scheduler's changes to everything the worker remembers, in the one order the step records prescribe."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import numpy as np

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import NewRow, SchedulerOutput, TokenUpdate
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.prompt_embeddings import PromptEmbeddings
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.sampling.slot_params import SlotSampling

__all__ = ["BatchState", "RowRefusal"]


class RowRefusal(Protocol):
    """Says why this worker cannot compute a request, in words a client may see, or None."""

    def __call__(self, row: NewRow) -> str | None: ...


class BatchState:
    """Slots, sampling parameters, embeddings and plugin state: what :meth:`apply` keeps in step with each other.

    ``refused`` says by slot why its request cannot be computed: each of its rows fails, in later steps as well, until
    the slot is released.
    """

    def __init__(
        self,
        slots: SlotState,
        sampling: SlotSampling,
        kv: KVMemory,
        embeddings: PromptEmbeddings,
        processors: Sequence[LogitsProcessor] = (),
        refuse: RowRefusal | None = None,
    ) -> None:
        self.slots = slots
        self.sampling = sampling
        self.embeddings = embeddings
        self.refused: dict[int, str] = {}
        self._kv = kv
        self._processors = tuple(processors)
        self._refuse = refuse

    def apply(self, step: SchedulerOutput) -> None:
        """Finished and preempted slots, copies, zeroing, new rows, blocks, then tokens learned elsewhere.

        Raises ``RuntimeError`` for a step that cannot be right.
        """
        self._release(step.finished_slots)
        self._release(step.preempted_slots)
        if step.block_copies is not None:
            self._kv.copy_blocks(step.block_copies)
        self._kv.zero_blocks(step.blocks_to_zero)
        for row in step.new_rows:
            self._enter(row)
        if step.num_rows:
            self.slots.check_rows(step.slots, step.generations)
            self.slots.append_blocks(step.slots, step.new_blocks)
            if step.known_tokens is not None:
                self.slots.append_known(step.slots, step.known_tokens)
                self._observe_known(step.slots, step.known_tokens)
            self._check_known(step)

    def remember(self, slots: Int32Array, token_ids: Int32Array, failed: BoolArray) -> None:
        """Sampled tokens, one per slot, join what is known of their requests.

        ``failed``, bool like ``token_ids``, marks samples that are no tokens. A step that was planned before anybody
        knew goes on behind such a row all the same, so its place is filled; nobody is told of the filling.
        """
        if failed.any():
            self.slots.append_tokens(slots[failed], np.zeros(int(failed.sum()), dtype=np.int32))
            slots, token_ids = slots[~failed], token_ids[~failed]
        self.slots.append_tokens(slots, token_ids)
        for processor in self._processors:
            processor.observe(slots, token_ids)

    def _observe_known(self, slots: Int32Array, known: TokenUpdate) -> None:
        is_news = known.ids >= 0
        owners, ids = np.repeat(slots, known.counts)[is_news], known.ids[is_news]
        for processor in self._processors if len(ids) else ():
            processor.observe(owners, ids)

    def _release(self, slots: Int32Array) -> None:
        if len(slots) == 0:
            return
        self.slots.release(slots)
        self.sampling.release(slots)
        for slot in slots.tolist():
            self.embeddings.drop(slot)
            self.refused.pop(slot, None)
            for processor in self._processors:
                processor.remove(slot)

    def _enter(self, row: NewRow) -> None:
        self.slots.enter(row)
        self.sampling.enter(row)
        self.embeddings.enter(row)
        for processor in self._processors:
            processor.add(row)
        reason = self._refuse(row) if self._refuse is not None else None
        if reason is not None:
            self.refused[row.slot] = reason

    def _check_known(self, step: SchedulerOutput) -> None:
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        known = self.slots.num_tokens[step.slots]
        if bool((ends > known).any()):
            row = int(np.argmax(ends > known))
            raise RuntimeError(
                f"slot {step.slots[row]} is scheduled up to token {ends[row]}, but {known[row]} tokens are known"
            )
        for table in self.slots.tables:
            held = table.counts[step.slots] * table.block_size
            if bool((ends > held).any()):
                row = int(np.argmax(ends > held))
                raise RuntimeError(
                    f"slot {step.slots[row]} is scheduled up to token {ends[row]}, but holds blocks for {held[row]}"
                )
