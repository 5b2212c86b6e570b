"""What a step's rows have sampled, once the host knows it. Legend: S rows that sample, in batch order."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import LogprobArrays
from hardpoint_torch_runtime.runner.draft_verification import DraftLayout
from hardpoint_torch_runtime.sampling.sampler import SamplerOutput

__all__ = ["StepSamples"]


@dataclass(frozen=True, slots=True)
class StepSamples:
    """Attributes:
    counts: int32 [S], tokens per row, also of failed ones, whose tokens mean nothing.
    token_ids: int32 [sum(counts)], row after row.
    failures: reasons by row.
    logprobs: of the tokens; its ``rows`` index the S rows.
    drafts: int32 [S, K], the worker's guesses at what follows, -1 where there are none; None without a proposer.
    """

    counts: Int32Array
    token_ids: Int32Array
    failures: dict[int, str]
    logprobs: LogprobArrays | None = None
    drafts: np.ndarray | None = None

    @property
    def failed(self) -> BoolArray:
        """bool [S]."""
        marks = np.zeros(len(self.counts), dtype=np.bool_)
        marks[list(self.failures)] = True
        return marks

    @property
    def filled_token_ids(self) -> Int32Array:
        """``token_ids`` with 0 in the places of failed rows."""
        if not self.failures:
            return self.token_ids
        return np.where(np.repeat(self.failed, self.counts), np.int32(0), self.token_ids)

    def of_rows(self, wanted: BoolArray) -> StepSamples:
        """Only the rows marked in ``wanted`` bool [S]; log-probabilities are left out."""
        if wanted.all():
            return self
        number = np.cumsum(wanted) - 1
        failures = {int(number[row]): reason for row, reason in self.failures.items() if bool(wanted[row])}
        return StepSamples(
            self.counts[wanted],
            self.token_ids[np.repeat(wanted, self.counts)],
            failures,
            drafts=None if self.drafts is None else self.drafts[wanted],
        )

    @classmethod
    def of(
        cls,
        result: SamplerOutput,
        layout: DraftLayout | None = None,
        counts: Int32Array | None = None,
        drafts: np.ndarray | None = None,
    ) -> StepSamples:
        """From one token per row or, with a ``layout``, per place, of which each row's first ``counts`` are tokens."""
        if layout is None or counts is None:
            ones = np.ones(len(result.token_ids), dtype=np.int32)
            return cls(ones, result.token_ids, result.failures, result.logprobs, drafts)
        counted = layout.counted(counts)
        failures = {
            int(layout.rows[place]): reason for place, reason in result.failures.items() if bool(counted[place])
        }
        logprobs = result.logprobs
        if logprobs is not None:
            kept = counted[logprobs.rows]
            logprobs = LogprobArrays(
                layout.rows[logprobs.rows[kept]].astype(np.int32),
                logprobs.token_ids[kept],
                logprobs.logprobs[kept],
                logprobs.ranks[kept],
            )
        return cls(counts, result.token_ids[counted], failures, logprobs, drafts)
