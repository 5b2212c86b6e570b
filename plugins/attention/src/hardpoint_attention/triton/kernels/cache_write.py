"""Scattering a step's keys and values into the cache by slot.

The cache comes by strides, so the physical layout [blocks, K, B, 2 D] and the kernels' view of it are one and the same.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

__all__ = ["write_states"]


@triton.jit
def _whole(values: Any) -> Any:
    """Float32 to the next whole number, halves to the even one: at this size there are no fractions left."""
    shift = 12582912.0
    return (values + shift) - shift


@triton.jit
def _scaled(values: Any, scale: Any, kv_head: Any, limit: Any, MANTISSA: tl.constexpr, LOWEST: tl.constexpr) -> Any:
    """Divided by the head's scale, and held within what the cache's elements can say.

    MANTISSA bits and LOWEST exponent of the elements are given to the interpreter, which casts to 8 bits but does not
    round; 0 bits: casting does it.
    """
    if scale is not None:
        values = values.to(tl.float32) / tl.load(scale[0] + kv_head * scale[1])
    if limit is not None:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -limit), limit)
    if MANTISSA > 0:
        exponent = tl.floor(tl.log2(tl.maximum(tl.abs(values.to(tl.float32)), 1e-30)))
        step = tl.exp2(tl.maximum(exponent, LOWEST) - MANTISSA)
        values = _whole(values / step) * step
    return values


@triton.jit
def _write(
    source: Any,
    target: Any,
    scale: Any,
    scales: Any,
    scale_place: Any,
    token: Any,
    place: Any,
    kv_head: Any,
    limit: Any,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    entry = tl.arange(0, PAD)
    in_use = entry < SIZE
    values = tl.load(source[0] + token * source[1] + kv_head * source[2] + entry * source[3], mask=in_use, other=0.0)
    if scales is not None:
        values = values.to(tl.float32)
        largest = tl.max(tl.abs(values), 0)
        token_scale = tl.where(largest > 0, largest / 127.0, 1.0)
        values = _whole(values / token_scale)
        tl.store(scales[0] + scale_place, token_scale)
    values = _scaled(values, scale, kv_head, limit, MANTISSA, LOWEST).to(target[0].dtype.element_ty)
    tl.store(target[0] + place + entry * target[4], values, mask=in_use)


@triton.jit
def write_states(
    key: Any,  # pointer and strides [T, K, D]
    value: Any,  # the same, or None where only keys are kept
    key_cache: Any,  # pointer and strides [blocks, K, B, D]
    value_cache: Any,
    slots: Any,  # pointer to int64 [T] and its stride
    key_scale: Any,  # None, or pointer and stride over heads
    value_scale: Any,
    scales: Any,  # None, or pointer and strides [blocks, K, B, 2] of scales by token and head
    limit: Any,  # largest magnitude of an element, None where any will do
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MANTISSA: tl.constexpr,
    LOWEST: tl.constexpr,
) -> None:
    """One program per token and KV head; a negative slot is none."""
    token = tl.program_id(0).to(tl.int64)
    kv_head = tl.program_id(1)
    slot = tl.load(slots[0] + token * slots[1])
    if slot < 0:
        return
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    scale_place = block * 0
    behind = block * 0
    if scales is not None:
        scale_place = block * scales[1] + kv_head * scales[2] + offset * scales[3]
        behind = scale_place + scales[4]
    place = block * key_cache[1] + kv_head * key_cache[2] + offset * key_cache[3]
    _write(key, key_cache, key_scale, scales, scale_place, token, place, kv_head, limit, SIZE, PAD, MANTISSA, LOWEST)
    if value is not None:
        place = block * value_cache[1] + kv_head * value_cache[2] + offset * value_cache[3]
        _write(
            value, value_cache, value_scale, scales, behind, token, place, kv_head, limit, SIZE, PAD, MANTISSA, LOWEST
        )
