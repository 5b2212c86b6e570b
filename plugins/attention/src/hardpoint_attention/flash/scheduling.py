"""When tiles are laid out ahead of the call, into how many pieces keys may be split, and the calls that do so."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch

from hardpoint_attention.flash.layers import GroupTraits, LayerView
from hardpoint_attention.flash.metadata import RowPart
from hardpoint_attention.flash.views import window_pair

__all__ = ["SchedulePlanner", "plans_ahead", "schedule_size", "split_bound"]


def plans_ahead(generations: frozenset[int], *, fast: bool, batch_invariant: bool) -> bool:
    """R5.31: of generation 3 alone, for builds that may take their time, where batch invariance does not forbid it."""
    return generations == {3} and not fast and not batch_invariant


def split_bound(*, configured: int, num_tokens: int, graph_tokens: int, for_graph: bool, batch_invariant: bool) -> int:
    """R5.33: splits a kernel may make of the keys; 0 leaves it to the kernel.

    A bound is only set for captured steps of up to ``graph_tokens``: more than one split takes scratch memory of
    [splits, heads, tokens, head size], which a graph must have before it is captured.
    """
    if batch_invariant:
        return 1
    return configured if for_graph and num_tokens <= graph_tokens else 0


def schedule_size(max_rows: int) -> int:
    """R5.34: entries of the longest schedule of ``max_rows`` rows."""
    return 1 + -(-max_rows // 4) * 4 * 4


@dataclass(frozen=True, slots=True)
class SchedulePlanner:
    """Asks generation 3 for the schedule of a call. ``head_size`` and ``dtype`` are those of the group's layers."""

    function: Callable[..., torch.Tensor]
    num_kv_heads: int
    head_size: int
    dtype: torch.dtype

    def plan(
        self, part: RowPart, traits: GroupTraits, view: LayerView, page_size: int, num_splits: int
    ) -> torch.Tensor:
        """int32 [S], fresh from the package, for layers that see ``view``."""
        arguments: dict[str, Any] = {
            "batch_size": part.key_lens.shape[0],
            "max_seqlen_q": part.max_query_len,
            "max_seqlen_k": part.max_key_len,
            "num_heads_q": traits.num_heads,
            "num_heads_kv": self.num_kv_heads,
            "headdim": self.head_size,
            "cache_seqlens": part.key_lens,
            "qkv_dtype": self.dtype,
            "cu_seqlens_q": part.cu_query_lens,
            "page_size": page_size,
            "causal": part.causal,
            "window_size": window_pair(view[0], part.causal),
            "attention_chunk": view[1] or 0,
            "has_softcap": traits.has_soft_cap,
            "num_splits": num_splits,
        }
        return self.function(**arguments)
