"""Which rows are computed together, and which pages they read: host-side arithmetic over one step's batch.

Legend: R rows of a group, Q query tokens per row, S gathered key positions per row, K KV heads, B block size,
N pages per row. Position p of row r is gathered entry ``p - base[r]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

__all__ = ["Batch", "PlanLimits", "RowSet", "Visibility", "fresh_row_sets", "paged_row_sets"]

SHORT_QUERY = 16
"""Rows with at most this many query tokens are batched by equal count; longer ones are computed in tiles, alone."""


@dataclass(frozen=True, slots=True)
class Visibility:
    """A query at position p sees the keys in ``(p - window, p]``, or both sides of it when not ``causal``."""

    causal: bool
    window: int | None

    def first_visible(self, position: int) -> int:
        return 0 if self.window is None else max(0, position - self.window + 1)

    def matrix(self, queries: np.ndarray, keys: np.ndarray) -> np.ndarray:
        """bool [..., Q, S] from absolute positions [..., Q] and [..., S]."""
        distance = queries[..., :, None] - keys[..., None, :]
        visible = distance >= 0 if self.causal else np.ones(distance.shape, dtype=bool)
        if self.window is not None:
            visible &= (distance if self.causal else np.abs(distance)) < self.window
        return visible


@dataclass(frozen=True, slots=True)
class PlanLimits:
    """``group_pages``: pages gathered at once (rows share a scratch buffer that should stay in the core's cache).
    ``tile_queries``: query tokens of one long row computed at once."""

    group_pages: int
    tile_queries: int


@dataclass(frozen=True, slots=True)
class RowSet:
    """Rows computed by one call.

    Attributes:
        rows: batch row numbers [R].
        first_token: index of each row's first query token in the step [R].
        num_queries: Q, equal for all rows.
        query_start: absolute position of each row's first query [R].
        key_end: one past the last key each row may see [R].
        first_block, num_blocks: pages to gather; of each row from ``first_block[r]``, padded to ``num_blocks``.
    """

    rows: np.ndarray
    first_token: np.ndarray
    num_queries: int
    query_start: np.ndarray
    key_end: np.ndarray
    first_block: np.ndarray
    num_blocks: int

    def tokens(self) -> np.ndarray:
        """int64 [R * Q] into the step's tokens."""
        return (self.first_token[:, None] + np.arange(self.num_queries)).reshape(-1)

    def query_positions(self) -> np.ndarray:
        return self.query_start[:, None] + np.arange(self.num_queries)


@dataclass(frozen=True, slots=True)
class Batch:
    """The step on the host: int64 token offsets ``starts`` [rows + 1], cached plus new tokens ``seq_lens`` [rows]."""

    starts: np.ndarray
    seq_lens: np.ndarray
    block_size: int

    @property
    def query_lens(self) -> np.ndarray:
        return np.diff(self.starts)


def paged_row_sets(batch: Batch, rows: np.ndarray, visibility: Visibility, limits: PlanLimits) -> Iterator[RowSet]:
    """Row sets of ``rows`` that read their keys from the cache. Rows without query tokens are left out."""
    query_lens = batch.query_lens[rows]
    short = rows[(query_lens > 0) & (query_lens <= SHORT_QUERY)]
    if short.size:
        yield from _short_sets(batch, short, visibility, limits)
    for row in rows[query_lens > SHORT_QUERY]:
        yield from _tiles(batch, int(row), visibility, limits)


def _short_sets(batch: Batch, short: np.ndarray, visibility: Visibility, limits: PlanLimits) -> Iterator[RowSet]:
    query_lens, seq_lens = batch.query_lens, batch.seq_lens
    context = seq_lens - query_lens
    first = np.zeros_like(context)
    if visibility.window is not None:
        first = np.maximum(context - visibility.window + 1, 0) // batch.block_size
    blocks = -(-seq_lens // batch.block_size) - first
    # Equal query lengths together, and within them similar key lengths, so that little padding is gathered.
    order = short[np.lexsort((blocks[short], query_lens[short]))]
    for members in _cut(order, query_lens, blocks, limits.group_pages):
        yield RowSet(
            rows=members,
            first_token=batch.starts[members],
            num_queries=int(query_lens[members[0]]),
            query_start=context[members],
            key_end=seq_lens[members],
            first_block=first[members],
            num_blocks=int(blocks[members].max()),
        )


def _cut(order: np.ndarray, query_lens: np.ndarray, blocks: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Split ``order`` where the query length changes or the padded group would exceed ``limit`` pages."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            same = query_lens[order[end]] == query_lens[order[begin]]
            # Blocks grow along the order, so the candidate itself would be the group's widest row.
            if same and (end + 1 - begin) * int(blocks[order[end]]) <= limit:
                continue
        yield order[begin:end]
        begin = end


def _tiles(batch: Batch, row: int, visibility: Visibility, limits: PlanLimits) -> Iterator[RowSet]:
    """One long row, its queries in tiles; a tile reads no key beyond what its last query sees."""
    first_token, last_token, seq_len = int(batch.starts[row]), int(batch.starts[row + 1]), int(batch.seq_lens[row])
    context = seq_len - (last_token - first_token)
    for token in range(first_token, last_token, limits.tile_queries):
        count = min(limits.tile_queries, last_token - token)
        position = context + token - first_token
        key_end = position + count if visibility.causal else seq_len
        first_block = visibility.first_visible(position) // batch.block_size
        yield RowSet(
            rows=np.array([row]),
            first_token=np.array([token]),
            num_queries=count,
            query_start=np.array([position]),
            key_end=np.array([key_end]),
            first_block=np.array([first_block]),
            num_blocks=-(-key_end // batch.block_size) - first_block,
        )


def fresh_row_sets(batch: Batch, rows: np.ndarray) -> Iterator[RowSet]:
    """Row sets whose keys are exactly the step's own tokens; ``rows`` of equal length are computed together."""
    lengths = batch.query_lens
    for length in np.unique(lengths[rows]):
        if length == 0:
            continue
        members = rows[lengths[rows] == length]
        zeros = np.zeros(len(members), dtype=np.int64)
        yield RowSet(
            rows=members,
            first_token=batch.starts[members],
            num_queries=int(length),
            query_start=zeros,
            key_end=np.full(len(members), length),
            first_block=zeros,
            num_blocks=0,
        )
