"""Where a stored tensor lands in a (fused, sharded) parameter, as plain arithmetic."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import torch

__all__ = [
    "GROUPED",
    "TRANSPOSED",
    "GroupedPlacement",
    "OutputPart",
    "Placement",
    "SegmentedPlacement",
    "ShardedModule",
    "TransposedPlacement",
    "place_parts",
]

GROUPED = "grouped"
"""As the ``shard`` of a weight rule: queries, keys and values lie in one stored tensor, KV head by KV head, the queries
that share a KV head before its key and its value."""
TRANSPOSED = "transposed"
"""As the ``shard`` of a weight rule: the weight of a whole layer is stored as [input, output]."""


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


@dataclass(frozen=True, slots=True)
class GroupedPlacement(Placement):
    """See ``GROUPED``. ``parts`` are queries, keys and values as the layer has them: each in one piece."""

    head_size: int = 1
    parts: tuple[OutputPart, ...] = ()

    def source(self, stored: torch.Tensor) -> torch.Tensor:
        num_groups = self.parts[1].total // self.head_size
        groups = stored.unflatten(0, (num_groups, -1, self.head_size))
        whole = (part.flatten(0, 2) for part in (groups[:, :-2], groups[:, -2:-1], groups[:, -1:]))
        return torch.cat(
            [rows.narrow(0, part.start, part.length) for rows, part in zip(whole, self.parts, strict=True)]
        )


@dataclass(frozen=True, slots=True)
class TransposedPlacement(Placement):
    """See ``TRANSPOSED``: ``upright`` is the placement of the same weight stored as [output, input]."""

    upright: Placement | None = None

    @classmethod
    def of(cls, upright: Placement) -> TransposedPlacement:
        first, last = upright.stored_shape
        ends = (upright.dim, upright.source_start, upright.target_start, upright.length)
        return cls((last, first), *ends, upright=upright)

    def source(self, stored: torch.Tensor) -> torch.Tensor:
        if self.upright is None:
            raise ValueError("a transposed placement without the upright one says nothing; make it by of()")
        # Those who repack rows want them in one piece.
        return self.upright.source(stored.T).contiguous()


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
