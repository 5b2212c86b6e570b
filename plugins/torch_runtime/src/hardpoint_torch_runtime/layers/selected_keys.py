"""Sparse attention: a query sees only those keys that an index of the model selects.

Legend: T tokens of the step (padding included), H query heads, K KV heads, D head size, V size of a head's values,
N keys selected for a query at most.
"""

from __future__ import annotations

from typing import Any, Protocol, runtime_checkable

import torch

__all__ = ["SelectedKeysImpl"]


@runtime_checkable
class SelectedKeysImpl(Protocol):
    """What an ``AttentionImpl`` has beside its usual methods if its backend accepts ``AttentionNeed.uses_sparse``."""

    def forward_selected(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        kv_cache: torch.Tensor | None,
        metadata: Any | None,
        selected: torch.Tensor,
        output: torch.Tensor,
    ) -> torch.Tensor:
        """``AttentionImpl.forward`` of queries that see fewer keys: those selected of what they would see anyway.

        ``selected`` is int32 [T, N], one row per query, the same for all heads. An entry is the position of a key in
        the sequence of the query's own row, from 0 on; a negative one selects nothing and may stand anywhere, for
        queries with fewer keys than N. Order means nothing, and a key that is named twice counts once. What is not
        visible without a selection stays invisible: keys after the query, beyond the row's end, or outside of a window.
        Entries of padded tokens are undefined. A query without a visible key gets zeros.

        Each layer and step has a selection of its own over the same metadata. Raises ``RuntimeError`` for metadata of
        contexts that are dealt out among ranks.
        """
