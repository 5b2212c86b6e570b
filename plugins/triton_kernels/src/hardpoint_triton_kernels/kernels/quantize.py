"""Rounding activations to eight bits, each row by itself. Legend: N rows, C size of a row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_torch_runtime.float8_kernels import encode_float8
from hardpoint_torch_runtime.float8_support import converts_e4m3
from hardpoint_triton_kernels.availability import is_interpreted
from hardpoint_triton_kernels.kernels.common import ceil_div, flat_rows, row_tile

__all__ = ["quantize_fp8", "quantize_int8", "quantize_kernel"]

_LARGEST_INT8 = 127.0
_LARGEST_FP8 = 448.0


@triton.jit
def _round_half_even(x: tl.tensor) -> tl.tensor:
    """Of float32 below 2 ** 22: at this size float32 holds whole numbers only, and adding rounds to one."""
    return (x + 12582912.0) - 12582912.0


@triton.jit
def quantize_kernel(
    source: tl.tensor,
    target: tl.tensor,
    scales: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    source_stride: tl.tensor,
    largest: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_PASS: tl.constexpr,
    TO_INT8: tl.constexpr,
) -> None:
    """``target`` [N, C] contiguous, of int8, float8_e4m3fn or its codes in uint8, and ``scales`` float32 [N]; a scale
    is the row's largest magnitude over ``largest``."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    lanes = tl.arange(0, WIDTH)[None, :]
    begin = source + rows * source_stride
    if ONE_PASS:
        inside = (rows < num_rows) & (lanes < size)
        value = tl.load(begin + lanes, mask=inside, other=0.0).to(tl.float32)
        scale = tl.div_rn(tl.max(tl.abs(value), axis=1, keep_dims=True), largest)
        _store_rounded(target + rows * size + lanes, value, scale, inside, largest, TO_INT8)
    else:
        peak = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for first in range(0, size, WIDTH):
            columns = first + lanes
            inside = (rows < num_rows) & (columns < size)
            peak = tl.maximum(peak, tl.abs(tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)))
        scale = tl.div_rn(tl.max(peak, axis=1, keep_dims=True), largest)
        for first in range(0, size, WIDTH):
            columns = first + lanes
            inside = (rows < num_rows) & (columns < size)
            value = tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
            _store_rounded(target + rows * size + columns, value, scale, inside, largest, TO_INT8)
    tl.store(scales + rows, scale, mask=rows < num_rows)


@triton.jit
def _store_rounded(
    place: tl.tensor, value: tl.tensor, scale: tl.tensor, inside: tl.tensor, largest: tl.tensor, TO_INT8: tl.constexpr
) -> None:
    # Rows of zeros, and those too small to have a scale, become zeros.
    scaled = tl.div_rn(value, tl.where(scale > 0, scale, 1.0))
    scaled = tl.minimum(tl.maximum(scaled, -largest), largest)
    if TO_INT8:
        tl.store(place, _round_half_even(scaled).to(tl.int8), mask=inside)
    elif place.dtype.element_ty == tl.uint8:
        tl.store(place, encode_float8(scaled, 3), mask=inside)
    else:
        tl.store(place, scaled.to(place.dtype.element_ty), mask=inside)


def _takes_codes() -> bool:
    """Whether the device that kernels are launched on has no type for 8-bit floats."""
    if is_interpreted(quantize_kernel):
        return not converts_e4m3(None, is_hip=False)
    arch = triton.runtime.driver.active.get_current_target().arch
    # A capability as one number, or the name that AMD gives.
    capability = divmod(arch, 10) if isinstance(arch, int) else (0, 0)
    return not converts_e4m3(capability, is_hip=not isinstance(arch, int))


def _quantize(x: torch.Tensor, dtype: torch.dtype, largest: float) -> tuple[torch.Tensor, torch.Tensor]:
    size = x.shape[-1]
    target = torch.empty(x.shape, dtype=dtype, device=x.device)
    scales = torch.zeros(x.shape[:-1], dtype=torch.float32, device=x.device)
    if target.numel():
        rows, tile = flat_rows(x), row_tile(size)
        as_codes = dtype == torch.float8_e4m3fn and _takes_codes()
        quantize_kernel[(ceil_div(len(rows), tile.rows),)](
            rows,
            target.view(torch.uint8) if as_codes else target,
            scales,
            len(rows),
            size,
            rows.stride(0),
            largest,
            ROWS=tile.rows,
            WIDTH=tile.width,
            ONE_PASS=tile.width >= size,
            TO_INT8=dtype == torch.int8,
            num_warps=tile.warps,
        )
    return target, scales


def quantize_int8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """int8 [..., C] in [-127, 127], rounded half to even, and float32 scales [...]."""
    return _quantize(x, torch.int8, _LARGEST_INT8)


def quantize_fp8(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float8_e4m3fn [..., C] and float32 scales [...]; by integer arithmetic where the device has no such format."""
    return _quantize(x, torch.float8_e4m3fn, _LARGEST_FP8)
