"""The stat logger ``log``: one line of throughput per interval and model, and none while nothing happens."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

from hardpoint.interfaces.plugin import NoOptions, PluginContext, plugin
from hardpoint.interfaces.request import SchedulerStats
from hardpoint.interfaces.stat_logger import RequestFinished, StatLogger, StepObserved

__all__ = ["LogStats", "create"]


@dataclass(slots=True)
class _Interval:
    """One model's figures since the last line. ``queries`` and ``hits`` are the counters' values at its begin."""

    stats: SchedulerStats
    queries: int
    hits: int
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_finished: int = 0
    has_news: bool = False


class LogStats(StatLogger):
    """Writes to ``logger`` at INFO. ``clock`` counts seconds; the interval is the server's (``--log-interval-s``)."""

    def __init__(self, logger: logging.Logger, clock: Callable[[], float] = time.monotonic) -> None:
        self._logger = logger
        self._clock = clock
        self._since = clock()
        self._models: dict[str, _Interval] = {}

    def on_step(self, event: StepObserved) -> None:
        interval = self._models.get(event.model)
        if interval is None:
            interval = self._models[event.model] = _Interval(event.stats, 0, 0)
        interval.stats = event.stats
        interval.num_prompt_tokens += event.num_prompt_tokens
        interval.num_generated_tokens += event.num_generated_tokens
        # Statistics come while nothing happens too, such as right after the start.
        if event.num_requests or event.num_prompt_tokens or event.num_generated_tokens:
            interval.has_news = True

    def on_finished(self, event: RequestFinished) -> None:
        interval = self._models.get(event.model)
        if interval is not None:
            interval.num_finished += 1
            interval.has_news = True

    def flush(self) -> None:
        now = self._clock()
        elapsed, self._since = max(now - self._since, 1e-9), now
        for model, interval in self._models.items():
            if interval.has_news:
                self._logger.info("%s: %s", model, _line(interval, elapsed))
            stats = interval.stats
            self._models[model] = _Interval(stats, stats.prefix_cache_queries, stats.prefix_cache_hits)


def _line(interval: _Interval, elapsed_s: float) -> str:
    stats = interval.stats
    # A restarted engine counts from zero again.
    queries = max(stats.prefix_cache_queries - interval.queries, 0)
    hits = max(stats.prefix_cache_hits - interval.hits, 0)
    parts = [
        f"{stats.num_running} running, {stats.num_waiting} waiting, {interval.num_finished} finished",
        f"prompt {interval.num_prompt_tokens / elapsed_s:.1f} tok/s",
        f"generation {interval.num_generated_tokens / elapsed_s:.1f} tok/s",
        f"KV cache {100 * stats.kv_cache_usage:.1f} %",
    ]
    if queries:
        parts.append(f"prefix hits {100 * hits / queries:.1f} %")
    return ", ".join(parts)


@plugin("stat_logger")
def create(ctx: PluginContext, options: NoOptions) -> LogStats:
    del options
    return LogStats(ctx.logger)
