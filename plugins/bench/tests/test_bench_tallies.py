"""Histograms and time series against everything kept in lists."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hardpoint_bench.faults import SchedulerFault
from hardpoint_bench.tallies import Grouped, Histogram, Timeline

SECONDS = st.floats(min_value=1e-6, max_value=1e6)


@given(st.lists(SECONDS, min_size=1, max_size=60), st.floats(min_value=0.01, max_value=1.0))
def test_quantiles_are_within_a_percent(values: list[float], fraction: float) -> None:
    histogram = Histogram()
    for value in values:
        histogram.add(value)
    exact = sorted(values)[math.ceil(fraction * len(values)) - 1]
    assert math.isclose(histogram.quantile(fraction), exact, rel_tol=0.011)
    assert histogram.largest == max(values)
    assert math.isclose(histogram.mean, sum(values) / len(values))
    assert histogram.count == len(values)


def test_an_empty_histogram_has_zeros() -> None:
    assert Histogram().summary(1e3) == {"mean": 0.0, "p50": 0.0, "p90": 0.0, "p99": 0.0, "max": 0.0}


def test_nothing_and_very_much_have_places() -> None:
    histogram = Histogram()
    for value in (0.0, 0.0, 1e-12, 1e300):
        histogram.add(value)
    assert histogram.quantile(0.5) == 0.0
    assert histogram.largest == 1e300
    assert histogram.quantile(1.0) > 1e8


def test_memory_does_not_grow_with_the_number_of_values() -> None:
    histogram = Histogram()
    for number in range(1, 50_000):
        histogram.add(number / 1e4)
    assert len(histogram._counts) < 1_200


def test_quantiles_never_exceed_the_largest_value() -> None:
    histogram = Histogram()
    histogram.add(0.9999)
    assert histogram.quantile(0.5) <= 0.9999


@given(st.lists(st.tuples(st.floats(min_value=0.0, max_value=5.0), st.integers(0, 50)), min_size=1, max_size=40))
def test_no_area_and_no_peak_is_lost(moves: list[tuple[float, int]]) -> None:
    """However often neighbors were merged."""
    line = Timeline(["n"], capacity=8, width=0.01)
    now, value, area = 0.0, 0, 0.0
    for gap, height in moves:
        area += value * gap
        now, value = now + gap, height
        line.add(now, [height])
    means, times = line.means("n"), line.times
    ends = [*times[1:], now]
    told = sum(mean * (end - start) for mean, start, end in zip(means, times, ends, strict=True))
    assert math.isclose(told, area, rel_tol=1e-6, abs_tol=1e-6)
    assert max(line.peaks("n")) == max(height for _, height in moves)
    assert len(times) <= 8
    few, edges = line.means("n", 3), line.edges(3)
    assert len(few) == len(edges) - 1 <= 3
    told = sum(mean * (end - start) for mean, start, end in zip(few, edges, edges[1:], strict=False))
    assert math.isclose(told, area, rel_tol=1e-6, abs_tol=1e-6)
    assert max(line.peaks("n", 3)) == max(line.peaks("n"))


def test_intervals_double_when_time_outgrows_them() -> None:
    line = Timeline(["n"], capacity=4, width=1.0)
    for second in range(8):
        line.add(float(second), [second])
    assert line.width == 2.0
    assert line.times == [0.0, 2.0, 4.0, 6.0]
    assert line.means("n")[:3] == [0.5, 2.5, 4.5]
    assert line.peaks("n") == [1.0, 3.0, 5.0, 7.0]


def test_a_long_gap_keeps_its_value() -> None:
    line = Timeline(["a", "b"], capacity=16, width=1.0)
    line.add(0.5, [2, 3])
    line.add(9.5, [0, 0])
    assert line.means("a") == [1.0, *[2.0] * 9]
    assert line.peaks("b") == [3.0] * 10


def test_time_does_not_go_back() -> None:
    line = Timeline(["n"])
    line.add(2.0, [1])
    with pytest.raises(SchedulerFault, match="time does not go back"):
        line.add(1.0, [1])


def test_groups_beyond_the_limit_share_one() -> None:
    groups = Grouped(Histogram, limit=2)
    for name in ("a", "b", "c", "d", "a"):
        groups.of(name).add(1.0)
    assert {name: group.count for name, group in groups.by_name.items()} == {"a": 2, "b": 1, "(others)": 2}
