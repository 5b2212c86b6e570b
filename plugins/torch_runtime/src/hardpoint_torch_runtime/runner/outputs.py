"""From sampled rows in batch order to the step's result in the step's order."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hardpoint.interfaces.step import LogprobArrays, RowFailure, RunnerOutput, SchedulerOutput, TokenUpdate
from hardpoint_torch_runtime.runner.samples import StepSamples

__all__ = ["assemble_output"]


def assemble_output(
    step: SchedulerOutput,
    *,
    sampled_rows: np.ndarray,
    samples: StepSamples,
    failures: Mapping[int, str],
    prompt_logprobs: LogprobArrays | None = None,
    pooled: Mapping[int, np.ndarray] | None = None,
    extensions: Mapping[str, Any] | None = None,
) -> RunnerOutput:
    """``sampled_rows`` int [S] are the step rows of the ``samples``; ``failures`` by step row.

    A failed row yields no token. Rows that do not sample come back empty (R4.73).
    """
    is_ascending = len(sampled_rows) < 2 or bool((sampled_rows[1:] > sampled_rows[:-1]).all())
    if is_ascending and not failures and len(sampled_rows) == step.num_rows:
        num_sampled = samples.counts
    else:
        num_sampled = np.zeros(step.num_rows, dtype=np.int32)
        num_sampled[sampled_rows] = samples.counts
        if failures:
            num_sampled[list(failures)] = 0
    return RunnerOutput(
        step_id=step.step_id,
        slots=step.slots,
        generations=step.generations,
        num_sampled=num_sampled,
        token_ids=(
            samples.token_ids
            if is_ascending and not failures
            else _in_order(samples, sampled_rows, num_sampled if failures else None)
        ),
        logprobs=_logprobs(samples.logprobs, sampled_rows, num_sampled),
        prompt_logprobs=prompt_logprobs,
        failures=_failures(step, failures) if failures else (),
        pooled=dict(pooled or {}),
        drafts=_drafts(samples.drafts, sampled_rows, num_sampled),
        extensions=dict(extensions or {}),
    )


def _failures(step: SchedulerOutput, failures: Mapping[int, str]) -> tuple[RowFailure, ...]:
    return tuple(
        RowFailure(int(step.slots[row]), int(step.generations[row]), reason) for row, reason in sorted(failures.items())
    )


def _in_order(samples: StepSamples, sampled_rows: np.ndarray, num_sampled: np.ndarray | None) -> np.ndarray:
    """int32, tokens in the order of the step's rows; without those whose ``num_sampled`` is 0, if that is given."""
    is_plain = len(samples.token_ids) == len(samples.counts)
    order = np.argsort(sampled_rows, kind="stable")
    if num_sampled is not None:
        order = order[num_sampled[sampled_rows[order]] > 0]
    if is_plain:
        return samples.token_ids[order]
    counts = samples.counts[order]
    first = (np.cumsum(samples.counts) - samples.counts)[order]
    places = np.arange(int(counts.sum())) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return samples.token_ids[places]


def _logprobs(
    logprobs: LogprobArrays | None, sampled_rows: np.ndarray, num_sampled: np.ndarray
) -> LogprobArrays | None:
    if logprobs is None:
        return None
    rows = sampled_rows[logprobs.rows]
    keep = num_sampled[rows] > 0
    by_row = np.flatnonzero(keep)[np.argsort(rows[keep], kind="stable")]
    return LogprobArrays(
        rows[by_row].astype(np.int32), logprobs.token_ids[by_row], logprobs.logprobs[by_row], logprobs.ranks[by_row]
    )


def _drafts(guesses: np.ndarray | None, sampled_rows: np.ndarray, num_sampled: np.ndarray) -> TokenUpdate | None:
    """Of each row the guesses before the first missing one."""
    if guesses is None:
        return None
    of_row = np.full((len(num_sampled), guesses.shape[1]), -1, dtype=np.int32)
    of_row[sampled_rows] = guesses
    of_row[num_sampled == 0] = -1
    is_there = np.logical_and.accumulate(of_row >= 0, axis=1)
    return TokenUpdate(is_there.sum(axis=1).astype(np.int32), of_row[is_there])
