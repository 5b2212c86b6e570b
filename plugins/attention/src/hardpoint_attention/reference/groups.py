"""From row sets to what one gather-and-compute call needs on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
import torch

from hardpoint_attention.reference.plan import RowSet
from hardpoint_attention.reference.visibility import Visibility

__all__ = ["CachePages", "RowGroup", "Spelling", "foreign_group", "fresh_group", "paged_group"]


@dataclass(frozen=True, slots=True)
class Spelling:
    """What the caller needs written out: ``masks`` that ``is_causal`` could say, ``distances`` for biases, and
    ``positions`` of keys to select them by."""

    masks: bool = False
    distances: bool = False
    positions: bool = False


@dataclass(frozen=True, slots=True)
class RowGroup:
    """Device side of a ``RowSet``. Legend as in ``plan``; n = R * Q.

    Attributes:
        tokens: int64 [n] into the step's tokens, or None when they are exactly ``token_range``.
        pages: int64 [R * K * N] into the cache seen as pages of one head; None: keys are the step's own tokens.
        stale: int64 indices into the gathered [R * K * N * B] entries that nobody may read; None if there are none.
        mask: float32 [R, 1, Q, S], 0 where visible, else -inf; None when everything is, or ``is_causal`` says it.
        is_causal: triangular, with S == Q.
        distance: float32 [R, Q, S], query position minus key position, for biases that depend on it.
        key_range: the step's keys, where these are another sequence's than the queries.
        first_keys: int64 [R], positions in their sequences of the first of the S keys.
    """

    num_rows: int
    num_queries: int
    num_keys: int
    token_range: tuple[int, int]
    tokens: torch.Tensor | None
    pages: torch.Tensor | None
    stale: torch.Tensor | None
    mask: torch.Tensor | None
    is_causal: bool
    distance: torch.Tensor | None = None
    key_range: tuple[int, int] | None = None
    first_keys: torch.Tensor | None = None

    def narrowed(self, selected: torch.Tensor) -> RowGroup:
        """The same with all keys hidden but those at the positions that ``selected`` [T, N] names for each token.

        Raises ``RuntimeError`` for a group that was planned without positions, or without its mask written out.
        """
        if self.first_keys is None or self.is_causal:
            raise RuntimeError("a group of rows was planned without the positions of its keys; plan with positions")
        named = self.pick(selected).view(self.num_rows, self.num_queries, -1).long() - self.first_keys[:, None, None]
        is_here = (named >= 0) & (named < self.num_keys)
        # One place more than there are keys, for all that is not here.
        shape = (self.num_rows, self.num_queries, self.num_keys + 1)
        is_seen = torch.zeros(shape, dtype=torch.bool, device=named.device)
        is_seen.scatter_(2, torch.where(is_here, named, self.num_keys), True)
        hidden = torch.zeros(shape, device=named.device).masked_fill_(~is_seen, -torch.inf)[:, None, :, :-1]
        return replace(self, mask=hidden if self.mask is None else self.mask + hidden)

    def pick(self, values: torch.Tensor) -> torch.Tensor:
        """This group's [n, ...] of ``values`` [T, ...]."""
        if self.tokens is None:
            return values[self.token_range[0] : self.token_range[1]]
        return values.index_select(0, self.tokens)

    def pick_keys(self, states: torch.Tensor) -> torch.Tensor:
        """This group's keys [R, S, ...] of the step's."""
        picked = self.pick(states) if self.key_range is None else states[self.key_range[0] : self.key_range[1]]
        return picked.unflatten(0, (self.num_rows, self.num_keys))

    def put(self, output: torch.Tensor, values: torch.Tensor) -> None:
        """Write ``values`` [R, Q, ...] into the group's rows of ``output`` [T, ...]."""
        if self.tokens is None:
            begin, end = self.token_range
            output[begin:end].view(values.shape).copy_(values)
        else:
            flat = values.reshape(-1, *output.shape[1:])
            output.index_copy_(0, self.tokens, flat.to(output.dtype))

    def fill(self, output: torch.Tensor, value: float) -> None:
        """Set the group's rows of ``output`` [T, ...]."""
        if self.tokens is None:
            output[self.token_range[0] : self.token_range[1]].fill_(value)
        else:
            output.index_fill_(0, self.tokens, value)


@dataclass(frozen=True, slots=True)
class CachePages:
    """Where a layer's pages are: block b, head k is page ``b * pages_per_block + k``. ``block_table`` int32 [R, N]."""

    block_table: torch.Tensor
    block_size: int
    num_kv_heads: int
    pages_per_block: int


