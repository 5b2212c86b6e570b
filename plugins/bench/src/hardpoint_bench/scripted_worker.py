"""A worker without a model: it answers every step by a script and holds the step against the rules of its records.

All bookkeeping is in arrays over slots, so that checking costs little beside the scheduler; none of it is timed.
"""

from __future__ import annotations

import numpy as np

from hardpoint.interfaces import Int32Array, NewRow, RunnerOutput, SchedulerLimits, SchedulerOutput
from hardpoint_bench.faults import SchedulerFault, require

__all__ = ["END_TOKEN", "FIRST_SAMPLED", "ScriptedWorker"]

END_TOKEN = 2
"""The end-of-sequence id of every scripted request."""

FIRST_SAMPLED = 1_000
_SAMPLED_RANGE = 20_000


class ScriptedWorker:
    """Samples an ordinary token for each row that owes one, or, once :attr:`ending` is set, the end of the sequence.

    ``block_size`` is in tokens. :meth:`execute` raises ``SchedulerFault`` for a step that a real worker could not
    compute: rows of slots nobody holds, gaps between steps, tokens without blocks, more than the limits allow.
    """

    def __init__(self, limits: SchedulerLimits, *, num_blocks: int, block_size: int) -> None:
        self.ending = False
        self.num_sampled = 0
        self._limits = limits
        self._num_blocks = num_blocks
        self._block_size = block_size
        self._last_step_id = -1
        size = limits.max_num_seqs
        # Over slots: the generation (-1: free), tokens with KV, tokens known, tokens that the blocks have room for.
        self._generation = np.full(size, -1, dtype=np.int64)
        self._computed = np.zeros(size, dtype=np.int64)
        self._known = np.zeros(size, dtype=np.int64)
        self._capacity = np.zeros(size, dtype=np.int64)

    @property
    def num_held(self) -> int:
        """Slots that were handed out and not given back."""
        return int((self._generation >= 0).sum())

    def execute(self, step: SchedulerOutput) -> RunnerOutput:
        """The step's result, rows in its order."""
        require(step.step_id > self._last_step_id, "step ids must grow", f"{step.step_id} follows {self._last_step_id}")
        self._last_step_id = step.step_id
        self._release(step.finished_slots, "finished")
        self._release(step.preempted_slots, "preempted")
        for row in step.new_rows:
            self._enter(row)
        self._check_rows(step)
        return self._answer(step)

    def _release(self, slots: Int32Array, how: str) -> None:
        if not len(slots):
            return
        free = (slots < 0) | (slots >= len(self._generation)) | (self._generation[slots % len(self._generation)] < 0)
        require(not free.any(), f"only slots in use are given back as {how}", f"{slots[free].tolist()} are not in use")
        self._generation[slots] = -1

    def _enter(self, row: NewRow) -> None:
        slot = row.slot
        if not 0 <= slot < len(self._generation):
            raise SchedulerFault(f"slots are 0 to max_num_seqs - 1 ({len(self._generation) - 1}); found {slot}")
        require(
            self._generation[slot] < 0, "a slot has one owner", f"slot {slot} went to {row.request_id} while in use"
        )
        self._generation[slot] = row.generation
        self._computed[slot] = -1
        self._known[slot] = len(row.token_ids)
        self._capacity[slot] = min(len(ids) for ids in row.block_ids) * self._block_size
        for ids in row.block_ids:
            self._check_blocks(ids)

    def _check_blocks(self, ids: Int32Array) -> None:
        if len(ids):
            low, high = int(ids.min()), int(ids.max())
            rule = f"block ids are 1 to {self._num_blocks - 1}"
            require(low >= 1 and high < self._num_blocks, rule, f"{low if low < 1 else high} was handed out")

    def _check_rows(self, step: SchedulerOutput) -> None:
        limits, slots, counts = self._limits, step.slots, step.num_scheduled_tokens
        total = int(counts.sum())
        require(total == step.num_tokens, "num_tokens is the sum over the rows", f"{step.num_tokens} is not {total}")
        budget = limits.max_num_batched_tokens
        require(total <= budget, f"a step has at most max_num_batched_tokens ({budget}) tokens", f"{total} came")
        cap = limits.max_num_active_seqs or limits.max_num_seqs
        require(len(slots) <= cap, f"a step has at most {cap} rows", f"{len(slots)} came")
        require(bool((counts > 0).all()), "every row computes a token", "a row has none")
        require(len(np.unique(slots)) == len(slots), "a slot has one row in a step", "a slot has two")
        fits = bool(((slots >= 0) & (slots < len(self._generation))).all())
        owned = fits and bool((self._generation[slots] == step.generations).all())
        require(owned, "rows belong to the owners of their slots", f"step {step.step_id} has rows of others")
        self._advance(step)

    def _advance(self, step: SchedulerOutput) -> None:
        """Move on by the step's tokens; gaps, repetitions and missing blocks are faults."""
        slots, before = step.slots, self._computed[step.slots]
        continues = (before == step.num_computed_tokens) | (before < 0)
        rule = "a row goes on where it stood"
        require(bool(continues.all()), rule, f"step {step.step_id} skips or repeats tokens of a row")
        for update in step.new_blocks:
            require(int(update.counts.sum()) == len(update.ids), "block counts and ids agree", "they do not")
            self._check_blocks(update.ids)
        if step.new_blocks:
            self._capacity[slots] += np.min([update.counts for update in step.new_blocks], axis=0) * self._block_size
        end = step.num_computed_tokens.astype(np.int64) + step.num_scheduled_tokens
        require(bool((end <= self._capacity[slots]).all()), "every token has a block", "a row runs past its blocks")
        known = self._known[slots]
        require(bool((end <= known).all()), "only known tokens are computed", "a row runs past its tokens")
        right = bool((step.samples == (end == known)).all())
        require(right, "a row samples exactly at its last known token", f"step {step.step_id} has a row that does not")
        self._computed[slots] = end
        self._known[slots] = known + step.samples

    def _answer(self, step: SchedulerOutput) -> RunnerOutput:
        num_sampled = step.samples.astype(np.int32)
        slots = step.slots[step.samples]
        self.num_sampled += len(slots)
        if self.ending:
            tokens = np.full(len(slots), END_TOKEN, dtype=np.int32)
        else:
            mixed = slots.astype(np.int64) * 7_919 + step.step_id * 104_729
            tokens = (FIRST_SAMPLED + mixed % _SAMPLED_RANGE).astype(np.int32)
        return RunnerOutput(
            step_id=step.step_id,
            slots=step.slots,
            generations=step.generations,
            num_sampled=num_sampled,
            token_ids=tokens,
        )
