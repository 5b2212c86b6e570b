"""What came of a replay, in memory that does not grow with it."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any

from hardpoint.interfaces import SchedulerStats
from hardpoint_bench.tallies import Grouped, Histogram, Timeline

__all__ = ["SERIES", "GroupOutcome", "Outcome"]

SERIES = ("waiting", "running", "blocks_in_use")


@dataclass(slots=True)
class GroupOutcome:
    """Requests of one tenant or priority. ``ttft`` and ``latency`` in simulated seconds."""

    requests: int = 0
    tokens: int = 0
    ttft: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)

    def report(self) -> dict[str, Any]:
        return {
            "completed": self.requests,
            "output_tokens": self.tokens,
            "ttft_ms": self.ttft.summary(1e3),
            "latency_ms": self.latency.summary(1e3),
        }


@dataclass(slots=True)
class Outcome:
    """Counts of requests, and histograms of seconds: simulated ones, but for ``step``, the scheduler's own time.

    ``refused`` never fit, ``rejected`` met a full queue, ``truncated`` reached the model's or the pool's length,
    ``failed`` ended for another reason, of which ``last_failure`` is the latest.
    """

    requests: int = 0
    completed: int = 0
    truncated: int = 0
    refused: int = 0
    rejected: int = 0
    failed: int = 0
    last_failure: str = ""
    tokens: int = 0
    steps: int = 0
    rows: int = 0
    blocks_leaked: int = 0
    preemptions: int = 0
    prefix_queries: int = 0
    prefix_hits: int = 0
    simulated_s: float = 0.0
    wall_s: float = 0.0
    step: Histogram = field(default_factory=Histogram)
    queue: Histogram = field(default_factory=Histogram)
    ttft: Histogram = field(default_factory=Histogram)
    tpot: Histogram = field(default_factory=Histogram)
    latency: Histogram = field(default_factory=Histogram)
    timeline: Timeline = field(default_factory=lambda: Timeline(SERIES))
    tenants: Grouped[GroupOutcome] = field(default_factory=lambda: Grouped(GroupOutcome))
    priorities: Grouped[GroupOutcome] = field(default_factory=lambda: Grouped(GroupOutcome))
    _started: float = field(default_factory=perf_counter)

    def observe(self, now: float, stats: SchedulerStats, num_blocks: int) -> None:
        """Before and after each step. ``num_blocks``: those that were free at the start."""
        self.timeline.add(now, (stats.num_waiting, stats.num_running, num_blocks - stats.num_free_blocks))

    def record(self, arrival: float, first: float, end: float, tokens: int, tenant: str, priority: int) -> None:
        """A request that got its tokens; times in simulated seconds."""
        self.ttft.add(first - arrival)
        self.latency.add(end - arrival)
        if tokens > 1:
            self.tpot.add((end - first) / (tokens - 1))
        for group in (self.tenants.of(tenant), self.priorities.of(str(priority))):
            group.requests += 1
            group.tokens += tokens
            group.ttft.add(first - arrival)
            group.latency.add(end - arrival)

    def close(self, now: float, stats: SchedulerStats) -> None:
        self.simulated_s = now
        self.wall_s = perf_counter() - self._started
        self.preemptions = stats.num_preemptions
        self.prefix_queries = stats.prefix_cache_queries
        self.prefix_hits = stats.prefix_cache_hits

    def report(self) -> dict[str, Any]:
        """Times in milliseconds, of the scheduler's own steps in microseconds; plain data for JSON."""
        rate = 1 / self.simulated_s if self.simulated_s else 0.0
        rows = self.rows / self.steps if self.steps else 0.0
        peaks = {f"{name}_max": int(max(self.timeline.peaks(name), default=0.0)) for name in SERIES}
        document: dict[str, Any] = {
            "step_us_median": round(self.step.quantile(0.5) * 1e6, 2),
            "step_us_p99": round(self.step.quantile(0.99) * 1e6, 2),
            "us_per_running_request": round(self.step.mean * 1e6 / rows, 3) if rows else 0.0,
            "prefix_hit_rate": round(self.prefix_hits / self.prefix_queries, 4) if self.prefix_queries else 0.0,
            "preemptions": self.preemptions,
            "blocks_leaked": self.blocks_leaked,
            **{
                name: getattr(self, name)
                for name in ("requests", "completed", "truncated", "refused", "rejected", "failed", "tokens", "steps")
            },
            "simulated_s": round(self.simulated_s, 3),
            "wall_s": round(self.wall_s, 3),
            "requests_per_s": round((self.completed + self.truncated) * rate, 3),
            "output_tokens_per_s": round(self.tokens * rate, 1),
            "ttft_ms": self.ttft.summary(1e3),
            "tpot_ms": self.tpot.summary(1e3),
            "queue_ms": self.queue.summary(1e3),
            "latency_ms": self.latency.summary(1e3),
            **peaks,
        }
        for key, groups in (("tenants", self.tenants), ("priorities", self.priorities)):
            if len(groups.by_name) > 1:
                document[key] = {name: group.report() for name, group in sorted(groups.by_name.items())}
        if self.last_failure:
            document["last_failure"] = self.last_failure
        return document
