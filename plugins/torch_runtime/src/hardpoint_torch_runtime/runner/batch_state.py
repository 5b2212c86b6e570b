"""Applies the scheduler's changes to everything the worker remembers, in the one order the step records prescribe."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from hardpoint.interfaces.logits_processor import LogitsProcessor
from hardpoint.interfaces.request import Int32Array
from hardpoint.interfaces.step import NewRow, SchedulerOutput, TokenUpdate
from hardpoint_torch_runtime.runner.backlog import Backlog, LaunchedStep
from hardpoint_torch_runtime.runner.draft_debt import DraftDebt
from hardpoint_torch_runtime.runner.draft_verification import OwnDrafts
from hardpoint_torch_runtime.runner.extensions import StatePart
from hardpoint_torch_runtime.runner.kv_memory import KVMemory
from hardpoint_torch_runtime.runner.prompt_embeddings import PromptEmbeddings
from hardpoint_torch_runtime.runner.samples import StepSamples
from hardpoint_torch_runtime.runner.slot_state import SlotState
from hardpoint_torch_runtime.sampling.slot_params import SlotSampling

__all__ = ["AppliedStep", "BatchState", "RowRefusal"]


class RowRefusal(Protocol):
    """Says why this worker cannot compute a request, in words a client may see, or None."""

    def __call__(self, row: NewRow) -> str | None: ...


@dataclass(frozen=True, slots=True)
class AppliedStep:
    """What a step is once the worker's own knowledge is added.

    Attributes:
        num_computed: int32 [R], lowered by drafts that this worker has refused and the scheduler did not know of yet.
        drafts: guesses to verify, this worker's own ones filled in as far as the host knows them; None without any.
        correct: to be called once the forward is submitted (R4.37): waits for the steps before this one, and takes
            back those of their drafts that were wrong. None where nothing was assumed.
    """

    num_computed: Int32Array
    drafts: TokenUpdate | None = None
    correct: Callable[[], None] | None = None


class BatchState:
    """Slots, sampling parameters, embeddings and plugin state: what :meth:`apply` keeps in step with each other.

    ``refused`` says by slot why its request cannot be computed: each of its rows fails, in later steps as well, until
    the slot is released; ``repair`` makes of such a request one that ``parts`` can work with. These are further state
    by slot, each of which may be absent. ``own_drafts`` are there
    when the worker guesses, ``backlog`` and ``debt`` when results stay on the device for a while.
    """

    def __init__(
        self,
        slots: SlotState,
        sampling: SlotSampling,
        kv: KVMemory,
        embeddings: PromptEmbeddings,
        processors: Sequence[LogitsProcessor] = (),
        refuse: RowRefusal | None = None,
        *,
        repair: Callable[[NewRow], NewRow] = lambda row: row,
        parts: Sequence[StatePart] = (),
        own_drafts: OwnDrafts | None = None,
        backlog: Backlog | None = None,
        debt: DraftDebt | None = None,
    ) -> None:
        self.slots = slots
        self.sampling = sampling
        self.embeddings = embeddings
        self.refused: dict[int, str] = {}
        self.own_drafts = own_drafts
        self.backlog = backlog
        self.debt = debt
        self._kv = kv
        self._processors = tuple(processors)
        self._refuse = refuse
        self._repair = repair
        mine: tuple[StatePart | None, ...] = (own_drafts, debt)
        self._parts = (*parts, *(part for part in mine if part is not None))

    def apply(self, step: SchedulerOutput) -> AppliedStep:
        """Finished and preempted slots, copies, zeroing, new rows, blocks, then tokens learned elsewhere.

        Raises ``RuntimeError`` for a step that cannot be right.
        """
        if self.backlog is not None:
            self._absorb(self.backlog.take_ready())
        self._release(step.finished_slots)
        self._release(step.preempted_slots)
        if step.block_copies is not None:
            self._kv.copy_blocks(step.block_copies)
        self._kv.zero_blocks(step.blocks_to_zero)
        for row in step.new_rows:
            self._enter(row)
        if not step.num_rows:
            return AppliedStep(step.num_computed_tokens)
        self.slots.check_rows(step.slots, step.generations)
        self.slots.append_blocks(step.slots, step.new_blocks)
        if step.known_tokens is not None:
            self.slots.append_known(step.slots, step.known_tokens)
            self._observe_known(step.slots, step.known_tokens)
        return self._with_own_knowledge(step)

    def settle(self) -> None:
        """Wait for all steps under way; afterwards the host knows every token."""
        if self.backlog is not None:
            self._absorb(self.backlog.take_all())

    def remember(self, slots: Int32Array, samples: StepSamples) -> None:
        """Sampled tokens join what is known of their requests, ``slots`` int32 [S].

        A step that was planned before anybody knew that a row failed goes on behind it all the same, so its place is
        filled; nobody is told of the filling.
        """
        if len(samples.token_ids) == len(slots):
            self.slots.append_tokens(slots, samples.filled_token_ids)
        else:
            self.slots.append_runs(slots, samples.counts, samples.filled_token_ids)
        self._note(slots, samples)

    def keep_drafts(self, slots: Int32Array, samples: StepSamples) -> None:
        """The worker's new guesses, where :meth:`remember` did not have them yet."""
        if samples.drafts is not None and self.own_drafts is not None:
            self.own_drafts.put(slots, samples.drafts)

    def write_drafts(self, slots: Int32Array, counts: Int32Array, ids: np.ndarray) -> None:
        """Put guesses behind the known tokens of their rows, for whoever reads a row's tokens; a missing one as 0."""
        self.slots.write_ahead(slots, counts, np.maximum(ids, 0))

    def _absorb(self, launched: Sequence[LaunchedStep]) -> None:
        """Results of steps that had stayed on the device, oldest first; rows whose slot changed hands are past."""
        for step in launched:
            samples = step.read()
            alive = self.slots.occupied[step.slots] & (self.slots.generations[step.slots] == step.generations)
            kept, slots = samples.of_rows(alive), step.slots[alive]
            tokens = (
                np.where(np.repeat(kept.failed, kept.counts), 0, kept.token_ids) if kept.failures else kept.token_ids
            )
            expected = step.expected[alive]
            self.slots.resolve(slots, expected, kept.counts, tokens)
            if self.debt is not None and step.has_drafts:
                self.debt.forgive(slots, expected - kept.counts)
            self._note(slots, kept)

    def _note(self, slots: Int32Array, samples: StepSamples) -> None:
        """What there is to know of ``samples`` beside the tokens as such."""
        self.keep_drafts(slots, samples)
        for row, reason in samples.failures.items():
            self.refused.setdefault(int(slots[row]), reason)
        if not self._processors:
            return
        owners, told = np.repeat(slots, samples.counts), ~np.repeat(samples.failed, samples.counts)
        for processor in self._processors:
            processor.observe(owners[told], samples.token_ids[told])

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
        for part in self._parts:
            part.release(slots)
        for slot in slots.tolist():
            self.embeddings.drop(slot)
            self.refused.pop(slot, None)
            for processor in self._processors:
                processor.remove(slot)

    def _enter(self, row: NewRow) -> None:
        self.slots.enter(row)
        self.sampling.enter(row)
        self.embeddings.enter(row)
        reason = self._refuse(row) if self._refuse is not None else None
        known = row if reason is None else self._repair(row)
        for part in self._parts:
            part.enter(known)
        for processor in self._processors:
            processor.add(row)
        if reason is not None:
            self.refused[row.slot] = reason

    def _with_own_knowledge(self, step: SchedulerOutput) -> AppliedStep:
        ends = step.num_computed_tokens + step.num_scheduled_tokens
        if step.drafts is None and self.backlog is None and not bool((ends > self.slots.num_tokens[step.slots]).any()):
            self._check_blocks(step, ends)
            return AppliedStep(step.num_computed_tokens)
        if step.drafts is not None:
            ends = ends - step.drafts.counts
        if self.backlog is not None and self._lacks_tokens(step, ends):
            self.settle()
        surplus = ends - self.slots.num_tokens[step.slots]
        if step.drafts is not None:
            _check_drafts(step, step.drafts, surplus)
        computed = step.num_computed_tokens
        if bool((surplus > 0).any()):
            surplus = np.maximum(surplus, 0)
            self._check_surplus(step, ends, surplus)
            computed = computed - surplus
        self._check_blocks(step, computed + step.num_scheduled_tokens)
        drafts = step.drafts
        if drafts is not None:
            if self.own_drafts is not None:
                drafts = self.own_drafts.resolve(step.slots, self.slots.num_pending[step.slots] == 0, drafts)
            self.write_drafts(step.slots, drafts.counts, drafts.ids)
        is_assuming = self.backlog is not None and self.backlog.has_drafts
        return AppliedStep(computed, drafts, self.settle if is_assuming else None)

    def _lacks_tokens(self, step: SchedulerOutput, ends: Int32Array) -> bool:
        """Whether a row starts before tokens that are not on the host, of which the device adds only the newest."""
        wanted = np.where(step.samples, ends - 1, ends)
        settled = self.slots.num_tokens[step.slots] - self.slots.num_pending[step.slots]
        return bool(((step.num_computed_tokens < wanted) & (wanted > settled)).any())

    def _check_surplus(self, step: SchedulerOutput, ends: Int32Array, surplus: Int32Array) -> None:
        """R4.37: a row may be scheduled past its tokens by as many drafts as were refused, and by no more."""
        wrong = surplus > np.where(step.samples, self.slots.num_refused[step.slots], 0)
        if wrong.any():
            row = int(np.argmax(wrong))
            known = self.slots.num_tokens[step.slots[row]]
            raise RuntimeError(
                f"slot {step.slots[row]} is scheduled up to token {ends[row]}, but {known} tokens are known"
            )

    def _check_blocks(self, step: SchedulerOutput, ends: Int32Array) -> None:
        for table in self.slots.tables:
            if not table.follows_tokens:
                continue
            held = table.counts[step.slots] * table.block_size
            if bool((ends > held).any()):
                row = int(np.argmax(ends > held))
                raise RuntimeError(
                    f"slot {step.slots[row]} is scheduled up to token {ends[row]}, but holds blocks for {held[row]}"
                )


def _check_drafts(step: SchedulerOutput, drafts: TokenUpdate, surplus: Int32Array) -> None:
    wrong = (drafts.counts > 0) & (~step.samples | (surplus < 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise RuntimeError(
            f"slot {step.slots[row]} brings {drafts.counts[row]} drafts, but does not reach its last known token; "
            "drafts come behind it"
        )
