"""Which keys a query sees: rules for rows that agree in them, as masks and as bounds of what must be read.

Legend: R rows, Q query tokens per row, S key positions per row. Positions are absolute, within a row's sequence.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np

__all__ = ["BatchFacts", "Visibility"]

Ranges = Sequence[Sequence[tuple[int, int]]]


@dataclass(frozen=True, slots=True)
class Visibility:
    """A query at position p sees the keys in ``(p - window, p]``, or both sides of it when not ``causal``.

    Attributes:
        chunk: positions per chunk; only keys of the query's own chunk are seen.
        prompt_lens: int [batch rows]; keys before these are seen whatever the window says (R-SWA).
        ranges: per batch row, half-open ranges of positions that see each other whatever the rest says.
        key_begin: keys before it belong to somebody else's part of the result.
    """

    causal: bool
    window: int | None = None
    chunk: int | None = None
    prompt_lens: np.ndarray | None = None
    ranges: Ranges | None = None
    key_begin: int = 0

    @property
    def is_patchy(self) -> bool:
        """What a row sees may have holes, in blocks that have been given up perhaps."""
        return self.prompt_lens is not None or self.ranges is not None

    def is_whole(self, length: int) -> bool:
        """Of ``length`` positions nothing is hidden but what causality hides."""
        limits = [limit for limit in (self.window, self.chunk) if limit is not None]
        return self.ranges is None and min(limits, default=length) >= length

    def matrix(self, rows: np.ndarray, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool [R, Q, S] for batch rows [R] from absolute positions [R, Q] and [R, S]."""
        distance = queries[:, :, None] - keys[:, None, :]
        visible = distance >= 0 if self.causal else np.ones(distance.shape, dtype=bool)
        if self.window is not None:
            near = (distance if self.causal else np.abs(distance)) < self.window
            if self.prompt_lens is not None:
                near |= keys[:, None, :] < self.prompt_lens[rows][:, None, None]
            visible &= near
        if self.chunk is not None:
            visible &= queries[:, :, None] // self.chunk == keys[:, None, :] // self.chunk
        for index, begin, end in self._of(rows):
            row_queries, row_keys = queries[index], keys[index]
            is_in = ((row_queries >= begin) & (row_queries < end))[:, None] & ((row_keys >= begin) & (row_keys < end))
            visible[index] |= is_in
        return visible

    def first_keys(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray) -> np.ndarray:
        """int64 [R]: no query of positions ``first`` to ``last`` [R], both included, sees a key before this one."""
        low = np.zeros_like(first)
        if self.window is not None:
            low = np.maximum(first - self.window + 1, 0)
            if self.prompt_lens is not None:
                low = np.where(self.prompt_lens[rows] > 0, 0, low)
        if self.chunk is not None:
            low = np.maximum(low, first // self.chunk * self.chunk)
        for index, begin, end in self._of(rows):
            if begin <= last[index] and first[index] < end:
                low[index] = min(int(low[index]), begin)
        return np.maximum(low, self.key_begin)

    def key_ends(self, rows: np.ndarray, first: np.ndarray, last: np.ndarray, seq_lens: np.ndarray) -> np.ndarray:
        """int64 [R]: one past the last key that any of these queries sees, of the row's ``seq_lens`` [R]."""
        if not self.causal:
            return seq_lens
        high = last + 1
        for index, begin, end in self._of(rows):
            if begin <= last[index] and first[index] < end:
                high[index] = max(int(high[index]), end)
        return np.minimum(high, seq_lens)

    def _of(self, rows: np.ndarray) -> Iterator[tuple[int, int, int]]:
        """The ranges of ``rows``, each with the number of its row among them."""
        if self.ranges is None:
            return
        for index, row in enumerate(rows.tolist()):
            for begin, end in self.ranges[row]:
                yield index, begin, end


@dataclass(frozen=True, slots=True)
class BatchFacts:
    """What a step says of its rows: ``causal`` for all or bool [batch rows], and what ``Visibility`` says it may."""

    causal: bool | np.ndarray = True
    ranges: Ranges | None = None
    prompt_lens: np.ndarray | None = None

    def classes(self, rules: Visibility, num_rows: int) -> Iterator[tuple[Visibility, np.ndarray]]:
        """Rows that agree in ``rules``, which are those of a layer. Rows without ranges stay on the plain path.

        ``rules.causal`` is replaced by the rows' own.
        """
        rows = np.arange(num_rows)
        if isinstance(self.causal, bool) and self.ranges is None:
            yield replace(rules, causal=self.causal), rows
            return
        is_causal = np.broadcast_to(self.causal, num_rows)
        has_ranges = np.zeros(num_rows, dtype=bool)
        if self.ranges is not None:
            has_ranges = np.fromiter((len(ranges) > 0 for ranges in self.ranges[:num_rows]), bool, num_rows)
        for causal in (True, False):
            for ranged in (False, True):
                members = rows[(is_causal == causal) & (has_ranges == ranged)]
                if members.size:
                    yield replace(rules, causal=causal, ranges=self.ranges if ranged else None), members
