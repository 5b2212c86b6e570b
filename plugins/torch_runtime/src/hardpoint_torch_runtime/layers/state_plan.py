"""What a step does with recurrent states: which are read, how rows are cut into chunks, which states are kept.

Legend: R rows, T tokens, D decode rows. A state sums up all tokens before it. A row's *chunk* is a range of its tokens
that is computed at once; *wave* number k has chunk number k of every row that has so many.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata
from hardpoint.interfaces.kv_cache_specs import MambaCacheMode, MambaSpec

__all__ = ["CHUNK_TOKENS", "DecodeRows", "ScanRows", "ScanWave", "StateMetadata", "StateMetadataBuilder", "whole_row"]

CHUNK_TOKENS = 64
"""Within a chunk the work grows with its square, between chunks with the size of the state; they balance near here."""


@dataclass(frozen=True, slots=True)
class DecodeRows:
    """Rows 0 to D - 1, whose only tokens are tokens 0 to D - 1. All int64.

    Attributes:
        reads, writes: [D], the blocks of the states before and after the token.
        fresh: of rows that start from nothing, whatever their block holds.
    """

    reads: torch.Tensor
    writes: torch.Tensor
    fresh: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScanWave:
    """Some rows' next chunks, each padded to the longest, Q tokens. Indices are int64.

    Attributes:
        rows: [N], among the scanned rows.
        tokens: [N * Q], for each place its token among the scanned ones; padding repeats the chunk's last.
        is_padding: bool [N, Q], or None where all chunks are equally long.
        places: [n], the places that are no padding, in the order of their tokens.
        kept, blocks: [S], entries of ``rows`` whose state after the chunk is kept, and where.
    """

    rows: torch.Tensor
    tokens: torch.Tensor
    is_padding: torch.Tensor | None
    places: torch.Tensor
    kept: torch.Tensor
    blocks: torch.Tensor


@dataclass(frozen=True, slots=True)
class ScanRows:
    """Rows with any number of tokens, which lie behind those of the decode rows. Indices are int64.

    Attributes:
        num_tokens: T of these rows.
        row_of_token: [T].
        reads, fresh: as for decodes.
        kept_rows, kept_lengths, blocks: [K], for each state that is kept: its row, how many of the row's tokens are
            behind it, and where it goes.
        starts: [R], each row's first token.
        waves: in their order.
    """

    num_tokens: int
    row_of_token: torch.Tensor
    reads: torch.Tensor
    fresh: torch.Tensor
    starts: torch.Tensor
    kept_rows: torch.Tensor
    kept_lengths: torch.Tensor
    blocks: torch.Tensor
    waves: tuple[ScanWave, ...]


@dataclass(frozen=True, slots=True)
class StateMetadata:
    """Metadata of recurrent layers. Tokens behind those of both kinds of rows are padding."""

    decodes: DecodeRows | None
    scans: ScanRows | None

    @property
    def num_decodes(self) -> int:
        return 0 if self.decodes is None else len(self.decodes.reads)


@dataclass(frozen=True, slots=True)
class _Chunk:
    """Tokens ``begin`` to ``end`` of a row; ``position`` is the one in the table that its state is kept at, if so."""

    begin: int
    end: int
    position: int | None


class StateMetadataBuilder(AttentionMetadataBuilder):
    """Plans for all layers of one group at once. Rows with one token come first, so that they need no scan.

    ``common.block_size`` is the number of tokens per position of the block table: block p holds the state after the
    last computed one of its tokens. Where one block serves a whole sequence that is all of them.
    """

    reorder_threshold = 1

    def __init__(self, spec: MambaSpec, device: torch.device, chunk_tokens: int = CHUNK_TOKENS) -> None:
        self._device = device
        self._chunk_tokens = chunk_tokens
        self._num_checkpoints = spec.num_checkpoint_blocks if spec.mode is MambaCacheMode.ALIGN else None

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> StateMetadata:
        """Rows beyond ``common.num_rows`` are padding and left out.

        Raises ``RuntimeError`` where the host does not know the rows' lengths: a state cannot take tokens back.
        """
        del fast
        if not common.seq_lens_is_exact:
            raise RuntimeError(
                "recurrent layers go on from a state behind a known token, but the fate of earlier draft tokens is "
                "still open; run the model without speculation"
            )
        rows = common.num_rows
        starts = common.query_start_loc_cpu[: rows + 1].astype(np.int64)
        ends = common.seq_lens_cpu[:rows].astype(np.int64)
        lengths = np.diff(starts)
        computed = ends - lengths
        longer = np.flatnonzero(lengths != 1)
        split = int(longer[0]) if len(longer) else rows
        tables = common.block_table
        return StateMetadata(
            self._decodes(tables[:split], computed[:split], common.block_size) if split else None,
            self._scans(tables[split:rows], computed[split:], starts[split:] - split, common.block_size)
            if split < rows
            else None,
        )

    def _decodes(self, tables: torch.Tensor, computed: np.ndarray, size: int) -> DecodeRows:
        rows = np.arange(len(computed))
        return DecodeRows(
            reads=self._blocks(tables, rows, np.maximum(computed - 1, 0) // size),
            writes=self._blocks(tables, rows, computed // size),
            fresh=self._upload(np.flatnonzero(computed == 0)),
        )

    def _scans(self, tables: torch.Tensor, computed: np.ndarray, starts: np.ndarray, size: int) -> ScanRows:
        """``starts`` [R + 1] count from the first scanned token."""
        lengths = np.diff(starts)
        rows = np.arange(len(computed))
        chunks = [
            self._chunks(first, count, size) for first, count in zip(computed.tolist(), lengths.tolist(), strict=True)
        ]
        kept = [(row, chunk) for row, of_row in enumerate(chunks) for chunk in of_row if chunk.position is not None]
        kept_rows = np.array([row for row, _ in kept], dtype=np.int64)
        blocks = self._blocks(tables, kept_rows, np.array([chunk.position for _, chunk in kept], dtype=np.int64))
        number = {(row, chunk.end): index for index, (row, chunk) in enumerate(kept)}
        return ScanRows(
            num_tokens=int(starts[-1]),
            row_of_token=self._upload(np.repeat(rows, lengths)),
            reads=self._blocks(tables, rows, np.maximum(computed - 1, 0) // size),
            fresh=self._upload(np.flatnonzero(computed == 0)),
            starts=self._upload(starts[:-1]),
            kept_rows=self._upload(kept_rows),
            kept_lengths=self._upload(np.array([chunk.end for _, chunk in kept], dtype=np.int64)),
            blocks=blocks,
            waves=tuple(
                self._wave(wave, chunks, starts, number, blocks) for wave in range(max(map(len, chunks), default=0))
            ),
        )

    def _chunks(self, computed: int, count: int, size: int) -> list[_Chunk]:
        """Of a row with ``computed`` tokens before its ``count`` new ones: cut where states are kept, and else as long
        as chunks may be."""
        end = computed + count
        last = (end - 1) // size
        first = computed // size
        if self._num_checkpoints is not None:
            first = max(first, last - self._num_checkpoints)
        positions = {(position + 1) * size - computed: position for position in range(first, last)}
        positions[count] = last
        chunks, begin = [], 0
        for stop, position in positions.items():
            while stop - begin > self._chunk_tokens:
                chunks.append(_Chunk(begin, begin + self._chunk_tokens, None))
                begin += self._chunk_tokens
            chunks.append(_Chunk(begin, stop, position))
            begin = stop
        return chunks

    def _wave(
        self,
        wave: int,
        chunks: Sequence[Sequence[_Chunk]],
        starts: np.ndarray,
        number: dict[tuple[int, int], int],
        blocks: torch.Tensor,
    ) -> ScanWave:
        members = [(row, of_row[wave]) for row, of_row in enumerate(chunks) if wave < len(of_row)]
        rows = np.array([row for row, _ in members], dtype=np.int64)
        begins = starts[rows] + np.array([chunk.begin for _, chunk in members])
        lengths = np.array([chunk.end - chunk.begin for _, chunk in members])
        offsets = np.arange(int(lengths.max()))
        is_padding = offsets >= lengths[:, None]
        tokens = begins[:, None] + np.minimum(offsets, lengths[:, None] - 1)
        kept = [index for index, (_, chunk) in enumerate(members) if chunk.position is not None]
        stored = [number[members[index][0], members[index][1].end] for index in kept]
        return ScanWave(
            rows=self._upload(rows),
            tokens=self._upload(tokens.reshape(-1)),
            is_padding=self._upload(is_padding) if is_padding.any() else None,
            places=self._upload(np.flatnonzero(~is_padding)),
            kept=self._upload(np.array(kept, dtype=np.int64)),
            blocks=blocks[self._upload(np.array(stored, dtype=np.int64))],
        )

    def _blocks(self, tables: torch.Tensor, rows: np.ndarray, positions: np.ndarray) -> torch.Tensor:
        return tables[self._upload(rows), self._upload(positions)].long()

    def _upload(self, values: np.ndarray) -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).to(self._device, non_blocking=True)


def whole_row(num_tokens: int, device: torch.device) -> StateMetadata:
    """All tokens as one row that starts from nothing and whose states nobody keeps: what profiling computes."""
    chunks = range(0, num_tokens, CHUNK_TOKENS)
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    first = torch.zeros(1, dtype=torch.int64, device=device)
    waves = []
    for begin in chunks:
        tokens = torch.arange(begin, min(begin + CHUNK_TOKENS, num_tokens), device=device)
        places = torch.arange(len(tokens), device=device)
        waves.append(ScanWave(first, tokens, None, places, nothing, nothing))
    row_of_token = torch.zeros(num_tokens, dtype=torch.int64, device=device)
    return StateMetadata(
        None, ScanRows(num_tokens, row_of_token, first, first, first, nothing, nothing, nothing, tuple(waves))
    )
