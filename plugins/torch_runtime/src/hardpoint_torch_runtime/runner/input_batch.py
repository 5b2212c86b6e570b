"""From scheduled rows to the tensors of one forward. Vectorised over tokens; writes into persistent buffers.

Legend: R rows, T tokens, B blocks per row. *Batch order* is the order of rows in the tensors; it differs from the
step's order only where an attention backend wants decode rows first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.kv_cache import NULL_BLOCK_ID
from hardpoint.interfaces.request import BoolArray, Int32Array
from hardpoint.interfaces.step import SchedulerOutput, TokenUpdate
from hardpoint_torch_runtime.layers.context_shards import ContextPlace
from hardpoint_torch_runtime.runner.buffers import StagedBuffer
from hardpoint_torch_runtime.runner.device_tokens import DeviceTokens, RowSpans
from hardpoint_torch_runtime.runner.slot_state import BlockTable, SlotState

__all__ = ["UNWRITTEN_SLOT", "ForeignTokens", "InputBatch", "InputBuilder", "PlacedRows"]

UNWRITTEN_SLOT = -1
"""Slot mapping entry of padding: cache writes skip it (R4.53)."""


@dataclass(frozen=True, slots=True)
class ForeignTokens:
    """Tokens of an encoder that the rows of a step attend to. E are those whose keys and values come with this step.

    Attributes:
        seq_lens: int32 [R'], per row, with its host array; 0 beyond R.
        max_len: the largest of them.
        hidden: [E, C], what the encoder made of the new ones, of rows one after another; None where there are none.
        slot_mappings: per KV group int64 [E], and None for groups that hold the rows' own tokens.
    """

    seq_lens: torch.Tensor
    seq_lens_cpu: np.ndarray
    max_len: int
    hidden: torch.Tensor | None
    slot_mappings: tuple[torch.Tensor | None, ...]


@dataclass(frozen=True, slots=True)
class PlacedRows:
    """``rows`` [n, C] in the place of the embeddings of the step's tokens from ``start`` on."""

    start: int
    rows: torch.Tensor


@dataclass(frozen=True, slots=True)
class InputBatch:
    """One step's inputs. Tensors are views of persistent buffers, valid until the next build.

    Attributes:
        step_rows: int64 [R], for each batch row its row in the step.
        slots, num_computed, num_scheduled: int32 [R], batch order.
        token_ids, positions: int64 [T'], where T' is ``num_tokens`` or the padded count.
        query_start_loc: int32 [R + 1]; seq_lens: int32 [R]; each with its host array.
        block_tables: per KV group int32 [R', B]; rows beyond R hold the null block.
        slot_mappings: per KV group int64 [T']; padding is -1. All 0 for a group that keeps no KV of these tokens.
        sample_rows: int64 [S], batch rows that sample, ascending.
        logits_indices: int64 [S], token index of each of them; with drafts int64 [P], for each of these rows the places
            before its drafts and the one of its last draft.
        num_drafts: int32 [S], drafts at the end of the rows that sample; None where no row has any.
        drafts: int64 [D], ids of those drafts, row after row, -1 for missing ones.
        lengths_are_exact: False when what the host has of positions and lengths are upper bounds.
        foreign: what rows attend to beside their own tokens, in models with an encoder.
        prompt_lens: int32 [R'], with its host array, where layers ask for them; 0 beyond R.
        mm_ranges: per row, see ``CommonAttentionMetadata``; None where nobody asks, or no row has any.
        media: what encoders made of items whose placeholders are among the tokens.
    """

    num_rows: int
    num_tokens: int
    step_rows: np.ndarray
    slots: Int32Array
    num_computed: Int32Array
    num_scheduled: Int32Array
    token_ids: torch.Tensor
    positions: torch.Tensor
    query_start_loc: torch.Tensor
    query_start_loc_cpu: np.ndarray
    seq_lens: torch.Tensor
    seq_lens_cpu: np.ndarray
    max_query_len: int
    max_seq_len: int
    block_tables: tuple[torch.Tensor, ...]
    slot_mappings: tuple[torch.Tensor, ...]
    sample_rows: np.ndarray
    logits_indices: torch.Tensor
    num_drafts: Int32Array | None = None
    drafts: torch.Tensor | None = None
    lengths_are_exact: bool = True
    prompt_lens: torch.Tensor | None = None
    prompt_lens_cpu: np.ndarray | None = None
    foreign: ForeignTokens | None = None
    mm_ranges: tuple[tuple[tuple[int, int], ...], ...] | None = None
    media: tuple[PlacedRows, ...] = ()


class InputBuilder:
    """Owns the buffers; one per runner.

    ``kernel_blocks`` gives, per KV group, how many kernel blocks one manager block is split into (R1.45).
    ``has_prompt_lens``: some layer treats prompts apart from what follows them. ``places``: per KV group this rank
    among those that its contexts are dealt out to, if they are.
    """

    def __init__(
        self,
        state: SlotState,
        max_tokens: int,
        device: torch.device,
        kernel_blocks: tuple[int, ...] | None = None,
        *,
        device_tokens: DeviceTokens | None = None,
        has_prompt_lens: bool = False,
        places: Sequence[ContextPlace | None] | None = None,
    ) -> None:
        rows = state.num_slots
        self._places = places or (None,) * len(state.tables)
        self._device_tokens = device_tokens
        self._state = state
        self._max_tokens = max_tokens
        self._kernel_blocks = kernel_blocks or (1,) * len(state.tables)

        def staged(dtype: torch.dtype, *shape: int) -> StagedBuffer:
            return StagedBuffer(shape, dtype, device, waits=device_tokens is None)

        self._token_ids, self._positions = staged(torch.int64, max_tokens), staged(torch.int64, max_tokens)
        self._query_start_loc, self._seq_lens = staged(torch.int32, rows + 1), staged(torch.int32, rows)
        self._logits_indices = staged(torch.int64, max(rows, max_tokens))
        self._prompt_lens = staged(torch.int32, rows) if has_prompt_lens else None
        self._slot_mappings = [staged(torch.int64, max_tokens) for _ in state.tables]
        self._block_tables = [
            staged(torch.int32, rows, table.max_blocks * ratio)
            for table, ratio in zip(state.tables, self._kernel_blocks, strict=True)
        ]
        self._arange = np.arange(max_tokens + 1, dtype=np.int64)
        # So many rows of one token each are what the first entries of query_start_loc describe.
        self._num_singles = 0

    def build(
        self,
        step: SchedulerOutput,
        *,
        num_computed: Int32Array | None = None,
        drafts: TokenUpdate | None = None,
        reorder_threshold: int | None = None,
        pad_tokens: int | None = None,
        pad_rows: int | None = None,
    ) -> InputBatch:
        """Prepare ``step``, whose rows must be in the slot state already.

        ``num_computed`` int32 [R] and ``drafts`` replace those of the step where the worker knows better.
        ``reorder_threshold`` moves rows with at most that many tokens to the front, keeping their order otherwise.
        ``pad_tokens`` and ``pad_rows`` (at least the real counts) define the buffers up to a captured shape.
        Raises ``RuntimeError`` when the step has more tokens than the worker was sized for.
        """
        self._check_size(step)
        known = step.num_computed_tokens if num_computed is None else num_computed
        order, (slots, computed, scheduled, samples) = self._rows(step, known, reorder_threshold)
        num_rows, num_tokens = len(order), step.num_tokens
        padded_tokens, padded_rows = pad_tokens or num_tokens, pad_rows or num_rows
        starts, seq_lens = self._fill_lengths(computed, scheduled, num_tokens, padded_rows)
        longest = int(seq_lens[0]) if num_rows == 1 else int(seq_lens[:num_rows].max())
        token_slots, positions = self._tokens(slots, computed, scheduled, num_tokens, padded_tokens)
        for group, table in enumerate(self._state.tables):
            self._map_slots(group, table, token_slots, positions, padded_tokens)
            self._fill_table(group, table, slots, longest, padded_rows)
        sample_rows = samples.nonzero()[0]
        row_drafts = _in_order(step.drafts if drafts is None else drafts, order)
        num_drafts = None if row_drafts is None else row_drafts.counts[sample_rows]
        num_logits = self._index_logits(starts[1:], sample_rows, num_tokens, num_drafts)
        token_ids, draft_ids = self._upload_ids(slots, samples, num_tokens, padded_tokens, row_drafts)
        prompt_lens, prompt_lens_cpu = self._fill_prompt_lens(slots, padded_rows)
        return InputBatch(
            num_rows=num_rows,
            num_tokens=num_tokens,
            step_rows=order,
            slots=slots,
            num_computed=computed,
            num_scheduled=scheduled,
            token_ids=token_ids,
            positions=self._positions.upload(padded_tokens),
            query_start_loc=self._query_start_loc.upload(padded_rows + 1),
            query_start_loc_cpu=starts[: padded_rows + 1],
            seq_lens=self._seq_lens.upload(padded_rows),
            seq_lens_cpu=seq_lens[:padded_rows],
            max_query_len=1 if num_tokens == num_rows else int(scheduled.max()),
            max_seq_len=longest,
            block_tables=tuple(table.upload(padded_rows) for table in self._block_tables),
            slot_mappings=tuple(mapping.upload(padded_tokens) for mapping in self._slot_mappings),
            sample_rows=sample_rows,
            logits_indices=self._logits_indices.upload(num_logits),
            num_drafts=num_drafts,
            drafts=draft_ids,
            prompt_lens=prompt_lens,
            prompt_lens_cpu=prompt_lens_cpu,
        )

    def _check_size(self, step: SchedulerOutput) -> None:
        if step.num_tokens > self._max_tokens:
            raise RuntimeError(
                f"step {step.step_id} has {step.num_tokens} tokens, the worker was sized for {self._max_tokens}; "
                "max_num_batched_tokens must be equal on both sides"
            )

    def _fill_prompt_lens(self, slots: Int32Array, padded_rows: int) -> tuple[torch.Tensor | None, np.ndarray | None]:
        if self._prompt_lens is None:
            return None, None
        host = self._prompt_lens.host[:padded_rows]
        host[: len(slots)] = self._state.num_prompt_tokens[slots]
        host[len(slots) :] = 0
        return self._prompt_lens.upload(padded_rows), host

    def _fill_lengths(
        self, computed: Int32Array, scheduled: Int32Array, num_tokens: int, padded_rows: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Where rows start among the tokens, int32 [R + 1], and how long their sequences are, int32 [R]."""
        starts, seq_lens, num_rows = self._query_start_loc.host, self._seq_lens.host, len(scheduled)
        if num_tokens > num_rows or num_rows > self._num_singles:
            starts[0] = 0
            np.cumsum(scheduled, out=starts[1 : num_rows + 1])
            self._num_singles = num_rows if num_tokens == num_rows else 0
        np.add(computed, scheduled, out=seq_lens[:num_rows])
        if padded_rows > num_rows:
            starts[num_rows + 1 : padded_rows + 1] = num_tokens
            self._num_singles = min(self._num_singles, num_rows)
            seq_lens[num_rows:padded_rows] = 0
        return starts, seq_lens

    def _index_logits(
        self, ends: np.ndarray, sample_rows: np.ndarray, num_tokens: int, num_drafts: Int32Array | None
    ) -> int:
        """The places whose logits are wanted, by the ``ends`` of all rows; returns how many."""
        if num_drafts is None:
            count = len(sample_rows)
            # As many as there are tokens are all of them.
            self._logits_indices.host[:count] = self._arange[:count] if count == num_tokens else ends[sample_rows] - 1
            return count
        ends = ends[sample_rows]
        widths = num_drafts + 1
        total = int(widths.sum())
        self._logits_indices.host[:total] = np.repeat(ends - np.cumsum(widths), widths) + self._arange[:total]
        return total

    def _upload_ids(
        self, slots: Int32Array, samples: BoolArray, num_tokens: int, num_padded: int, drafts: TokenUpdate | None
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        if self._device_tokens is None:
            known = None if drafts is None else torch.from_numpy(drafts.ids.astype(np.int64))
            return self._token_ids.upload(num_padded), known
        spans = RowSpans(
            slots,
            self._query_start_loc.host[1 : len(slots) + 1],
            samples,
            num_tokens,
            num_padded,
            num_drafts=None if drafts is None else drafts.counts,
            draft_ids=None if drafts is None else drafts.ids,
        )
        return self._device_tokens.fill(self._token_ids, spans)

    def _rows(
        self, step: SchedulerOutput, computed: Int32Array, threshold: int | None
    ) -> tuple[np.ndarray, tuple[Int32Array, Int32Array, Int32Array, BoolArray]]:
        """The batch order, int64 [R], and slots, computed and scheduled tokens, and who samples, in it."""
        slots, scheduled, samples = step.slots, step.num_scheduled_tokens, step.samples
        if threshold is None or step.num_tokens == step.num_rows:
            # As they come: all rows decode, or no backend minds.
            return self._arange[: step.num_rows], (slots, computed, scheduled, samples)
        order = np.argsort(scheduled > threshold, kind="stable")
        return order, (slots[order], computed[order], scheduled[order], samples[order])

    def _tokens(
        self, slots: Int32Array, computed: Int32Array, scheduled: Int32Array, num_tokens: int, padded: int
    ) -> tuple[np.ndarray, np.ndarray]:
        """Fill ids and positions; returns each token's slot, int [T], and its position, int64 [T]."""
        ids, positions = self._token_ids.host, self._positions.host[:num_tokens]
        token_slots: np.ndarray = slots
        if num_tokens == len(slots):
            # Pure decode, the steady state: one token per row.
            positions[:] = computed
        else:
            token_slots = np.repeat(slots, scheduled)
            first_token = self._query_start_loc.host[: len(slots)]
            np.add(self._arange[:num_tokens], np.repeat(computed - first_token, scheduled), out=positions)
        ids[:num_tokens] = self._state.token_ids[token_slots, positions]
        if padded > num_tokens:
            ids[num_tokens:padded] = 0
            self._positions.host[num_tokens:padded] = 0
        return token_slots, positions

    def _map_slots(
        self, group: int, table: BlockTable, token_slots: np.ndarray, positions: np.ndarray, padded: int
    ) -> None:
        mapping = self._slot_mappings[group].host
        if not table.follows_tokens:
            mapping[:padded] = 0
            return
        num_tokens, size, place = len(token_slots), table.block_size, self._places[group]
        blocks, offsets = np.divmod(positions, size)
        is_held: np.ndarray | None = None
        if place is not None:
            offsets, is_held = place.local_offsets(offsets)
            size //= place.shards.num_ranks
        np.multiply(table.ids[token_slots, blocks], size, out=mapping[:num_tokens], casting="unsafe", dtype=np.int64)
        mapping[:num_tokens] += offsets
        if is_held is not None:
            mapping[:num_tokens][~is_held] = UNWRITTEN_SLOT
        if padded > num_tokens:
            mapping[num_tokens:padded] = UNWRITTEN_SLOT

    def _fill_table(self, group: int, table: BlockTable, slots: Int32Array, longest: int, padded_rows: int) -> None:
        """Only the columns the longest row reaches are refreshed; nothing may look beyond a row's length."""
        target, ratio = self._block_tables[group].host, self._kernel_blocks[group]
        reached = table.max_blocks if table.is_foreign else -(-longest // table.block_size)
        columns = min(reached, table.max_blocks)
        rows = table.ids[slots, :columns]
        if ratio == 1:
            target[: len(slots), :columns] = rows
        else:
            split = rows[:, :, None] * ratio + np.arange(ratio, dtype=np.int32)
            target[: len(slots), : columns * ratio] = split.reshape(len(slots), -1)
        if padded_rows > len(slots):
            target[len(slots) : padded_rows] = NULL_BLOCK_ID


def _in_order(drafts: TokenUpdate | None, order: np.ndarray) -> TokenUpdate | None:
    """``drafts`` of the step's rows in batch order."""
    if drafts is None:
        return None
    counts = drafts.counts[order]
    first = (np.cumsum(drafts.counts) - drafts.counts)[order]
    places = np.arange(len(drafts.ids)) + np.repeat(first - (np.cumsum(counts) - counts), counts)
    return TokenUpdate(counts, drafts.ids[places])
