"""Which rows are computed together, and which pages they read: host-side arithmetic over one step's batch.

Legend: R rows of a group, Q query tokens per row, S gathered key positions per row, K KV heads, B block size,
N pages per row. Position p of row r is gathered entry ``p - base[r]``.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from hardpoint_attention.reference.visibility import Visibility

__all__ = ["Batch", "PlanLimits", "RowSet", "foreign_row_sets", "fresh_row_sets", "paged_row_sets"]

SHORT_QUERY = 16
"""Rows with at most this many query tokens are batched by equal count; longer ones are computed in tiles, alone."""


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
        key_end: one past the last key each row may see [R]; 0 for all rows or for none.
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
    query_lens, seq_lens = batch.query_lens[short], batch.seq_lens[short]
    context = seq_lens - query_lens
    ends = visibility.key_ends(short, context, seq_lens - 1, seq_lens)
    first = visibility.first_keys(short, context, seq_lens - 1) // batch.block_size
    blocks = -(-ends // batch.block_size) - first
    # Equal query lengths together, and within them similar key lengths, so that little padding is gathered.
    order = np.lexsort((blocks, query_lens))
    for members in _cut(order, query_lens, blocks, limits.group_pages):
        yield RowSet(
            rows=short[members],
            first_token=batch.starts[short[members]],
            num_queries=int(query_lens[members[0]]),
            query_start=context[members],
            key_end=ends[members],
            first_block=first[members],
            num_blocks=int(blocks[members].max()),
        )


def _cut(order: np.ndarray, query_lens: np.ndarray, blocks: np.ndarray, limit: int) -> Iterator[np.ndarray]:
    """Split ``order`` where the query length changes or the padded group would exceed ``limit`` pages, and behind rows
    without any key."""
    begin = 0
    for end in range(1, len(order) + 1):
        if end < len(order):
            same = query_lens[order[end]] == query_lens[order[begin]]
            same &= (blocks[order[begin]] == 0) == (blocks[order[end]] == 0)
            # Blocks grow along the order, so the candidate itself would be the group's widest row.
            if same and (end + 1 - begin) * int(blocks[order[end]]) <= limit:
                continue
        yield order[begin:end]
        begin = end


def _tiles(batch: Batch, row: int, visibility: Visibility, limits: PlanLimits) -> Iterator[RowSet]:
    """One long row, its queries in tiles; a tile reads no key beyond what its queries see."""
    first_token, last_token, seq_len = int(batch.starts[row]), int(batch.starts[row + 1]), int(batch.seq_lens[row])
    context = seq_len - (last_token - first_token)
    rows, seq_lens = np.array([row]), np.array([seq_len])
    for token in range(first_token, last_token, limits.tile_queries):
        count = min(limits.tile_queries, last_token - token)
        first = np.array([context + token - first_token])
        key_end = visibility.key_ends(rows, first, first + count - 1, seq_lens)
        first_block = visibility.first_keys(rows, first, first + count - 1) // batch.block_size
        yield RowSet(
            rows=rows,
            first_token=np.array([token]),
            num_queries=count,
            query_start=first,
            key_end=key_end,
            first_block=first_block,
            num_blocks=-(-int(key_end[0]) // batch.block_size) - int(first_block[0]),
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


def foreign_row_sets(batch: Batch) -> Iterator[RowSet]:
    """Row sets, each of one row, whose keys are those of another sequence, as many as ``seq_lens`` says."""
    for row in np.flatnonzero(batch.query_lens):
        yield RowSet(
            rows=np.array([row]),
            first_token=batch.starts[row : row + 1],
            num_queries=int(batch.query_lens[row]),
            query_start=np.zeros(1, dtype=np.int64),
            key_end=batch.seq_lens[row : row + 1],
            first_block=np.zeros(1, dtype=np.int64),
            num_blocks=0,
        )
