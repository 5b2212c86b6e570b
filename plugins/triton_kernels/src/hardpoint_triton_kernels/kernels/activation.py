"""Gated activations. Legend: N rows, M intermediate size."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from hardpoint_triton_kernels.kernels.common import ceil_div, flat_rows, row_tile

__all__ = ["ACTIVATIONS", "act_and_mul", "act_and_mul_kernel", "activate", "silu_and_mul"]

ACTIVATIONS = {"silu": 0, "gelu_tanh": 1, "gelu": 2}
"""Names to what kernels know them by; ``gelu`` is the exact one."""

_WIDEST = 1024


@triton.jit
def activate(x: tl.tensor, ACTIVATION: tl.constexpr) -> tl.tensor:
    """Of float32 ``x``."""
    if ACTIVATION == 0:
        result = x * tl.sigmoid(x)
    elif ACTIVATION == 1:
        # (1 + tanh(u)) / 2 is sigmoid(2 u), which needs no vendor's library.
        result = x * tl.sigmoid(1.5957691216057308 * (x + 0.044715 * x * x * x))
    else:
        result = 0.5 * x * (1.0 + tl.erf(x * 0.7071067811865476))
    return result


@triton.jit
def act_and_mul_kernel(
    source: tl.tensor,
    target: tl.tensor,
    num_rows: tl.tensor,
    size: tl.tensor,
    source_stride: tl.tensor,
    ROWS: tl.constexpr,
    WIDTH: tl.constexpr,
    ACTIVATION: tl.constexpr,
) -> None:
    """``target`` [N, M] contiguous from ``source`` [N, 2 M]; a program takes ROWS rows and WIDTH columns."""
    rows = (tl.program_id(0) * ROWS + tl.arange(0, ROWS)).to(tl.int64)[:, None]
    columns = (tl.program_id(1) * WIDTH + tl.arange(0, WIDTH))[None, :]
    inside = (rows < num_rows) & (columns < size)
    place = source + rows * source_stride + columns
    gate = tl.load(place, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(place + size, mask=inside, other=0.0).to(tl.float32)
    result = activate(gate, ACTIVATION) * up
    tl.store(target + rows * size + columns, result.to(target.dtype.element_ty), mask=inside)


def act_and_mul(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """[..., 2 M] (gate first) to [..., M], the product taken in float32. Raises ``ValueError`` for unknown names."""
    if activation not in ACTIVATIONS:
        raise ValueError(f"activation {activation!r} has no kernel; there are: {', '.join(ACTIVATIONS)}")
    size = gate_up.shape[-1] // 2
    rows = flat_rows(gate_up)
    target = torch.empty(len(rows), size, dtype=gate_up.dtype, device=gate_up.device)
    if target.numel():
        tile = row_tile(size, widest=_WIDEST)
        grid = (ceil_div(len(rows), tile.rows), ceil_div(size, tile.width))
        act_and_mul_kernel[grid](
            rows,
            target,
            len(rows),
            size,
            rows.stride(0),
            ROWS=tile.rows,
            WIDTH=tile.width,
            ACTIVATION=ACTIVATIONS[activation],
            num_warps=tile.warps,
        )
    return target.view(*gate_up.shape[:-1], size)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """The seam ``silu_and_mul``."""
    return act_and_mul(gate_up, "silu")
