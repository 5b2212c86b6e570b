"""Per-step records of FlashAttention layers: which kernel calls a step takes and what each is given.

Legend: R rows (padded ones included), T query tokens, P pages per row.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from hardpoint_attention.dcp import QuerySplit
from hardpoint_attention.flash.layers import LayerView

__all__ = ["CascadeParts", "ContextParts", "FlashMetadata", "RowPart"]


@dataclass(frozen=True, slots=True)
class RowPart:
    """Rows and keys of one call (R5.20). Context is what was cached before, query what is new, sequence both.

    Attributes:
        cu_query_lens: int32 [R + 1].
        max_query_len, max_key_len: of any row, on the host; the latter may be an upper bound.
        key_lens: int32 [R], keys of each row; ``cu_key_lens`` int32 [R + 1] their prefix sums, where asked for.
        page_table: int32 [R, P].
        causal: whether this part is.
        schedule: tiles laid out ahead, for layers that see ``FlashMetadata.scheduled_view``.
    """

    cu_query_lens: torch.Tensor
    max_query_len: int
    key_lens: torch.Tensor
    max_key_len: int
    page_table: torch.Tensor
    causal: bool
    cu_key_lens: torch.Tensor | None = None
    schedule: torch.Tensor | None = None


@dataclass(frozen=True, slots=True)
class CascadeParts:
    """R5.21: all queries as one sequence over the shared ``prefix_tokens``, and each row's over what follows."""

    prefix_tokens: int
    prefix: RowPart
    suffix: RowPart


@dataclass(frozen=True, slots=True)
class ContextParts:
    """R5.22: what of the contexts is in this rank's cache, and the step's own tokens (DCP).

    ``context`` is not causal; ``has_context`` False: no rank has any, so that it can be left out. ``counts`` separates
    decodes from prefills, where the batch has the former in front.
    """

    context: RowPart
    has_context: bool
    counts: QuerySplit | None


@dataclass(frozen=True, slots=True)
class FlashMetadata:
    """One step as all layers of a KV group see it.

    Attributes:
        num_tokens, num_rows: real ones, without padding.
        plain: the whole step in one call.
        cascade: the step in two, for layers that may; ``context``: with contexts dealt out among ranks.
        slot_mapping: int64 [T].
        causal: of the group; layers of other kinds know better.
        max_splits: 0 leaves the number of splits to the kernel.
        ranges: int32 [2, T], begins and ends of the range in which each query token lies, both 0 for none.
        scheduled_view: window and chunk size for which tiles were laid out ahead.
        prompt_lens: int32 [R], for layers that keep the prompt beside their window.
    """

    num_rows: int
    num_tokens: int
    plain: RowPart
    slot_mapping: torch.Tensor
    causal: bool
    max_splits: int
    cascade: CascadeParts | None = None
    context: ContextParts | None = None
    ranges: torch.Tensor | None = None
    prompt_lens: torch.Tensor | None = None
    scheduled_view: LayerView | None = None
