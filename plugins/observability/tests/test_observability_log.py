from __future__ import annotations

import logging
import re
from typing import Any

import pytest

from hardpoint.interfaces.plugin import NoOptions, PluginContext
from hardpoint.interfaces.request import FinishReason, SchedulerStats
from hardpoint.interfaces.stat_logger import RequestFinished, StepObserved
from hardpoint.roles import ProcessRole
from hardpoint_observability.log import LogStats, create


class Clock:
    now = 100.0

    def __call__(self) -> float:
        return self.now


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def stats(clock: Clock, caplog: pytest.LogCaptureFixture) -> LogStats:
    caplog.set_level(logging.INFO, "test.stats")
    return LogStats(logging.getLogger("test.stats"), clock)


def step(model: str = "m", *, prompt: int = 0, generated: int = 0, **counts: Any) -> StepObserved:
    return StepObserved(model, SchedulerStats(**counts), prompt, generated, 1, 0.0)


def finished(model: str = "m") -> RequestFinished:
    return RequestFinished("id", model, FinishReason.STOP, 1, 0, 1, 0.5)


def lines(caplog: pytest.LogCaptureFixture) -> list[str]:
    found = [record.getMessage() for record in caplog.records]
    caplog.clear()
    return found


def test_rates_are_those_of_the_interval(stats: LogStats, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stats.on_step(step(prompt=50, generated=10, num_running=2, num_waiting=1, num_free_blocks=75, num_total_blocks=100))
    stats.on_step(step(generated=10, num_running=3, num_free_blocks=50, num_total_blocks=100))
    stats.on_finished(finished())
    clock.now += 10
    stats.flush()
    assert lines(caplog) == [
        "m: 3 running, 0 waiting, 1 finished, prompt 5.0 tok/s, generation 2.0 tok/s, KV cache 50.0 %"
    ]


def test_silence_while_idle(stats: LogStats, clock: Clock, caplog: pytest.LogCaptureFixture) -> None:
    stats.flush()
    assert lines(caplog) == []
    stats.on_step(step(generated=1))
    stats.flush()
    assert len(lines(caplog)) == 1
    for _ in range(3):
        clock.now += 10
        stats.flush()
    assert lines(caplog) == []


def test_hit_rate_is_the_intervals_own(stats: LogStats, caplog: pytest.LogCaptureFixture) -> None:
    stats.on_step(step(prefix_cache_queries=100, prefix_cache_hits=0))
    stats.flush()
    stats.on_step(step(prefix_cache_queries=200, prefix_cache_hits=50))
    stats.flush()
    stats.on_step(step(prefix_cache_queries=200, prefix_cache_hits=50))
    stats.flush()
    first, second, third = lines(caplog)
    assert "prefix hits 0.0 %" in first
    assert "prefix hits 50.0 %" in second
    assert "prefix" not in third


def test_a_restarted_engine_does_not_make_negative_rates(stats: LogStats, caplog: pytest.LogCaptureFixture) -> None:
    stats.on_step(step(prefix_cache_queries=100, prefix_cache_hits=90))
    stats.flush()
    stats.on_step(step(prefix_cache_queries=3, prefix_cache_hits=1))
    stats.flush()
    assert "-" not in re.sub(r"^m: ", "", lines(caplog)[-1])


def test_each_model_has_its_line(stats: LogStats, caplog: pytest.LogCaptureFixture) -> None:
    stats.on_step(step("a", generated=1))
    stats.on_step(step("b", generated=1))
    stats.flush()
    assert [line.partition(":")[0] for line in lines(caplog)] == ["a", "b"]


def test_flushing_twice_at_once_does_not_divide_by_zero(stats: LogStats) -> None:
    stats.on_step(step(generated=1))
    stats.flush()
    stats.on_step(step(generated=1))
    stats.flush()


def test_an_end_before_any_step_is_no_error(stats: LogStats) -> None:
    stats.on_finished(finished())
    stats.flush()


def test_the_factory_writes_to_the_plugins_own_logger(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "test.plugin")
    context = PluginContext("log", 1, frozenset({ProcessRole.API}), logger=logging.getLogger("test.plugin"))
    made = create(context, NoOptions())
    made.on_step(step(generated=1))
    made.flush()
    assert caplog.records[0].name == "test.plugin"
