"""A layer's keys and values as kernels take them: views of its cache, or the step's own. Nothing is copied."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["CachedStates", "given_states", "paged_states"]

SCALE_BYTES = 8


@dataclass(frozen=True, slots=True)
class CachedStates:
    """Legend: K KV heads, T tokens, B block size, D head size, V size of values.

    Attributes:
        keys, values: [blocks, K, B, D] of the cache, or [K, T, D] of the step with ``block_size`` 0. ``values`` None:
            the first ``value_size`` entries of keys.
        token_scales: float32 [blocks, K, B, 2] of keys and values, by head and token.
        is_quantized: elements stand for others, by scales.
        limit: largest magnitude of a quantized element.
    """

    keys: torch.Tensor
    values: torch.Tensor | None
    block_size: int
    value_size: int
    token_scales: torch.Tensor | None = None
    is_quantized: bool = False
    limit: float | None = None


def given_states(key: torch.Tensor, value: torch.Tensor) -> CachedStates:
    """Of ``key`` and ``value`` [T, K, D]."""
    return CachedStates(key.transpose(0, 1), value.transpose(0, 1), 0, value.shape[-1])


def paged_states(
    kv_cache: torch.Tensor, head_size: int, value_size: int | None = None, *, converts_e4m3: bool = True
) -> CachedStates:
    """Of [blocks, K, B, 2 D], with 8 bytes more where scales lie behind, or of latents [blocks, 1, B, D] whose first
    ``value_size`` entries are values. Where the device does not know float8_e4m3fn, its elements come as uint8 codes.

    Raises ``ValueError`` for another width.
    """
    width, block_size, dtype = kv_cache.shape[-1], kv_cache.shape[2], kv_cache.dtype
    is_float8 = dtype in (torch.float8_e4m3fn, torch.float8_e5m2)
    limit = torch.finfo(dtype).max if is_float8 else None
    if dtype is torch.float8_e4m3fn and not converts_e4m3:
        kv_cache = kv_cache.view(torch.uint8)
    if width == head_size:
        size = head_size if value_size is None else value_size
        return CachedStates(kv_cache, None, block_size, size, is_quantized=is_float8, limit=limit)
    keys, values = kv_cache[..., :head_size], kv_cache[..., head_size : 2 * head_size]
    if width == 2 * head_size:
        return CachedStates(keys, values, block_size, head_size, is_quantized=is_float8, limit=limit)
    if width == 2 * head_size + SCALE_BYTES and dtype is torch.int8:
        scales = kv_cache[..., 2 * head_size :].view(torch.float32)
        return CachedStates(keys, values, block_size, head_size, scales, is_quantized=True)
    raise ValueError(
        f"a KV cache of shape {tuple(kv_cache.shape)} in {dtype} does not hold heads of {head_size}; expected "
        f"[blocks, heads, block size, {2 * head_size}], or {2 * head_size + SCALE_BYTES} of int8, or {head_size} of "
        "latents"
    )
