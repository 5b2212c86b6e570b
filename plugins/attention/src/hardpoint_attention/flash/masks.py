"""Masks of generation 4 beyond causality and windows, and the same predicates in plain arithmetic.

A mask is compiled into the kernel, under a key that includes the function object's closure. So factories are memoized
by their parameters: a fresh closure per call would compile anew in every forward (R5.53).

The kernel hands a mask the index of the query *within the row's query tokens* but the absolute index of the key
(R5.52); ``absolute = local + key length - query length``.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import Any

from hardpoint.errors import ConfigError

__all__ = ["MaskShape", "absolute_query", "mask_for"]


@dataclass(frozen=True, slots=True)
class MaskShape:
    """Parameters of a mask; equal ones share one compiled kernel.

    Attributes:
        causal, window, chunk_size: what a query sees by position. ``window`` counts the query's own.
        keeps_prompt: keys of the prompt stay visible beyond the window.
        has_ranges: keys of the range in which the query lies are visible in any case.
    """

    causal: bool = True
    window: int | None = None
    chunk_size: int | None = None
    keeps_prompt: bool = False
    has_ranges: bool = False

    def sees(self, query: Any, key: Any, prompt_len: Any = 0, begin: Any = 0, end: Any = 0) -> Any:
        """Whether the query at an absolute position sees a key (R5.50, R5.55); numbers, arrays or a kernel's values.

        ``[begin, end)`` is the range that the query lies in, empty where it lies in none.
        """
        seen = key <= query if self.causal else key >= 0
        if self.window is not None:
            near = query - key < self.window
            if not self.causal:
                near = near & (key - query < self.window)
            seen = seen & (near | (key < prompt_len) if self.keeps_prompt else near)
        if self.chunk_size is not None:
            seen = seen & (query // self.chunk_size == key // self.chunk_size)
        return seen | ((key >= begin) & (key < end)) if self.has_ranges else seen


def absolute_query(local: Any, query_len: Any, key_len: Any) -> Any:
    """R5.52: the position of a query that is number ``local`` of its row's ``query_len``."""
    return local + key_len - query_len


@cache
def mask_for(shape: MaskShape) -> Callable[..., Any]:
    """The kernel's mask, one object per ``shape``.

    It reads, in this order where the shape has them: int32 [2, T] begins and ends of the range of each query token;
    int32 [R] lengths of prompts. Raises ``ConfigError`` when the kernel's language is not installed.
    """
    try:
        cutlass = importlib.import_module("cutlass")
        cute = importlib.import_module("cutlass.cute")
        utils = importlib.import_module("flash_attn.cute.utils")
    except ImportError as error:
        raise ConfigError(f"masks of FlashAttention 4 need nvidia-cutlass-dsl, which fails to load: {error}") from error

    def lane(value: Any) -> Any:
        # One lane only: a call must not span query rows, whose bounds differ (R5.54).
        return utils.scalar_to_ssa(value, cutlass.Int32)

    mask = cute.jit(_mask(shape, lane))
    mask.__vec_size__ = 1
    return mask


def _mask(shape: MaskShape, lane: Callable[[Any], Any]) -> Callable[..., Any]:
    # What depends on the shape is chosen out here: inside, a condition would become one of the kernel's.
    find_bounds = _range_bounds if shape.has_ranges else _no_bounds
    find_prompt = _prompt_len if shape.keeps_prompt else _no_prompt

    def mask(batch: Any, head: Any, query: Any, key: Any, lengths: Any, tensors: Any) -> Any:
        position = absolute_query(query, lane(lengths.seqlen_q), lane(lengths.seqlen_k))
        begin, end = find_bounds(lane, tensors, lengths.offset_q + query[0])
        return shape.sees(position, key, find_prompt(lane, tensors, batch[0]), begin, end)

    return mask


def _range_bounds(lane: Callable[[Any], Any], tensors: Any, token: Any) -> tuple[Any, Any]:
    return lane(tensors[0][0, token]), lane(tensors[0][1, token])


def _no_bounds(lane: Callable[[Any], Any], tensors: Any, token: Any) -> tuple[Any, Any]:
    return 0, 0


def _prompt_len(lane: Callable[[Any], Any], tensors: Any, row: Any) -> Any:
    return lane(tensors[-1][row])


def _no_prompt(lane: Callable[[Any], Any], tensors: Any, row: Any) -> Any:
    return 0
