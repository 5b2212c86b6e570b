"""What the worker remembers between steps, by slot: tokens, blocks, ownership. Struct of numpy arrays.

Legend: N slots (``max_num_seqs``), L tokens per slot, B blocks per slot in one KV group. A slot keeps its place for the
request's whole life in the batch, so nothing is ever condensed; the step's ``slots`` array picks the rows.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID
from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import BlockUpdate, NewRow, TokenUpdate

__all__ = ["NOBODY", "BlockTable", "SlotState"]

NOBODY = -1
"""Generation of an empty slot; no step names it."""


class BlockTable:
    """Block ids of one KV group. ``ids`` int32 [N, B], null where a slot holds no block; ``counts`` int32 [N].

    Without ``keeps_kv`` no slot ever holds one: the group's layers remember nothing from one step to the next. In one
    that ``is_foreign`` blocks hold tokens of another sequence, which are there from the start (cross-attention).
    """

    def __init__(
        self, num_slots: int, max_blocks: int, block_size: int, *, keeps_kv: bool = True, is_foreign: bool = False
    ) -> None:
        self.block_size = block_size
        self.keeps_kv = keeps_kv
        self.is_foreign = is_foreign
        self.ids: Int32Array = np.full((num_slots, max_blocks), NULL_BLOCK_ID, dtype=np.int32)
        self.counts: Int32Array = np.zeros(num_slots, dtype=np.int32)

    @property
    def max_blocks(self) -> int:
        return self.ids.shape[1]

    @property
    def follows_tokens(self) -> bool:
        """Whether a slot's blocks hold its own tokens, and are as many as these need."""
        return self.keeps_kv and not self.is_foreign

    def replace(self, slot: int, block_ids: Int32Array) -> None:
        self._check_width(len(block_ids), slot)
        self.ids[slot, : len(block_ids)] = block_ids
        self.ids[slot, len(block_ids) :] = NULL_BLOCK_ID
        self.counts[slot] = len(block_ids)

    def append(self, slots: Int32Array, update: BlockUpdate) -> None:
        """Add ``update`` (counts per row of ``slots``). Raises ``RuntimeError`` when a table would overflow."""
        total = len(update.ids)
        if total == 0:
            return
        first_of_row = np.cumsum(update.counts) - update.counts
        rows = np.repeat(slots, update.counts)
        columns = self.counts[rows] + np.arange(total, dtype=np.int32) - np.repeat(first_of_row, update.counts)
        if int(columns.max()) >= self.max_blocks:
            overflown = int(rows[int(columns.argmax())])
            self._check_width(int(columns.max()) + 1, overflown)
        self.ids[rows, columns] = update.ids
        self.counts[slots] += update.counts

    def release(self, slots: Int32Array) -> None:
        self.ids[slots] = NULL_BLOCK_ID
        self.counts[slots] = 0

    def _check_width(self, num_blocks: int, slot: int) -> None:
        if num_blocks > self.max_blocks:
            raise RuntimeError(
                f"slot {slot} was given {num_blocks} blocks of {self.block_size} tokens, but its table holds "
                f"{self.max_blocks}; the scheduler and the worker disagree about max_model_len"
            )


