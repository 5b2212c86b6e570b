"""Where a stored tensor lands in a (fused, sharded) parameter, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

__all__ = ["OutputPart", "Placement", "SegmentedPlacement", "ShardedModule", "place_parts"]


@dataclass(frozen=True, slots=True)
class Placement:
    """``stored_shape`` is what the file must hold. Of it, ``length`` entries from ``source_start`` along ``dim`` are
    this rank's part; they go to ``target_start`` along the same dimension of the parameter. The file holds values less
    ``offset``."""

    stored_shape: tuple[int, ...]
    dim: int
    source_start: int
    target_start: int
    length: int
    offset: float = 0.0

    @classmethod
    def whole(cls, shape: tuple[int, ...], offset: float = 0.0) -> Placement:
        return cls(shape, 0, 0, 0, shape[0] if shape else 1, offset)

    def source(self, stored: torch.Tensor) -> torch.Tensor:
        """The values of ``stored`` that belong to this rank; a view unless there is an offset."""
        part = stored if stored.dim() == 0 else stored.narrow(self.dim, self.source_start, self.length)
        # In float32, where small differences from the offset survive.
        return part.float() + self.offset if self.offset else part

    def target(self, parameter: torch.Tensor) -> torch.Tensor:
        """View of ``parameter`` that the stored tensor fills."""
        return parameter if parameter.dim() == 0 else parameter.narrow(self.dim, self.target_start, self.length)


@dataclass(frozen=True, slots=True)
class OutputPart:
    """One stored projection inside a layer: ``total`` output entries in the file, of which this rank takes ``length``
    from ``start``."""

    total: int
    start: int
    length: int


@dataclass(frozen=True, slots=True)
class SegmentedPlacement(Placement):
    """A stored tensor that holds several parts behind one another along its first dimension: this rank's share of each
    of them. ``length`` is what the shares have together."""

    parts: tuple[OutputPart, ...] = ()

    def source(self, stored: torch.Tensor) -> torch.Tensor:
        begin, shares = 0, []
        for part in self.parts:
            shares.append(stored.narrow(0, begin + part.start, part.length))
            begin += part.total
        return torch.cat(shares)


def place_parts(parts: Sequence[OutputPart], rest: tuple[int, ...] = ()) -> Placement:
    """Of one stored tensor with the entries of all ``parts``, each of shape ``rest``."""
    total, length = sum(part.total for part in parts), sum(part.length for part in parts)
    if total == length:
        return Placement.whole((total, *rest))
    return SegmentedPlacement((total, *rest), 0, 0, 0, length, parts=tuple(parts))


@runtime_checkable
class ShardedModule(Protocol):
    """A module whose parameters are sharded over ranks or fused from several stored tensors."""

    def place(self, parameter: str, shard: str | None) -> Placement:
        """Placement of part ``shard`` of the module's own ``parameter``; ``KeyError`` for a part it does not have."""
