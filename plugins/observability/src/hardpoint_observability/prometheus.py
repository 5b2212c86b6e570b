"""The stat logger ``prometheus``: counters, gauges and histograms, scraped through the ``/metrics`` route.

Labels are the served model's name and, for ended requests, one of the fixed reasons: nothing a client sends becomes a
label (class 42).
"""

from __future__ import annotations

import re

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from pydantic import BaseModel, ConfigDict, Field

from hardpoint.interfaces.plugin import PluginContext, plugin
from hardpoint.interfaces.request import SchedulerStats
from hardpoint.interfaces.stat_logger import RequestFinished, StatLogger, StepObserved, TokensEmitted

__all__ = ["PrometheusOptions", "PrometheusStats", "create"]

_PREFIX = "hardpoint_"
_FAST_S = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 0.75, 1.0, 2.5, 5.0)
_FIRST_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0, 20.0, 40.0, 80.0)
_REQUEST_S = (0.05, 0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10.0, 15.0, 20.0, 30.0, 60.0, 120.0, 240.0, 480.0)
_NAME = re.compile(rb"^((?:# (?:HELP|TYPE) )?)hardpoint_", re.MULTILINE)
_MODEL = re.compile(rb'^(vllm:\w+\{[^"]*?)\bmodel="', re.MULTILINE)
_REASON = re.compile(rb'^(vllm:request_success\w*\{.*)\breason="', re.MULTILINE)


class PrometheusOptions(BaseModel):
    """Options under ``plugins.stat_logger.prometheus``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    vllm_names: bool = Field(default=False, description="also expose everything under the names vLLM dashboards use")


class PrometheusStats(StatLogger):
    """A registry of its own, so that nothing else in the process shows up and tests can hold several."""

    def __init__(self, options: PrometheusOptions) -> None:
        self._options = options
        self._registry = CollectorRegistry()
        self._process = CollectorRegistry()
        ProcessCollector(registry=self._process)
        self._seen: dict[str, SchedulerStats] = {}
        gauge, counter, histogram = self._gauge, self._counter, self._histogram
        self._running = gauge("num_requests_running", "Requests being computed.")
        self._waiting = gauge("num_requests_waiting", "Requests waiting to be computed.")
        self._skipped = gauge("num_requests_skipped", "Of those waiting, held back by what they depend on.")
        self._usage = gauge("kv_cache_usage_perc", "Used fraction of the KV cache; 1 is full.")
        self._queries = counter("prefix_cache_queries", "Prompt tokens looked up in the prefix cache.")
        self._hits = counter("prefix_cache_hits", "Prompt tokens found in the prefix cache.")
        self._hit_rate = gauge("prefix_cache_recent_hit_rate", "Found fraction of recent prompt tokens, 0 to 1.")
        self._cached = gauge("kv_cache_num_prefixes", "Distinct block prefixes that can be found.")
        self._evictions = counter("kv_cache_evictions", "Cached KV blocks that were reused for other content.")
        self._preemptions = counter("num_preemptions", "Requests put back to waiting for lack of KV blocks.")
        self._prompt = counter("prompt_tokens", "Prompt tokens processed.")
        self._generated = counter("generation_tokens", "Tokens generated.")
        self._success = counter("request_success", "Ended requests by reason.", "reason")
        self._ttft = histogram("time_to_first_token_seconds", "Arrival to first token.", _FIRST_S)
        self._itl = histogram("inter_token_latency_seconds", "Time between tokens of a sequence.", _FAST_S)
        self._e2e = histogram("e2e_request_latency_seconds", "Arrival to end.", _REQUEST_S)
        self._queue = histogram("request_queue_time_seconds", "Arrival to first scheduling.", _REQUEST_S)
        self._prefill = histogram("request_prefill_time_seconds", "First scheduling to first token.", _REQUEST_S)
        self._decode = histogram("request_decode_time_seconds", "First token to end.", _REQUEST_S)

    def _gauge(self, name: str, text: str) -> Gauge:
        return Gauge(_PREFIX + name, text, ["model"], registry=self._registry)

    def _counter(self, name: str, text: str, *labels: str) -> Counter:
        return Counter(_PREFIX + name, text, ["model", *labels], registry=self._registry)

    def _histogram(self, name: str, text: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(_PREFIX + name, text, ["model"], buckets=buckets, registry=self._registry)

    def on_step(self, event: StepObserved) -> None:
        model, stats = event.model, event.stats
        before = self._seen.get(model, SchedulerStats())
        self._seen[model] = stats
        self._running.labels(model).set(stats.num_running)
        self._waiting.labels(model).set(stats.num_waiting)
        self._skipped.labels(model).set(stats.num_skipped)
        self._usage.labels(model).set(stats.kv_cache_usage)
        self._hit_rate.labels(model).set(stats.recent_prefix_hits / max(stats.recent_prefix_queries, 1))
        self._cached.labels(model).set(stats.num_cached_blocks)
        self._evictions.labels(model).inc(_increase(before.num_evictions, stats.num_evictions))
        self._queries.labels(model).inc(_increase(before.prefix_cache_queries, stats.prefix_cache_queries))
        self._hits.labels(model).inc(_increase(before.prefix_cache_hits, stats.prefix_cache_hits))
        self._preemptions.labels(model).inc(_increase(before.num_preemptions, stats.num_preemptions))
        self._prompt.labels(model).inc(event.num_prompt_tokens)
        self._generated.labels(model).inc(event.num_generated_tokens)

    def on_tokens(self, event: TokensEmitted) -> None:
        first, between = self._ttft.labels(event.model), self._itl.labels(event.model)
        for seconds in event.ttft_s:
            first.observe(seconds)
        for seconds in event.inter_token_s:
            between.observe(seconds)

    def on_finished(self, event: RequestFinished) -> None:
        model = event.model
        self._success.labels(model, str(event.reason)).inc()
        self._e2e.labels(model).observe(event.e2e_s)
        if event.queue_s is not None:
            self._queue.labels(model).observe(event.queue_s)
        if event.ttft_s is not None:
            self._prefill.labels(model).observe(max(event.ttft_s - (event.queue_s or 0.0), 0.0))
            self._decode.labels(model).observe(max(event.e2e_s - event.ttft_s, 0.0))

    def flush(self) -> None:
        """Nothing is pending: values are read when scraped."""

    def exposition(self) -> tuple[str, bytes]:
        """Content type and body in the Prometheus text format."""
        ours = generate_latest(self._registry)
        parts = [ours, generate_latest(self._process)]
        if self._options.vllm_names:
            parts.append(_with_vllm_names(ours))
        return CONTENT_TYPE_LATEST, b"".join(parts)


def _increase(before: int, now: int) -> int:
    """How far a counter went; a restarted engine counts from zero again."""
    return now - before if now >= before else now


def _with_vllm_names(body: bytes) -> bytes:
    renamed = _NAME.sub(rb"\1vllm:", body)
    renamed = _MODEL.sub(rb'\1model_name="', renamed)
    return _REASON.sub(rb'\1finished_reason="', renamed)


@plugin("stat_logger", options=PrometheusOptions)
def create(ctx: PluginContext, options: PrometheusOptions) -> PrometheusStats:
    del ctx
    return PrometheusStats(options)
