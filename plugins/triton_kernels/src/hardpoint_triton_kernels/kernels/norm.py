"""RMS norms, with and without a residual that is added first. Legend: N rows, C normalized size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, flat_rows, row_tile

__all__ = ["add_rms_norm", "rms_norm", "rms_norm_kernel"]


@triton.jit
def _summed(
    begin: tl.tensor,
    residual: tl.tensor,
    rows: tl.tensor,
    columns: tl.tensor,
    inside: tl.tensor,
    residual_stride: tl.tensor,
) -> tl.tensor:
    """A tile in float32, with the residual's added, rounded as it is stored, and put back."""
    value = tl.load(begin + columns, mask=inside, other=0.0)
    if residual is not None:
        place = residual + rows * residual_stride + columns
        kept = tl.load(place, mask=inside, other=0.0)
        value = (value.to(tl.float32) + kept.to(tl.float32)).to(residual.dtype.element_ty)
        tl.store(place, value, mask=inside)
    return value.to(tl.float32)


@triton.jit
def rms_norm_kernel(
    source: tl.tensor,
    residual: tl.tensor,
    weight: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    inner: tl.tensor,
    outer_stride: tl.tensor,
    inner_stride: tl.tensor,
    residual_stride: tl.tensor,
    eps: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ONE_PASS: tl.constexpr,
) -> None:
    """``target`` [N, C] contiguous. Row r of ``source`` begins at (r // inner, r % inner) of its two strides.

    With ``residual`` [N, C] the sum is normalized and written back to it; then ``inner`` is 1.
    """
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    begin = source + (rows // inner) * outer_stride + (rows % inner) * inner_stride
    lanes = tl.arange(0, WIDTH)[None, :]
    if ONE_PASS:
        inside = (rows < num_rows) & (lanes < size)
        value = _summed(begin, residual, rows, lanes, inside, residual_stride)
        scale = tl.rsqrt(tl.sum(value * value, axis=1, keep_dims=True) / size + eps)
        factor = tl.load(weight + lanes, mask=lanes < size, other=0.0).to(tl.float32)
        tl.store(target + rows * size + lanes, (value * scale * factor).to(target.dtype.element_ty), mask=inside)
    else:
        squares = tl.zeros((ROWS, WIDTH), dtype=tl.float32)
        for first in range(0, size, WIDTH):
            columns = first + lanes
            inside = (rows < num_rows) & (columns < size)
            value = _summed(begin, residual, rows, columns, inside, residual_stride)
            squares += value * value
        scale = tl.rsqrt(tl.sum(squares, axis=1, keep_dims=True) / size + eps)
        for first in range(0, size, WIDTH):
            columns = first + lanes
            inside = (rows < num_rows) & (columns < size)
            if residual is not None:
                value = tl.load(residual + rows * residual_stride + columns, mask=inside, other=0.0).to(tl.float32)
            else:
                value = tl.load(begin + columns, mask=inside, other=0.0).to(tl.float32)
            factor = tl.load(weight + columns, mask=columns < size, other=0.0).to(tl.float32)
            tl.store(target + rows * size + columns, (value * scale * factor).to(target.dtype.element_ty), mask=inside)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """The seam ``rms_norm``; heads of a fused projection are read where they are."""
    if x.dim() == 3 and x.stride(-1) == 1:
        inner, strides = x.shape[1], (x.stride(0), x.stride(1))
        source = x
    else:
        source = flat_rows(x)
        inner, strides = 1, (source.stride(0), 0)
    target = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(source, None, weight, target, inner, strides, eps)
    return target


def add_rms_norm(
    x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The seam ``add_rms_norm``. Raises ``ValueError`` for a residual whose rows are not contiguous."""
    if residual.stride(-1) != 1:
        raise ValueError(f"the residual's rows must be contiguous, but its strides are {residual.stride()}")
    source = flat_rows(x)
    target = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(source, residual, weight, target, 1, (source.stride(0), 0), eps)
    return target, residual


def _launch(
    source: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    target: torch.Tensor,
    inner: int,
    strides: tuple[int, int],
    eps: float,
) -> None:
    size = target.shape[-1]
    if not target.numel():
        return
    num_rows = target.numel() // size
    tile = row_tile(size)
    rms_norm_kernel[(ceil_div(num_rows, tile.rows),)](
        source,
        residual,
        weight,
        target,
        num_rows,
        size,
        inner,
        *strides,
        0 if residual is None else residual.stride(0),
        eps,
        ROWS=tile.rows,
        WIDTH=tile.width,
        ONE_PASS=tile.width >= size,
        num_warps=tile.warps,
    )
