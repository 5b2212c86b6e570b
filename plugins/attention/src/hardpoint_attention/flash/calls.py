"""What one kernel call needs, and what a generation's adaptor is.

Legend: T query tokens, H query heads, K KV heads, D head size, R rows, N cache blocks, B block size, P pages per row.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch

__all__ = ["AttentionCall", "FlashKernel", "accepts", "copy_result"]


@dataclass(slots=True)
class AttentionCall:
    """Arguments of one call, in terms that all generations share.

    Attributes:
        query, output: [T, H, D]; tokens behind the last row's are left alone or filled with anything.
        key, value: [N, B, K, D] with ``page_table``, else [T', K, D] of tokens laid end to end.
        cu_query_lens: int32 [R + 1]; cu_key_lens the same of keys, where the generation or the lack of pages asks.
        key_lens: int32 [R], keys that a row sees.
        page_table: int32 [R, P].
        causal: aligned to the last query and the last key of a row.
        window: keys left and right of a query's own; -1: all.
        key_descale, value_descale: float32 [R, K], by which stored values are multiplied.
        num_splits: 0 leaves it to the kernel.
        schedule: tiles laid out ahead of the call (generation 3).
        mask: replaces ``causal`` and ``window``, which must then be off; ``mask_tensors`` are what it reads.
        chunk_size: 0: no chunks.
        wants_lse: return the natural log-sum-exp.
    """

    query: torch.Tensor
    key: torch.Tensor
    value: torch.Tensor
    output: torch.Tensor
    cu_query_lens: torch.Tensor
    max_query_len: int
    max_key_len: int
    scale: float
    causal: bool
    window: tuple[int, int]
    soft_cap: float = 0.0
    key_lens: torch.Tensor | None = None
    cu_key_lens: torch.Tensor | None = None
    page_table: torch.Tensor | None = None
    alibi_slopes: torch.Tensor | None = None
    sinks: torch.Tensor | None = None
    key_descale: torch.Tensor | None = None
    value_descale: torch.Tensor | None = None
    num_splits: int = 0
    schedule: torch.Tensor | None = None
    mask: Callable[..., Any] | None = None
    mask_tensors: list[torch.Tensor] | None = None
    chunk_size: int = 0
    wants_lse: bool = False


class FlashKernel(Protocol):
    """One generation, as the layers call it."""

    generation: int
    needs_cu_key_lens: bool
    """Key lengths of paged rows are wanted as prefix sums too."""
    needs_canonical_strides: bool

    def lacks(self, *, masks: bool, scales: bool) -> str | None:
        """What the installed package is too old for, of what a layer will ask; None: nothing."""

    def __call__(self, call: AttentionCall) -> torch.Tensor | None:
        """Fill ``call.output``; the log-sum-exp float32 [H, T] where it is wanted."""


def accepts(function: Callable[..., Any], name: str) -> bool:
    """Whether ``function`` has a parameter of this name: packages of one generation differ in what they offer."""
    try:
        return name in inspect.signature(function).parameters
    except (TypeError, ValueError):
        return False


def copy_result(call: AttentionCall, result: Any, *, takes_out: bool) -> torch.Tensor | None:
    """Put what a kernel returned into ``call.output``; kernels return the output alone or with the log-sum-exp."""
    output, lse = (result[0], result[1]) if isinstance(result, tuple) else (result, None)
    if not takes_out:
        call.output.copy_(output)
    return lse if call.wants_lse else None
