"""Learned biases by the distance of query and key, in buckets that widen with it (Raffel et al. 2020, section 2.1).

Legend: B buckets, H heads of this rank, S tokens of a sequence, N distances told apart.
"""

from __future__ import annotations

import math

import torch

from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement

__all__ = ["RelativeBias", "distance_buckets"]


def distance_buckets(distances: torch.Tensor, num_buckets: int, max_distance: int) -> torch.Tensor:
    """int64 buckets of int64 ``distances`` of 0 and more.

    The lower half of the buckets have a distance each; the others are as wide as the logarithm is steep, and the last
    one takes all from ``max_distance`` on.
    """
    exact = num_buckets // 2
    share = torch.log(distances.clamp(min=1).float() / exact) / math.log(max_distance / exact)
    wide = (exact + (share * (num_buckets - exact)).long()).clamp(max=num_buckets - 1)
    return torch.where(distances < exact, distances, wide)


class RelativeBias(torch.nn.Module):
    """``weight`` is [B, H], of all buckets and this rank's share of the heads."""

    def __init__(
        self,
        num_buckets: int,
        num_heads: int,
        max_distance: int,
        parallel: TensorParallel,
        dtype: torch.dtype,
        device: torch.device,
    ) -> None:
        super().__init__()
        self.num_buckets = num_buckets
        self.max_distance = max_distance
        self._total_heads = num_heads
        self._parallel = parallel
        self.num_heads = parallel.divide(num_heads, "number of heads with relative biases")
        empty = torch.empty(num_buckets, self.num_heads, dtype=dtype, device=device)
        self.weight = torch.nn.Parameter(empty, requires_grad=False)

    def both_sides(self, length: int) -> torch.Tensor:
        """[H, S, S] by query and key; half of the buckets are for keys behind the query."""
        places = torch.arange(length, device=self.weight.device)
        offsets = places[None, :] - places[:, None]
        half = self.num_buckets // 2
        buckets = distance_buckets(offsets.abs(), half, self.max_distance) + (offsets > 0) * half
        return self.weight[buckets].permute(2, 0, 1)

    def by_distance(self) -> torch.Tensor:
        """float32 [H, N] for queries that see keys up to their own only; N is ``max_distance`` + 1."""
        distances = torch.arange(self.max_distance + 1, device=self.weight.device)
        buckets = distance_buckets(distances, self.num_buckets, self.max_distance)
        return self.weight[buckets].T.float().contiguous()

    def place(self, parameter: str, shard: str | None) -> Placement:
        if parameter != "weight" or shard is not None:
            raise KeyError(f"relative biases have only a whole 'weight', not {parameter!r} / {shard!r}")
        shape = (self.num_buckets, self._total_heads)
        return Placement(shape, 1, self._parallel.rank * self.num_heads, 0, self.num_heads)
