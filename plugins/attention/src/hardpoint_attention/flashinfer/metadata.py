"""From a step's common metadata to what FlashInfer's wrappers are planned with.

Legend: R rows, B blocks per row, P pages of all rows.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from hardpoint.interfaces.attention import AttentionMetadataBuilder, CommonAttentionMetadata, GraphSupport
from hardpoint_attention.flash.buffers import StagedBuffer
from hardpoint_attention.flashinfer.plans import PlanKey, PlanTable
from hardpoint_attention.flashinfer.steps import PagedRows, Step, last_page_lens, page_counts

__all__ = ["FlashInferBuilder", "FlashInferMetadata", "KnownKey"]

KnownKey = tuple[PlanKey, torch.dtype]
"""What a layer's wrappers are planned for, and the dtype of its queries."""


@dataclass(frozen=True, slots=True)
class FlashInferMetadata:
    """One step as all layers of a KV group see it; valid until the next build."""

    step: Step
    plans: PlanTable


class FlashInferBuilder(AttentionMetadataBuilder):
    """Plans while it builds. Decodes are wanted in front, where they have kernels of their own.

    Captured steps are those of decodes only: each size of step keeps the buffers that its graph reads.
    """

    graph_support = GraphSupport.DECODE_ONLY
    reorder_threshold = 1

    def __init__(
        self,
        plans: PlanTable,
        layer_names: Sequence[str],
        known: Mapping[str, KnownKey],
        device: torch.device,
        *,
        max_pages: int,
        separates_decodes: bool,
    ) -> None:
        self._plans = plans
        self._names, self._known = tuple(layer_names), known
        self._separates = separates_decodes
        self._places = StagedBuffer((max_pages,), device)
        self._page_ids = torch.zeros(max_pages, dtype=torch.int32, device=device)
        self._captured: dict[int, Step] = {}

    def build(self, common: CommonAttentionMetadata, *, fast: bool = False) -> FlashInferMetadata:
        """Raises ``TypeError`` for causality that differs by row. Waits for the device where the host has bounds of
        lengths only: planning needs the true ones."""
        del fast
        if not isinstance(common.causal, bool):
            raise TypeError(
                "causality that differs by row was given, which FlashInfer does not take; declare uses_row_causality "
                "so that another backend is chosen"
            )
        host = common.seq_lens_cpu if common.seq_lens_is_exact else common.seq_lens.cpu().numpy()
        if common.for_graph:
            step = self._captured_step(common, host)
        else:
            step = self._step(common, host)
        self._plans.start(step, dict.fromkeys(self._known[name] for name in self._names if name in self._known))
        return FlashInferMetadata(step, self._plans)

    def _step(self, common: CommonAttentionMetadata, host: np.ndarray) -> Step:
        rows = common.num_rows
        lengths = host[:rows].astype(np.int64)
        starts = common.query_start_loc_cpu[: rows + 1].astype(np.int64)
        num_decodes = self._count_decodes(starts)
        page_starts = self._pick_pages(common, lengths)
        last = last_page_lens(lengths, common.block_size)
        parts = []
        for begin, end in ((0, num_decodes), (num_decodes, rows)):
            first = int(page_starts[begin])
            part = PagedRows(
                query_starts=_int32(starts[begin : end + 1] - starts[begin]),
                page_starts=_int32(page_starts[begin : end + 1] - first),
                pages=self._page_ids,
                first_page=first,
                last_page_lens=_int32(last[begin:end]),
            )
            parts.append(part if begin < end else None)
        return Step(
            num_tokens=common.num_tokens,
            page_size=common.block_size,
            causal=bool(common.causal),
            decodes=parts[0],
            others=parts[1],
            fresh_starts=_int32(starts),
            fresh_key_starts=_int32(np.concatenate(([0], np.cumsum(lengths)))),
            for_graph=False,
        )

    def _captured_step(self, common: CommonAttentionMetadata, host: np.ndarray) -> Step:
        """Decodes only. Padded rows read one token of the null block; their output is nobody's."""
        rows = common.seq_lens.shape[0]
        step = self._captured.get(rows)
        decodes = None if step is None else step.decodes
        if step is None or decodes is None:
            starts, page_starts = (torch.arange(rows + 1, dtype=torch.int32) for _ in range(2))
            decodes = PagedRows(starts, page_starts, self._page_ids, 0, torch.zeros(rows, dtype=torch.int32))
            step = Step(rows, common.block_size, bool(common.causal), decodes, None, starts, starts, for_graph=True)
            self._captured[rows] = step
        lengths = np.maximum(host[:rows].astype(np.int64), 1)
        decodes.page_starts.copy_(_int32(self._pick_pages(common, lengths)))
        decodes.last_page_lens.copy_(_int32(last_page_lens(lengths, common.block_size)))
        return step

    def _count_decodes(self, starts: np.ndarray) -> int:
        """Leading rows of one query, for the wrapper that is made for them."""
        query_lens = np.diff(starts)
        leading = int(np.argmax(query_lens != 1)) if (query_lens != 1).any() else len(query_lens)
        return leading if self._separates else 0

    def _pick_pages(self, common: CommonAttentionMetadata, lengths: np.ndarray) -> np.ndarray:
        """Where each row's pages begin, int64 [R + 1]; the ids of all pages, one after another, to the device's buffer.

        The host knows how many blocks each row has but not which; so the device picks them from its table.
        """
        counts = page_counts(lengths, common.block_size)
        page_starts = np.concatenate(([0], np.cumsum(counts)))
        total = int(page_starts[-1])
        table = common.block_table
        places = self._places.stage()
        if total > places.shape[0]:
            raise ValueError(f"{total} pages do not fit the {places.shape[0]} reserved; raise the option max_pages")
        rows = np.repeat(np.arange(len(counts)), counts)
        places[:total] = rows * table.stride(0) + np.arange(total) - np.repeat(page_starts[:-1], counts)
        places[total:] = 0
        flat = table.as_strided((table.stride(0) * (table.shape[0] - 1) + table.shape[1],), (1,))
        torch.index_select(flat, 0, self._places.upload()[:total], out=self._page_ids[:total])
        return page_starts


def _int32(values: np.ndarray) -> torch.Tensor:
    return torch.from_numpy(values.astype(np.int32))
