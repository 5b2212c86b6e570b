"""Plugin kind ``stat_logger``: sinks for what the front end observes. Typed events, merged per process."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from hardpoint.interfaces.request import FinishReason, SchedulerStats


@dataclass(frozen=True, slots=True)
class RequestFinished:
    """Figures of one ended request. Times are seconds; ``None`` where the phase was never reached.

    ``ttft_s``: arrival to first token; ``queue_s``: arrival to first scheduling; ``e2e_s``: arrival to end.
    """

    request_id: str
    model: str
    reason: FinishReason
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generated_tokens: int
    e2e_s: float
    ttft_s: float | None = None
    queue_s: float | None = None
    inter_token_s: float | None = None


@dataclass(frozen=True, slots=True)
class StepObserved:
    """One engine frame as seen by the front end."""

    model: str
    stats: SchedulerStats
    num_prompt_tokens: int
    num_generated_tokens: int
    num_requests: int
    timestamp: float


@dataclass(frozen=True, slots=True)
class TokensEmitted:
    """Latency samples of one frame: first-token and inter-token intervals in seconds."""

    model: str
    ttft_s: tuple[float, ...]
    inter_token_s: tuple[float, ...]


class StatLogger(ABC):
    """Called from the front end's event loop: must not block. An exception quarantines the logger, never a request."""

    def on_step(self, event: StepObserved) -> None:
        """Once per engine frame."""

    def on_tokens(self, event: TokensEmitted) -> None:
        """Once per frame that produced tokens."""

    def on_finished(self, event: RequestFinished) -> None:
        """Once per ended request."""

    @abstractmethod
    def flush(self) -> None:
        """Write out whatever is pending; called every ``interval_s`` and at shutdown."""

    interval_s: float = 10.0


@runtime_checkable
class MetricsExporter(Protocol):
    """A stat logger that can be scraped."""

    def exposition(self) -> tuple[str, bytes]:
        """Content type and body in the Prometheus text format."""