def fresh_group(row_set: RowSet, visibility: Visibility, device: torch.device, spelling: Spelling) -> RowGroup:
    """Group over the step's own keys."""
    length = row_set.num_queries
    positions = row_set.query_positions()
    is_whole = visibility.is_whole(length)
    is_causal = visibility.causal and is_whole and not spelling.masks
    mask = None
    if not is_causal and (visibility.causal or not is_whole):
        mask = _mask(visibility.matrix(row_set.rows, positions, positions), device)
    group = _group(row_set, length, device, mask, is_causal, positions if spelling.distances else None)
    return _with_positions(group, np.zeros(len(row_set.rows), dtype=np.int64), device) if spelling.positions else group


def paged_group(
    row_set: RowSet, visibility: Visibility, cache: CachePages, device: torch.device, spelling: Spelling
) -> RowGroup:
    """Group over cached keys."""
    base = row_set.first_block * cache.block_size
    num_valid = row_set.key_end - base
    num_keys = int(num_valid.max())
    if num_keys == 0:
        return _group(row_set, 0, device, None, False, None)
    offsets = np.arange(num_keys)
    keys = base[:, None] + offsets
    is_own = offsets < num_valid[:, None]
    visible = visibility.matrix(row_set.rows, row_set.query_positions(), keys) & is_own[:, None, :]
    mask = None if visible.all() else _mask(visible, device)
    is_read = visible.any(axis=1) if visibility.is_patchy else is_own
    stale = None if is_read.all() else _stale(is_read, row_set.num_blocks, cache, device)
    pages = _pages(row_set, cache, device)
    group = _group(row_set, num_keys, device, mask, False, keys if spelling.distances else None, pages, stale)
    return _with_positions(group, base, device) if spelling.positions else group


def _with_positions(group: RowGroup, first_keys: np.ndarray, device: torch.device) -> RowGroup:
    return replace(group, first_keys=torch.from_numpy(first_keys.astype(np.int64)).to(device))


def foreign_group(row_set: RowSet, first_key: int, device: torch.device) -> RowGroup:
    """Group over the step's own keys from ``first_key`` on, all visible, which are not the queries' tokens."""
    num_keys = int(row_set.key_end[0])
    return _group(row_set, num_keys, device, None, False, None, key_range=(first_key, first_key + num_keys))


def _group(
    row_set: RowSet,
    num_keys: int,
    device: torch.device,
    mask: torch.Tensor | None,
    is_causal: bool,
    keys: np.ndarray | None,
    pages: torch.Tensor | None = None,
    stale: torch.Tensor | None = None,
    key_range: tuple[int, int] | None = None,
) -> RowGroup:
    tokens = row_set.tokens()
    is_range = bool(tokens[-1] - tokens[0] == len(tokens) - 1 and (np.diff(tokens) == 1).all())
    distance = None
    if keys is not None:
        difference = row_set.query_positions()[:, :, None] - keys[:, None, :]
        distance = torch.from_numpy(difference.astype(np.float32)).to(device)
    return RowGroup(
        num_rows=len(row_set.rows),
        num_queries=row_set.num_queries,
        num_keys=num_keys,
        token_range=(int(tokens[0]), int(tokens[-1]) + 1),
        tokens=None if is_range else torch.from_numpy(tokens).to(device),
        pages=pages,
        stale=stale,
        mask=mask,
        is_causal=is_causal,
        distance=distance,
        key_range=key_range,
    )


def _mask(visible: np.ndarray, device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.where(visible, np.float32(0), np.float32(-np.inf))).unsqueeze(1).to(device)


def _pages(row_set: RowSet, cache: CachePages, device: torch.device) -> torch.Tensor:
    columns = row_set.first_block[:, None] + np.arange(row_set.num_blocks)
    # Shorter rows are padded with their own last block, which certainly exists.
    columns = np.minimum(columns, ((row_set.key_end - 1) // cache.block_size)[:, None])
    rows = torch.from_numpy(row_set.rows).to(device).unsqueeze(1)
    blocks = cache.block_table[rows, torch.from_numpy(columns).to(device)].long()
    heads = torch.arange(cache.num_kv_heads, device=device)
    return (blocks.unsqueeze(1) * cache.pages_per_block + heads[None, :, None]).reshape(-1)


def _stale(is_read: np.ndarray, num_blocks: int, cache: CachePages, device: torch.device) -> torch.Tensor:
    """Gathered entries that nobody reads. They are zeroed, since a mask alone lets NaN and infinity through."""
    rows, entries = np.nonzero(~is_read)
    heads = np.arange(cache.num_kv_heads)
    stride = num_blocks * cache.block_size
    flat = (rows[:, None] * cache.num_kv_heads + heads) * stride + entries[:, None]
    return torch.from_numpy(flat.reshape(-1)).to(device)
