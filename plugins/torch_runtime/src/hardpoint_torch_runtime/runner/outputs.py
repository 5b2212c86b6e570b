"""From sampled rows in batch order to the step's result in the step's order."""

from __future__ import annotations

import numpy as np

from hardpoint.interfaces.step import LogprobArrays, RowFailure, RunnerOutput, SchedulerOutput

__all__ = ["assemble_output", "empty_output"]


def empty_output(step: SchedulerOutput) -> RunnerOutput:
    """The result of a step that computes nothing."""
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=np.zeros(step.num_rows, dtype=np.int32),
        token_ids=np.zeros(0, dtype=np.int32),
    )


def assemble_output(
    step: SchedulerOutput,
    *,
    sampled_rows: np.ndarray,
    token_ids: np.ndarray,
    failures: dict[int, str],
    logprobs: LogprobArrays | None = None,
    prompt_logprobs: LogprobArrays | None = None,
) -> RunnerOutput:
    """``sampled_rows`` int [S] are step rows, ``token_ids`` int32 [S] their tokens; ``failures`` by step row.

    A failed row yields no token. ``logprobs.rows`` index ``sampled_rows``.
    """
    num_sampled = np.zeros(step.num_rows, dtype=np.int32)
    num_sampled[sampled_rows] = 1
    num_sampled[list(failures)] = 0
    kept = num_sampled[sampled_rows] == 1
    order = np.argsort(sampled_rows[kept], kind="stable")
    if logprobs is not None:
        rows = sampled_rows[logprobs.rows]
        keep = num_sampled[rows] == 1
        by_row = np.flatnonzero(keep)[np.argsort(rows[keep], kind="stable")]
        logprobs = LogprobArrays(
            rows[by_row].astype(np.int32), logprobs.token_ids[by_row], logprobs.logprobs[by_row], logprobs.ranks[by_row]
        )
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=num_sampled,
        token_ids=token_ids[kept][order].astype(np.int32),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        failures=tuple(
            RowFailure(int(step.slots[row]), int(step.generations[row]), reason)
            for row, reason in sorted(failures.items())
        ),
    )
