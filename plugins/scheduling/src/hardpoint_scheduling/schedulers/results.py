"""What a worker's output must be like, and which of its rows have how many tokens."""

from __future__ import annotations

import numpy as np

from hardpoint.interfaces import BoolArray, Int32Array, RunnerOutput, SchedulerOutput, TokenUpdate
from hardpoint_scheduling.schedulers.slots import NO_TOKEN


def check_output(step: SchedulerOutput, output: RunnerOutput, alive: BoolArray) -> None:
    """Raise ``RuntimeError`` for an output that cannot be right.

    A live row without the sample it owes would never be scheduled again, so it must not pass unnoticed.
    """
    sampled = output.num_sampled
    if step.drafts is not None or not bool((sampled == step.samples).all()):
        _check_counts(step, sampled, alive)
    if len(output.token_ids) != int(sampled.sum()):
        raise RuntimeError(f"step {step.step_id}: {len(output.token_ids)} token ids for {int(sampled.sum())} samples")
    if len(output.token_ids) and int(output.token_ids.min()) <= NO_TOKEN:
        raise RuntimeError(f"step {step.step_id}: token id {int(output.token_ids.min())} is negative")
    if output.drafts is not None:
        _check_drafts(step, output.drafts)


def _check_counts(step: SchedulerOutput, sampled: Int32Array, alive: BoolArray) -> None:
    most = step.samples if step.drafts is None else step.samples + step.drafts.counts
    wrong = (sampled > most) | (alive & (sampled < step.samples))
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        expected = f"{int(step.samples[row])} to {int(most[row])}" if most[row] > 1 else f"{int(most[row])}"
        raise RuntimeError(
            f"step {step.step_id}, slot {int(step.slots[row])}: {int(sampled[row])} tokens sampled, "
            f"{expected} expected; a row that cannot be computed must be reported as a failure"
        )


def _check_drafts(step: SchedulerOutput, drafts: TokenUpdate) -> None:
    if len(drafts.counts) != step.num_rows or len(drafts.ids) != int(drafts.counts.sum()):
        raise RuntimeError(
            f"step {step.step_id}: {len(drafts.ids)} drafts and {len(drafts.counts)} counts of them for "
            f"{step.num_rows} rows"
        )


def check_pooled(step: SchedulerOutput, output: RunnerOutput, due: BoolArray, pools: BoolArray) -> None:
    """Raise ``RuntimeError`` where a row that is ``due`` has no pooled result, or one has it that does not pool."""
    has_result = np.zeros(step.num_rows, dtype=np.bool_)
    has_result[list(output.pooled)] = True
    wrong = (due & ~has_result) | (has_result & ~pools)
    if wrong.any():
        row = int(np.flatnonzero(wrong)[0])
        fault = "no pooled result, although its prompt is computed" if due[row] else "a pooled result that nobody wants"
        raise RuntimeError(
            f"step {step.step_id}, slot {int(step.slots[row])}: {fault}; report a row that cannot be computed as failed"
        )


def sampled_rows(num_sampled: Int32Array) -> tuple[Int32Array, Int32Array]:
    """Rows with one token, and rows with several."""
    if num_sampled.max(initial=0) <= 1:
        return num_sampled.nonzero()[0].astype(np.int32), _NONE
    return np.flatnonzero(num_sampled == 1).astype(np.int32), np.flatnonzero(num_sampled > 1).astype(np.int32)


_NONE: Int32Array = np.zeros(0, dtype=np.int32)
