from __future__ import annotations

from typing import Any

import pytest
from prometheus_client.parser import text_string_to_metric_families

from hardpoint.interfaces.plugin import PluginContext
from hardpoint.interfaces.request import FinishReason, SchedulerStats
from hardpoint.interfaces.stat_logger import MetricsExporter, RequestFinished, StepObserved, TokensEmitted
from hardpoint.roles import ProcessRole
from hardpoint_observability.prometheus import PrometheusOptions, PrometheusStats, create

Labels = tuple[tuple[str, str], ...]


def values(stats: PrometheusStats) -> dict[tuple[str, Labels], float]:
    _, body = stats.exposition()
    families = text_string_to_metric_families(body.decode())
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in families
        for sample in family.samples
    }


def step(*, prompt: int = 0, generated: int = 0, model: str = "m", **counts: Any) -> StepObserved:
    return StepObserved(model, SchedulerStats(**counts), prompt, generated, 1, 0.0)


def finished(reason: FinishReason = FinishReason.STOP, **times: float | None) -> RequestFinished:
    figures: dict[str, float | None] = {"e2e_s": 3.0, "ttft_s": 1.0, "queue_s": 0.25, **times}
    return RequestFinished("id", "m", reason, 1, 0, 1, **figures)  # type: ignore[arg-type]


@pytest.fixture
def stats() -> PrometheusStats:
    return PrometheusStats(PrometheusOptions())


M: Labels = (("model", "m"),)


def test_it_is_an_exporter(stats: PrometheusStats) -> None:
    assert isinstance(stats, MetricsExporter)
    assert stats.exposition()[0].startswith("text/plain")


def test_gauges_follow_and_counters_add_up(stats: PrometheusStats) -> None:
    stats.on_step(step(prompt=7, generated=2, num_running=3, num_waiting=4, num_free_blocks=1, num_total_blocks=4))
    stats.on_step(step(prompt=1, generated=1, num_running=1, prefix_cache_queries=10, prefix_cache_hits=5))
    stats.on_step(step(num_running=1, prefix_cache_queries=12, prefix_cache_hits=6, num_preemptions=1))
    found = values(stats)
    assert found["hardpoint_num_requests_running", M] == 1
    assert found["hardpoint_num_requests_waiting", M] == 0
    assert found["hardpoint_kv_cache_usage_perc", M] == 0
    assert found["hardpoint_prompt_tokens_total", M] == 8
    assert found["hardpoint_generation_tokens_total", M] == 3
    assert found["hardpoint_prefix_cache_queries_total", M] == 12
    assert found["hardpoint_prefix_cache_hits_total", M] == 6
    assert found["hardpoint_num_preemptions_total", M] == 1


def test_the_cache_tells_how_it_does(stats: PrometheusStats) -> None:
    stats.on_step(step(num_waiting=3, num_skipped=2, num_cached_blocks=70, num_evictions=5))
    stats.on_step(step(num_waiting=3, num_skipped=1, num_cached_blocks=64, num_evictions=12, recent_prefix_queries=8))
    found = values(stats)
    assert found["hardpoint_num_requests_skipped", M] == 1
    assert found["hardpoint_kv_cache_num_prefixes", M] == 64
    assert found["hardpoint_kv_cache_evictions_total", M] == 12
    assert found["hardpoint_prefix_cache_recent_hit_rate", M] == 0
    stats.on_step(step(recent_prefix_queries=8, recent_prefix_hits=6))
    assert values(stats)["hardpoint_prefix_cache_recent_hit_rate", M] == 0.75


def test_counters_never_decrease_when_an_engine_restarts(stats: PrometheusStats) -> None:
    stats.on_step(step(prefix_cache_queries=10))
    stats.on_step(step(prefix_cache_queries=4))
    assert values(stats)["hardpoint_prefix_cache_queries_total", M] == 14


def test_latencies_go_to_their_histograms(stats: PrometheusStats) -> None:
    stats.on_tokens(TokensEmitted("m", (0.5, 0.7), (0.01, 0.02, 0.03)))
    stats.on_finished(finished())
    found = values(stats)
    assert found["hardpoint_time_to_first_token_seconds_count", M] == 2
    assert found["hardpoint_time_to_first_token_seconds_sum", M] == pytest.approx(1.2)
    assert found["hardpoint_inter_token_latency_seconds_count", M] == 3
    assert found["hardpoint_e2e_request_latency_seconds_sum", M] == 3.0
    assert found["hardpoint_request_queue_time_seconds_sum", M] == 0.25
    assert found["hardpoint_request_prefill_time_seconds_sum", M] == 0.75
    assert found["hardpoint_request_decode_time_seconds_sum", M] == 2.0


def test_phases_that_were_never_reached_are_not_counted(stats: PrometheusStats) -> None:
    stats.on_finished(finished(FinishReason.ABORT, ttft_s=None, queue_s=None))
    found = values(stats)
    assert ("hardpoint_request_queue_time_seconds_count", M) not in found
    assert ("hardpoint_request_decode_time_seconds_count", M) not in found
    assert found["hardpoint_request_success_total", (("model", "m"), ("reason", "abort"))] == 1


def test_labels_are_fixed(stats: PrometheusStats) -> None:
    """Class 42: whatever happens, only model and reason appear."""
    stats.on_step(step(model='odd"name\\with\n{model="x"}'))
    for reason in FinishReason:
        stats.on_finished(finished(reason))
    names = {name for _, labels in values(stats) for name, _ in labels if name not in ("le", "implementation")}
    assert names == {"model", "reason"}


def test_vllm_names_are_additional() -> None:
    stats = PrometheusStats(PrometheusOptions(vllm_names=True))
    tricky = 'hardpoint_ model="x" reason="y"'
    stats.on_step(step(num_running=2, model=tricky))
    stats.on_step(step(num_running=3))
    stats.on_finished(finished())
    found = values(stats)
    assert found["hardpoint_num_requests_running", M] == 3
    assert found["vllm:num_requests_running", (("model_name", "m"),)] == 3
    assert found["vllm:num_requests_running", (("model_name", tricky),)] == 2
    assert found["vllm:e2e_request_latency_seconds_count", (("model_name", "m"),)] == 1
    assert found["vllm:request_success_total", (("finished_reason", "stop"), ("model_name", "m"))] == 1


def test_the_process_is_measured_and_not_renamed() -> None:
    _, body = PrometheusStats(PrometheusOptions(vllm_names=True)).exposition()
    assert body.count(b"\nprocess_resident_memory_bytes ") == 1


def test_two_loggers_do_not_share_a_registry() -> None:
    one, two = PrometheusStats(PrometheusOptions()), PrometheusStats(PrometheusOptions())
    one.on_step(step(prompt=5))
    assert ("hardpoint_prompt_tokens_total", M) not in values(two)
    two.flush()


def test_the_factory() -> None:
    context = PluginContext("prometheus", 1, frozenset({ProcessRole.API}))
    assert isinstance(create(context, PrometheusOptions()), PrometheusStats)
