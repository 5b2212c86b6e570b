"""What a comparison with an oracle found, as records: by mode the largest error, the limit, and tokens that differ."""

from __future__ import annotations

import enum
import math
from collections.abc import Mapping
from dataclasses import dataclass

__all__ = ["MAX_RELATIVE_ERROR", "ModeResult", "ParityReport", "Verdict"]

MAX_RELATIVE_ERROR = 1e-4
"""Limit of errors in float32, relative to the largest logit."""


class Verdict(enum.StrEnum):
    OK = "ok"
    OVER = "over limit"
    NOT_RUN = "not run"


@dataclass(frozen=True, slots=True)
class ModeResult:
    """One way of computing the same tokens.

    Attributes:
        error: largest deviation of a logit over the largest expected logit; None where the mode was not run.
        num_positions: positions whose logits were compared.
        num_differences: greedy tokens that differ and that no near-tie of the oracle excuses.
        note: why the mode was not run, or what is special about it.
    """

    mode: str
    error: float | None = None
    limit: float = MAX_RELATIVE_ERROR
    num_positions: int = 0
    num_differences: int = 0
    note: str = ""

    @property
    def verdict(self) -> Verdict:
        """An error that is not a number is over every limit."""
        if self.error is None:
            return Verdict.NOT_RUN
        return Verdict.OK if self.error <= self.limit and not self.num_differences else Verdict.OVER

    @property
    def magnitude(self) -> int | None:
        """Smallest power of ten that is no less than the error; None without a finite error above 0."""
        if self.error is None or not math.isfinite(self.error) or self.error <= 0:
            return None
        return math.ceil(math.log10(self.error))

    def __str__(self) -> str:
        if self.error is None:
            return f"{self.mode}: not run ({self.note})"
        tokens = f", {self.num_differences} greedy tokens differ" if self.num_differences else ""
        return f"{self.mode}: {self.verdict}, error {self.error:.1e} of {self.limit:.0e}{tokens}"


@dataclass(frozen=True, slots=True)
class ParityReport:
    """All modes of one model. ``name`` tells the configurations of an architecture apart."""

    architecture: str
    name: str
    results: tuple[ModeResult, ...]

    @property
    def by_mode(self) -> Mapping[str, ModeResult]:
        return {result.mode: result for result in self.results}

    @property
    def faults(self) -> tuple[ModeResult, ...]:
        """Results over their limit."""
        return tuple(result for result in self.results if result.verdict is Verdict.OVER)

    @property
    def is_ok(self) -> bool:
        """Whether something was run and nothing is over its limit."""
        return not self.faults and any(result.verdict is Verdict.OK for result in self.results)

    def require_ok(self) -> None:
        """Raise ``AssertionError`` naming the architecture and each mode over its limit, or that none was run."""
        if not self.is_ok:
            what = "; ".join(map(str, self.faults)) or "no mode was run"
            raise AssertionError(f"{self.architecture} ({self.name}) differs from its oracle: {what}")

    def __str__(self) -> str:
        return "\n".join((f"{self.architecture} ({self.name})", *(f"  {result}" for result in self.results)))
