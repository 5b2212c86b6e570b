"""What launchers share: tile sizes that depend on a tensor's width alone, never on how many rows there are."""

from __future__ import annotations

from dataclasses import dataclass

import torch

__all__ = ["RowTile", "ceil_div", "flat_rows", "next_power_of_two", "row_tile"]

_TILE_ENTRIES = 1024
_WIDEST_TILE = 8192
_ENTRIES_PER_WARP = 512
_MOST_WARPS = 16


def ceil_div(size: int, part: int) -> int:
    return -(-size // part)


def next_power_of_two(size: int) -> int:
    """The least that is not below ``size``; 1 for 0."""
    return 1 << max(0, size - 1).bit_length()


@dataclass(frozen=True, slots=True)
class RowTile:
    """A program takes ``rows`` rows, ``width`` entries of each at a time, with ``warps`` warps."""

    rows: int
    width: int
    warps: int


def row_tile(size: int, *, widest: int = _WIDEST_TILE) -> RowTile:
    """For rows of ``size`` entries: short ones share a program, long ones are taken in parts of ``widest``."""
    width = min(next_power_of_two(size), widest)
    rows = max(1, _TILE_ENTRIES // width)
    warps = min(_MOST_WARPS, max(1, rows * width // _ENTRIES_PER_WARP))
    return RowTile(rows, width, warps)


def flat_rows(x: torch.Tensor) -> torch.Tensor:
    """[..., C] as [N, C] whose entries lie side by side within a row; a view where the layout permits it."""
    if x.stride(-1) != 1:
        x = x.contiguous()
    return x.reshape(x.shape[:-1].numel(), x.shape[-1])
