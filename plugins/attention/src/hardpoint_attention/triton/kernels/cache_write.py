"""Scattering a step's keys and values into the cache by slot.

The cache comes by strides, so the physical layout [blocks, K, B, 2 D] and the kernels' view of it are one and the same.
"""

from __future__ import annotations

import triton
import triton.language as tl

from hardpoint_torch_runtime.float8_kernels import encode_float8

__all__ = ["write_states"]


@triton.jit
def _whole(values: tl.tensor) -> tl.tensor:
    """Float32 to the next whole number, halves to the even one: at this size there are no fractions left."""
    shift = 12582912.0
    return (values + shift) - shift


@triton.jit
def _scaled(values: tl.tensor, scale: tl.tensor, kv_head: tl.tensor, limit: tl.tensor) -> tl.tensor:
    """Divided by the head's scale, and held within what the cache's elements can say."""
    if scale is not None:
        values = values.to(tl.float32) / tl.load(scale[0] + kv_head * scale[1])
    if limit is not None:
        values = tl.minimum(tl.maximum(values.to(tl.float32), -limit), limit)
    return values


@triton.jit
def _place(target: tl.tensor, block: tl.tensor, kv_head: tl.tensor, offset: tl.tensor) -> tl.tensor:
    """Of tokens' states or scales [N] from the start of [blocks, K, B, ...]."""
    return block * target[1] + kv_head * target[2] + offset * target[3]


@triton.jit
def _write(
    source: tl.tensor,
    target: tl.tensor,
    scale: tl.tensor,
    scales: tl.tensor,
    scale_place: tl.tensor,
    token: tl.tensor,
    place: tl.tensor,
    is_real: tl.tensor,
    kv_head: tl.tensor,
    limit: tl.tensor,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    MANTISSA: tl.constexpr,
) -> None:
    """Tokens [N] of one head from ``source`` to ``place`` [N]."""
    entry = tl.arange(0, PAD)
    in_use = is_real[:, None] & (entry < SIZE)[None, :]
    begin = token * source[1] + kv_head * source[2]
    values = tl.load(source[0] + begin[:, None] + (entry * source[3])[None, :], mask=in_use, other=0.0)
    if scales is not None:
        values = values.to(tl.float32)
        largest = tl.max(tl.abs(values), 1)
        token_scale = tl.where(largest > 0, largest / 127.0, 1.0)
        values = _whole(values / token_scale[:, None])
        tl.store(scales[0] + scale_place, token_scale, mask=is_real)
    values = _scaled(values, scale, kv_head, limit)
    if MANTISSA > 0:
        values = encode_float8(values, MANTISSA)
    values = values.to(target[0].dtype.element_ty)
    tl.store(target[0] + place[:, None] + (entry * target[4])[None, :], values, mask=in_use)


@triton.jit(do_not_specialize=["num_tokens"])
def write_states(
    key: tl.tensor,  # pointer and strides [T, K, D]
    value: tl.tensor,  # the same, or None where only keys are kept
    key_cache: tl.tensor,  # pointer and strides [blocks, K, B, D]
    value_cache: tl.tensor,
    slots: tl.tensor,  # pointer to int64 [T] and its stride
    key_scale: tl.tensor,  # None, or pointer and stride over heads
    value_scale: tl.tensor,
    scales: tl.tensor,  # None, or pointer and strides [blocks, K, B, 2] of scales by token and head
    limit: tl.tensor,  # largest magnitude of an element, None where any will do
    num_tokens: tl.tensor,
    TOKENS: tl.constexpr,
    SIZE: tl.constexpr,
    PAD: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    MANTISSA: tl.constexpr,  # of 8-bit floats that are written as codes: see ``encode_float8``; 0: by conversion
) -> None:
    """One program for TOKENS tokens of one KV head; a negative slot is none."""
    token = tl.program_id(0).to(tl.int64) * TOKENS + tl.arange(0, TOKENS)
    kv_head = tl.program_id(1)
    slot = tl.load(slots[0] + token * slots[1], mask=token < num_tokens, other=-1)
    is_real = slot >= 0
    block = slot // BLOCK_SIZE
    offset = slot % BLOCK_SIZE
    scale_place = block * 0
    behind = scale_place
    if scales is not None:
        scale_place = _place(scales, block, kv_head, offset)
        behind = scale_place + scales[4]
    place = _place(key_cache, block, kv_head, offset)
    _write(key, key_cache, key_scale, scales, scale_place, token, place, is_real, kv_head, limit, SIZE, PAD, MANTISSA)
    if value is not None:
        place = _place(value_cache, block, kv_head, offset)
        _write(
            value, value_cache, value_scale, scales, behind, token, place, is_real, kv_head, limit, SIZE, PAD, MANTISSA
        )
