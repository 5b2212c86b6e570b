"""Stored tensors that hold several projections behind one another, each of which the ranks divide by itself.

Where a checkpoint keeps projections apart, a fused layer has one stored tensor per part. Here one stored tensor has
them all, so a rank's share is not one range of rows but one of every segment.
"""

from __future__ import annotations

from collections.abc import Sequence

from hardpoint.errors import ConfigError
from hardpoint_torch_runtime.layers.linear import LinearFactory, OutputPart, ParallelLinear
from hardpoint_torch_runtime.layers.parallel import TensorParallel
from hardpoint_torch_runtime.layers.placement import Placement, place_parts

__all__ = ["SegmentedColumnLinear", "shared_part", "split_part"]


def split_part(total: int, parallel: TensorParallel, what: str) -> OutputPart:
    """An equal share per rank. Raises ``ConfigError`` naming ``what`` where there is none."""
    share = parallel.divide(total, what)
    return OutputPart(total, parallel.rank * share, share)


def shared_part(count: int, size: int, parallel: TensorParallel, what: str) -> OutputPart:
    """``count`` groups of ``size`` rows: an equal number of groups per rank, or one that neighboring ranks share.

    Raises ``ConfigError`` naming ``what`` where neither works out.
    """
    if count >= parallel.size:
        share = parallel.divide(count, what) * size
        return OutputPart(count * size, parallel.rank * share, share)
    if parallel.size % count:
        raise ConfigError(
            f"{what} is {count} and cannot be shared evenly by tensor_parallel_size={parallel.size} ranks; choose a "
            "multiple or a divisor of it"
        )
    return OutputPart(count * size, parallel.rank * count // parallel.size * size, size)


class SegmentedColumnLinear(ParallelLinear):
    """[..., I] to [..., O], this rank's shares of all segments in their order; one stored tensor, one linear method."""

    def __init__(
        self, name: str, factory: LinearFactory, input_size: int, segments: Sequence[OutputPart], *, bias: bool = False
    ) -> None:
        total, length = sum(segment.total for segment in segments), sum(segment.length for segment in segments)
        super().__init__(
            name,
            factory,
            input_total=input_size,
            input_length=input_size,
            parts={"weight": OutputPart(total, 0, length)},
            bias=bias,
        )
        self.segments = tuple(segments)
        self._input_size = input_size

    def _place_weight(self, shard: str | None) -> Placement:
        if shard is not None:
            raise KeyError(f"layer {self.name!r} is stored in one piece and has no part {shard!r}")
        return place_parts(self.segments, (self._input_size,))

    def _place_bias(self, weight: Placement) -> Placement:
        return place_parts(self.segments)
