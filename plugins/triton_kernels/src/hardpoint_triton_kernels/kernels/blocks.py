"""Copying and clearing blocks of a paged cache. Legend: B blocks, N blocks that are named, U units in a block."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, next_power_of_two

__all__ = ["copy_blocks", "copy_kernel", "zero_blocks", "zero_kernel"]

_WIDEST = 2048
_UNITS = (torch.int64, torch.int32, torch.int16, torch.int8)


@triton.jit
def copy_kernel(
    cache: tl.tensor,
    sources: tl.tensor,
    targets: tl.tensor,
    size: tl.tensor,
    block_stride: tl.tensor,
    WIDTH: tl.constexpr,
) -> None:
    """One part of one block; negative numbers are padding."""
    number = tl.program_id(0)
    unit = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    source, target = tl.load(sources + number), tl.load(targets + number)
    # A limit rather than a mask of one entry, which the interpreter does not spread.
    inside = unit < tl.where((source >= 0) & (target >= 0), size, 0)
    value = tl.load(cache + source * block_stride + unit, mask=inside)
    tl.store(cache + target * block_stride + unit, value, mask=inside)


@triton.jit
def zero_kernel(
    cache: tl.tensor, blocks: tl.tensor, size: tl.tensor, block_stride: tl.tensor, WIDTH: tl.constexpr
) -> None:
    """One part of one block; negative numbers are padding."""
    unit = tl.program_id(1) * WIDTH + tl.arange(0, WIDTH)
    block = tl.load(blocks + tl.program_id(0))
    zeros = tl.zeros((WIDTH,), dtype=cache.dtype.element_ty)
    tl.store(cache + block * block_stride + unit, zeros, mask=unit < tl.where(block >= 0, size, 0))


def _units(cache: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(``cache`` [B, U] as whole numbers as wide as it permits, U); bits are moved, never values.

    Raises ``ValueError`` where a block's content does not lie side by side.
    """
    per_block = cache[:1].numel()
    if len(cache) and not cache[0].is_contiguous():
        raise ValueError(
            f"blocks must be contiguous, but a cache of shape {list(cache.shape)} has strides {cache.stride()}; pass "
            "it in its physical order"
        )
    flat = cache.as_strided((len(cache), per_block), (cache.stride(0), 1))
    bytes_of = (per_block * cache.element_size(), cache.stride(0) * cache.element_size(), cache.data_ptr())
    unit = next(unit for unit in _UNITS if all(number % unit.itemsize == 0 for number in bytes_of))
    stride = cache.stride(0) * cache.element_size() // unit.itemsize
    raw = torch.empty(0, dtype=unit, device=cache.device)
    begin = flat.storage_offset() * cache.element_size() // unit.itemsize
    raw.set_(flat.untyped_storage(), begin, (len(cache), bytes_of[0] // unit.itemsize), (stride, 1))
    return raw, bytes_of[0] // unit.itemsize


def copy_blocks(cache: torch.Tensor, sources: torch.Tensor, targets: torch.Tensor) -> None:
    """Copy blocks ``sources`` int64 [N] of ``cache`` [B, ...] over ``targets`` int64 [N], bit by bit.

    Pairs with a negative number are skipped. No target may be a source of the same call, nor named twice.
    """
    if not len(sources) or not cache.numel():
        return
    units, size = _units(cache)
    width = min(_WIDEST, next_power_of_two(size))
    copy_kernel[len(sources), ceil_div(size, width)](units, sources, targets, size, units.stride(0), WIDTH=width)


def zero_blocks(cache: torch.Tensor, blocks: torch.Tensor) -> None:
    """Clear blocks int64 [N] of ``cache`` [B, ...], whatever is in them; negative numbers are skipped."""
    if not len(blocks) or not cache.numel():
        return
    units, size = _units(cache)
    width = min(_WIDEST, next_power_of_two(size))
    zero_kernel[len(blocks), ceil_div(size, width)](units, blocks, size, units.stride(0), WIDTH=width)
