"""Statistics of runs of any length in memory that does not grow: histograms, time series, and figures by group."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hardpoint_bench.faults import require

__all__ = ["Grouped", "Histogram", "Timeline"]

T = TypeVar("T")

_SMALLEST = 1e-7
_GROWTH = math.log(1.01)
_NUM_BUCKETS = 3_800
"""From a tenth of a microsecond to about 80 years, in seconds."""


class Histogram:
    """Counts of values from 0 on; a quantile is off by at most one percent of itself."""

    __slots__ = ("_counts", "count", "largest", "total")

    def __init__(self) -> None:
        self.count = 0
        self.total = 0.0
        self.largest = 0.0
        self._counts: dict[int, int] = {}

    def add(self, value: float) -> None:
        """Values below a tenth of a microsecond (in seconds) are all alike."""
        bucket = 0 if value < _SMALLEST else min(1 + int(math.log(value / _SMALLEST) / _GROWTH), _NUM_BUCKETS)
        self._counts[bucket] = self._counts.get(bucket, 0) + 1
        self.count += 1
        self.total += value
        if value > self.largest:
            self.largest = value

    @property
    def mean(self) -> float:
        return self.total / self.count if self.count else 0.0

    def quantile(self, fraction: float) -> float:
        """The value that ``fraction`` of all do not exceed; 0 without values."""
        due = math.ceil(fraction * self.count)
        seen = 0
        for bucket in sorted(self._counts):
            seen += self._counts[bucket]
            if seen >= due:
                return 0.0 if bucket == 0 else min(_SMALLEST * math.exp((bucket - 0.5) * _GROWTH), self.largest)
        return 0.0

    def summary(self, scale: float, digits: int = 3) -> dict[str, float]:
        """Mean, usual quantiles and maximum, each times ``scale``."""
        named = {"mean": self.mean, "p50": self.quantile(0.5), "p90": self.quantile(0.9), "p99": self.quantile(0.99)}
        return {name: round(value * scale, digits) for name, value in {**named, "max": self.largest}.items()}


class Timeline:
    """Step functions of time, each kept as mean and maximum over ``capacity`` or fewer intervals of equal width.

    When time outgrows the intervals, two neighbors become one, so that the whole run is there at the finest width that
    fits. Times are in seconds from 0 on and never go back.
    """

    def __init__(self, names: Sequence[str], *, capacity: int = 1024, width: float = 1e-3) -> None:
        self.names = tuple(names)
        self.width = width
        self._capacity = capacity
        self._area = np.zeros((len(names), capacity))
        self._peaks = np.zeros((len(names), capacity))
        self._now = 0.0
        self._values = np.zeros(len(names))

    def add(self, now: float, values: Sequence[float]) -> None:
        """From ``now`` on, the functions have these ``values``."""
        require(now >= self._now, "time does not go back", f"{now} follows {self._now}")
        self._hold_until(now)
        self._values = np.asarray(values, dtype=float)
        index = int(now / self.width)
        np.maximum(self._peaks[:, index], self._values, out=self._peaks[:, index])

    def _hold_until(self, now: float) -> None:
        while now >= self.width * self._capacity:
            self._halve()
        first, last = int(self._now / self.width), int(now / self.width)
        if first == last:
            self._area[:, first] += self._values * (now - self._now)
        else:
            self._area[:, first] += self._values * ((first + 1) * self.width - self._now)
            self._area[:, first + 1 : last] += self._values[:, None] * self.width
            self._area[:, last] += self._values * (now - last * self.width)
            peaks = self._peaks[:, first : last + 1]
            np.maximum(peaks, self._values[:, None], out=peaks)
        self._now = now

    def _halve(self) -> None:
        half = self._capacity // 2
        area, peaks = np.zeros_like(self._area), np.zeros_like(self._peaks)
        area[:, :half] = self._area[:, 0::2] + self._area[:, 1::2]
        peaks[:, :half] = np.maximum(self._peaks[:, 0::2], self._peaks[:, 1::2])
        self._area, self._peaks = area, peaks
        self.width *= 2

    @property
    def times(self) -> list[float]:
        """Where the intervals begin, seconds."""
        return [float(start * self.width) for start in self._starts(None)]

    def edges(self, most: int | None = None) -> list[float]:
        """Where the intervals begin, and where the last one ends, seconds. ``most``: see :meth:`means`."""
        return [*(float(start * self.width) for start in self._starts(most)), self._now]

    def means(self, name: str, most: int | None = None) -> list[float]:
        """Over each interval; the last one ends now. Neighbors are taken together to have no more than ``most``."""
        starts = self._starts(most)
        areas = np.add.reduceat(self._area[self.names.index(name), : self._count], starts)
        lengths = np.diff(self.edges(most))
        return [float(area / length) if length > 0 else 0.0 for area, length in zip(areas, lengths, strict=True)]

    def peaks(self, name: str, most: int | None = None) -> list[float]:
        """Maxima in the place of means."""
        row = self._peaks[self.names.index(name), : self._count]
        return [float(peak) for peak in np.maximum.reduceat(row, self._starts(most))]

    @property
    def _count(self) -> int:
        return int(self._now / self.width) + 1

    def _starts(self, most: int | None) -> npt.NDArray[np.int64]:
        return np.arange(0, self._count, 1 if most is None else -(-self._count // most))


class Grouped(Generic[T]):
    """One ``T`` per name for the first ``limit`` names; later ones share :data:`OTHERS`."""

    OTHERS = "(others)"

    def __init__(self, make: Callable[[], T], limit: int = 16) -> None:
        self.by_name: dict[str, T] = {}
        self._make = make
        self._limit = limit

    def of(self, name: str) -> T:
        found = self.by_name.get(name)
        if found is None:
            if len(self.by_name) >= self._limit:
                name = self.OTHERS
            found = self.by_name.setdefault(name, self._make())
        return found
