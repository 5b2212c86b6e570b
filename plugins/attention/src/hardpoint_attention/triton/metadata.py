"""Per-step metadata: references to the step's own device tensors, and persistent buffers for what is made here.

Legend: R rows, T tokens of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata, GraphSupport

__all__ = ["MaskFacts", "TritonMetadata", "TritonMetadataBuilder"]


@dataclass(frozen=True, slots=True)
class MaskFacts:
    """What of visibility a step brings along; layers add windows and chunks of their own.

    Attributes:
        causal: True or False, or None where ``row_causal`` says it.
        row_causal: bool [R].
        prompt_lens: int32 [R], for layers that keep the prompt.
        range_starts, ranges: int32 [R + 1] and [ranges, 2]: row r's bidirectional ranges are those from
            ``range_starts[r]`` to ``range_starts[r + 1]``.
    """

    causal: bool | None = True
    row_causal: torch.Tensor | None = None
    prompt_lens: torch.Tensor | None = None
    range_starts: torch.Tensor | None = None
    ranges: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class TritonMetadata:
    """One step as the layers of a KV group see it.

    Attributes:
        num_rows, num_tokens, max_query_len, max_seq_len: known to the host, and the same at every replay of a graph.
        query_start_loc: int32 [R + 1]. ``seq_lens``: int32 [R]. ``block_table``: int32 [R, blocks].
        key_starts: int32 [R + 1], where each row's keys begin among the step's own; ``query_start_loc`` but for
            cross-attention.
        common_prefix: keys that all rows share and that a cascade may compute apart; 0: none.
        prefix_starts, prefix_lens: the step as one row over the common prefix: int32 [2] and [1].
    """

    num_rows: int
    num_tokens: int
    max_query_len: int
    max_seq_len: int
    block_size: int
    query_start_loc: torch.Tensor
    seq_lens: torch.Tensor
    block_table: torch.Tensor
    key_starts: torch.Tensor
    masks: MaskFacts
    common_prefix: int = 0
    prefix_starts: torch.Tensor | None = None
    prefix_lens: torch.Tensor | None = None


class TritonMetadataBuilder(AttentionMetadataBuilder):
    """Takes rows in any order. Kernels find a row's queries by themselves, so there is no schedule to keep.

    Everything allocated is allocated here; a build copies what the host knows into it and zeroes what is behind.
    """

    graph_support = GraphSupport.ALWAYS
    reorder_threshold = None

    def __init__(self, max_rows: int, max_tokens: int, device: torch.device) -> None:
        self._device = device
        self._max_rows = max_rows
        self._range_starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        # Ranges are disjoint, and one counts only where it has a query of this step in it.
        self._ranges = torch.zeros((max(max_tokens, 1), 2), dtype=torch.int32, device=device)
        self._key_starts = torch.zeros(max_rows + 1, dtype=torch.int32, device=device)
        self._prefix = torch.zeros(3, dtype=torch.int32, device=device)

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> TritonMetadata:
        """Raises ``ValueError`` for a step beyond what the builder was made for."""
        del fast
        rows = common.num_rows
        if rows > self._max_rows:
            raise ValueError(f"a step of {rows} rows came to a builder made for {self._max_rows}; raise --max-num-seqs")
        prefix = self._common_prefix(common)
        return TritonMetadata(
            num_rows=rows,
            num_tokens=common.num_tokens,
            max_query_len=common.max_query_len,
            max_seq_len=common.max_seq_len,
            block_size=common.block_size,
            query_start_loc=common.query_start_loc,
            seq_lens=common.seq_lens,
            block_table=common.block_table,
            key_starts=self._starts_of_keys(common),
            masks=self._masks(common),
            common_prefix=prefix,
            prefix_starts=self._prefix[:2] if prefix else None,
            prefix_lens=self._prefix[2:] if prefix else None,
        )

    def _starts_of_keys(self, common: CommonAttentionMetadata) -> torch.Tensor:
        """Only without causality can the step's own keys be others than those of its queries (cross-attention)."""
        if common.causal is not False:
            return common.query_start_loc
        rows = common.num_rows
        torch.cumsum(common.seq_lens[:rows], 0, dtype=torch.int32, out=self._key_starts[1 : rows + 1])
        self._key_starts[rows + 1 :].zero_()
        return self._key_starts

    def _masks(self, common: CommonAttentionMetadata) -> MaskFacts:
        is_mixed = not isinstance(common.causal, bool)
        ranged = common.mm_ranges is not None
        if common.mm_ranges is not None:
            self._fill_ranges(common.mm_ranges, common)
        return MaskFacts(
            causal=None if is_mixed else bool(common.causal),
            row_causal=common.causal if isinstance(common.causal, torch.Tensor) else None,
            prompt_lens=common.prompt_lens,
            range_starts=self._range_starts if ranged else None,
            ranges=self._ranges if ranged else None,
        )

    def _fill_ranges(self, ranges: Sequence[Sequence[tuple[int, int]]], common: CommonAttentionMetadata) -> None:
        """R5.37. Ranges that end before this step's queries concern nobody in it."""
        starts = np.zeros(self._max_rows + 1, dtype=np.int32)
        packed = np.zeros(self._ranges.shape, dtype=np.int32)
        count = 0
        for row in range(self._max_rows):
            starts[row] = count
            for begin, end in ranges[row] if row < min(common.num_rows, len(ranges)) else ():
                if begin >= end or (common.seq_lens_is_exact and not self._concerns(begin, end, row, common)):
                    continue
                if count == len(packed):
                    raise ValueError(
                        f"more than {len(packed)} multimodal ranges have queries in one step; ranges of a row must not "
                        "overlap, and each takes at least one of the step's tokens"
                    )
                packed[count] = begin, end
                count += 1
        starts[self._max_rows] = count
        self._copy(self._range_starts, starts)
        self._copy(self._ranges, packed)

    @staticmethod
    def _concerns(begin: int, end: int, row: int, common: CommonAttentionMetadata) -> bool:
        seq_len = int(common.seq_lens_cpu[row])
        starts = common.query_start_loc_cpu
        return end > seq_len - int(starts[row + 1] - starts[row]) and begin < seq_len

    def _common_prefix(self, common: CommonAttentionMetadata) -> int:
        """Whole blocks. Not in graphs, whose replays would keep it; not without causality, where it is not first."""
        asked = common.num_common_prefix_blocks * common.block_size
        if not asked or common.for_graph or common.causal is not True or not common.seq_lens_is_exact:
            return 0
        # Queries of this step may lie in the last of the blocks, which nobody but themselves may see whole.
        contexts = common.seq_lens_cpu[: common.num_rows] - np.diff(common.query_start_loc_cpu[: common.num_rows + 1])
        length = min(asked, int(contexts.min()) // common.block_size * common.block_size)
        if length < 1:
            return 0
        self._copy(self._prefix, np.array([0, common.num_tokens, length], dtype=np.int32))
        return length

    def _copy(self, target: torch.Tensor, values: np.ndarray) -> None:
        """All of ``target``, in the stream's order. Host memory is new each time: that of an earlier build may still
        be on its way."""
        host = torch.from_numpy(values)
        target.copy_(host if self._device.type == "cpu" else host.pin_memory(), non_blocking=True)
