"""Layouts and windows by arithmetic alone: views of the cache, strides of size-one dimensions, window pairs.

Legend: N blocks, B block size, K KV heads, D head size.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["cache_views", "canonical_strides", "canonicalized", "symmetric_window", "window_pair"]

FULL_WINDOW = (-1, -1)
ALIGNMENT_BYTES = 16
"""Tensor memory accelerators want every stride at a multiple of it."""


def cache_views(kv_cache: torch.Tensor, head_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values [N, B, K, D] of a cache [N, K, B, 2 D]: the same bytes, seen by other strides (R5.41).

    Raises ``ValueError`` for a cache whose content is not keys and values side by side.
    """
    if kv_cache.dim() != 4 or kv_cache.shape[-1] != 2 * head_size or kv_cache.stride(-1) != 1:
        raise ValueError(
            f"KV cache of shape {tuple(kv_cache.shape)} and strides {kv_cache.stride()} does not hold keys and values "
            f"side by side; expected [blocks, KV heads, block size, {2 * head_size}] with adjacent entries"
        )
    by_token = kv_cache.transpose(1, 2)
    return by_token[..., :head_size], by_token[..., head_size:]


def canonical_strides(shape: Sequence[int], strides: Sequence[int], itemsize: int) -> tuple[int, ...]:
    """``strides`` with those of size-one dimensions replaced by aligned ones; they are never followed (R5.42).

    A dimension of size one gets the extent of what lies within it, rounded up to the alignment; the innermost gets 1.
    """
    unit = max(1, ALIGNMENT_BYTES // itemsize)
    result = list(strides)
    extent = 1
    for dim in range(len(shape) - 1, -1, -1):
        is_last = dim == len(shape) - 1
        if shape[dim] == 1:
            result[dim] = 1 if is_last else -(-extent // unit) * unit
        extent = max(extent, result[dim] * shape[dim])
    return tuple(result)


def canonicalized(values: torch.Tensor) -> torch.Tensor:
    """``values`` itself, or the same elements under canonical strides where a dimension has size one."""
    if 1 not in values.shape:
        return values
    strides = canonical_strides(values.shape, values.stride(), values.element_size())
    return values if strides == values.stride() else values.as_strided(values.shape, strides)


def window_pair(sliding_window: int | None, causal: bool | torch.Tensor) -> tuple[int, int]:
    """Keys to the left and to the right of a query's own that it may see; -1: all of them.

    ``sliding_window`` counts the query's own position.
    """
    if sliding_window is None:
        return FULL_WINDOW
    return symmetric_window((sliding_window - 1, 0), causal)


def symmetric_window(window: tuple[int, int], causal: bool | torch.Tensor) -> tuple[int, int]:
    """R5.44: ``(w, 0)`` becomes ``(w, w)`` where attention is not causal. Causality per row counts as not causal."""
    if causal is True or window[0] < 0 or window[1] != 0:
        return window
    return window[0], window[0]