class SlotState:
    """Tokens and blocks of every slot.

    Attributes:
        token_ids: int32 [N, L]; valid up to ``num_tokens`` of the slot.
        num_tokens, num_prompt_tokens: int32 [N].
        generations: int32 [N], ``NOBODY`` for an empty slot.
        num_pending: int32 [N], of ``num_tokens`` the last, sampled by steps whose results are not on the host: their
            ids are still to be filled in, and drafts among them count as if they were right.
        num_refused: int32 [N], drafts that turned out wrong so far.
        occupied: bool [N].
        tables: one :class:`BlockTable` per KV group.
    """

    def __init__(
        self,
        num_slots: int,
        max_tokens: int,
        block_sizes: Sequence[int],
        max_blocks: Sequence[int] | None = None,
        *,
        keeps_kv: Sequence[bool] | None = None,
        foreign_tokens: Sequence[int | None] | None = None,
    ) -> None:
        """``foreign_tokens``: per group, where its tables are of another sequence's tokens, how many at most."""
        # A step in flight may sample one token past the limit before the scheduler ends the request.
        width = max_tokens + 1
        foreign = foreign_tokens or [None] * len(block_sizes)
        widths = max_blocks or [
            -(-width // size) + 1 if most is None else -(-most // size)
            for size, most in zip(block_sizes, foreign, strict=True)
        ]
        self.token_ids: Int32Array = np.zeros((num_slots, width), dtype=np.int32)
        self.num_tokens: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_prompt_tokens: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_pending: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.num_refused: Int32Array = np.zeros(num_slots, dtype=np.int32)
        self.generations: Int32Array = np.full(num_slots, NOBODY, dtype=np.int32)
        self.occupied: BoolArray = np.zeros(num_slots, dtype=np.bool_)
        self.tables = tuple(
            BlockTable(num_slots, width_in_blocks, size, keeps_kv=keeps, is_foreign=most is not None)
            for size, width_in_blocks, keeps, most in zip(
                block_sizes, widths, keeps_kv or [True] * len(widths), foreign, strict=True
            )
        )

    @property
    def num_slots(self) -> int:
        return len(self.occupied)

    def release(self, slots: Int32Array) -> None:
        """Forget finished or preempted slots; an empty slot is not an error."""
        if len(slots) == 0:
            return
        self.occupied[slots] = False
        self.generations[slots] = NOBODY
        self.num_tokens[slots] = 0
        self.num_prompt_tokens[slots] = 0
        self.num_pending[slots] = 0
        self.num_refused[slots] = 0
        for table in self.tables:
            table.release(slots)

    def enter(self, row: NewRow) -> None:
        """Take in a request; whatever the slot held before is replaced.

        Raises ``RuntimeError`` for a slot out of range, one still occupied, or more tokens than fit.
        """
        slot, count = row.slot, len(row.token_ids)
        if not 0 <= slot < self.num_slots:
            raise RuntimeError(f"slot {slot} is outside 0..{self.num_slots - 1}; check max_num_seqs on both sides")
        if self.occupied[slot]:
            raise RuntimeError(f"slot {slot} is handed to request {row.request_id} while it is still held")
        if count > self.token_ids.shape[1]:
            raise RuntimeError(
                f"request {row.request_id} has {count} tokens, the slot holds {self.token_ids.shape[1]}; "
                "lower the prompt or raise max_model_len"
            )
        self.occupied[slot] = True
        self.generations[slot] = row.generation
        self.token_ids[slot, :count] = row.token_ids
        self.num_tokens[slot] = count
        self.num_prompt_tokens[slot] = row.num_prompt_tokens
        for table, block_ids in zip(self.tables, row.block_ids, strict=True):
            table.replace(slot, block_ids)

    def append_blocks(self, slots: Int32Array, updates: Sequence[BlockUpdate]) -> None:
        for table, update in zip(self.tables, updates, strict=True):
            table.append(slots, update)

    def append_tokens(self, slots: Int32Array, token_ids: Int32Array) -> None:
        """One sampled token per slot of ``slots`` (each slot at most once)."""
        lengths = self.num_tokens[slots]
        self.token_ids[slots, lengths] = token_ids
        self.num_tokens[slots] = lengths + 1

    def append_runs(self, slots: Int32Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """``counts[i]`` of the ``token_ids`` join ``slots[i]`` (each slot at most once)."""
        self._write(slots, counts, token_ids, self.num_tokens[slots])
        self.num_tokens[slots] += counts

    def write_ahead(self, slots: Int32Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """Guesses behind the known tokens, to be read by the next forward; they do not count as known.

        Raises ``RuntimeError`` when they reach beyond a slot's room.
        """
        self._write(slots, counts, token_ids, self.num_tokens[slots])

    def expect(self, slots: Int32Array, counts: Int32Array) -> None:
        """``counts[i]`` tokens of ``slots[i]`` are on their way from the device, if all of its drafts are right."""
        self.num_tokens[slots] += counts
        self.num_pending[slots] += counts

    def resolve(self, slots: Int32Array, expected: Int32Array, counts: Int32Array, token_ids: Int32Array) -> None:
        """The oldest ``expected[i]`` tokens of ``slots[i]`` are there, and only ``counts[i]``: the rest was refused."""
        self._write(slots, counts, token_ids, self.num_tokens[slots] - self.num_pending[slots])
        refused = expected - counts
        self.num_pending[slots] -= expected
        self.num_tokens[slots] -= refused
        self.num_refused[slots] += refused

    def _write(self, slots: Int32Array, counts: Int32Array, token_ids: Int32Array, starts: Int32Array) -> None:
        ends = starts + counts
        if len(slots) and int(ends.max()) > self.token_ids.shape[1]:
            slot = int(slots[int(ends.argmax())])
            raise RuntimeError(
                f"slot {slot} would hold {int(ends.max())} tokens, but has room for {self.token_ids.shape[1]}; the "
                "scheduler and the worker disagree about max_model_len"
            )
        first_of_row = np.cumsum(counts) - counts
        columns = np.arange(len(token_ids)) + np.repeat(starts - first_of_row, counts)
        self.token_ids[np.repeat(slots, counts), columns] = token_ids

    def append_known(self, slots: Int32Array, update: TokenUpdate) -> None:
        """Tokens sampled elsewhere; ids of -1 are those this worker sampled, and holds, itself."""
        is_news = update.ids >= 0
        rows = np.repeat(slots, update.counts)[is_news]
        if len(rows) == 0:
            return
        # Rows come grouped, so a token's rank within its row is its distance from the row's first.
        is_first = np.append(True, rows[1:] != rows[:-1])
        first = np.maximum.accumulate(np.where(is_first, np.arange(len(rows)), 0))
        columns = self.num_tokens[rows] + np.arange(len(rows)) - first
        self.token_ids[rows, columns] = update.ids[is_news]
        np.add.at(self.num_tokens, rows, 1)

    def check_rows(self, slots: Int32Array, generations: Int32Array) -> None:
        """Raise ``RuntimeError`` when a scheduled row is unknown here or belongs to an earlier owner of its slot."""
        known = self.generations[slots] == generations
        if not known.all():
            row = int(np.argmin(known))
            slot = int(slots[row])
            held = f"generation {self.generations[slot]}" if self.occupied[slot] else "nobody"
            raise RuntimeError(
                f"row {row} of the step is slot {slot}, generation {generations[row]}, but the slot is held by {held}"
            )
