"""This rank's share of tensor-parallel layers. With one rank every operation is the identity and is not even called."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from hardpoint.errors import ConfigError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.worker import ParallelSlice

if TYPE_CHECKING:
    import torch

__all__ = ["TensorParallel"]

_MOST_LISTED = 64


@dataclass(frozen=True, slots=True)
class TensorParallel:
    """Position in the tensor-parallel group."""

    rank: int = 0
    size: int = 1
    communicator: Communicator | None = None

    @classmethod
    def from_slice(cls, parallel: ParallelSlice, communicator: Communicator | None = None) -> TensorParallel:
        """Tensor-parallel ranks are neighbours: the inner dimension of the global rank."""
        size = parallel.tensor_parallel_size
        if size > 1 and communicator is None:
            raise ConfigError(
                f"tensor_parallel_size is {size}, but this worker was given no communicator; set it to 1 or choose an "
                "executor and platform that provide one"
            )
        return cls(parallel.rank % size, size, communicator)

    def divide(self, total: int, what: str) -> int:
        """``total / size``; ``ConfigError`` naming ``what`` and the sizes that fit if it is not whole."""
        share, rest = divmod(total, self.size)
        if rest:
            fitting = [str(size) for size in range(1, min(total, _MOST_LISTED) + 1) if total % size == 0]
            raise ConfigError(
                f"{what} is {total} and cannot be split over tensor_parallel_size={self.size}; set "
                f"--tensor-parallel-size to a divisor: {', '.join(fitting)}"
            )
        return share

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return tensor if self.communicator is None else self.communicator.all_reduce(tensor)

    def all_gather(self, tensor: torch.Tensor, dim: int = -1) -> torch.Tensor:
        return tensor if self.communicator is None else self.communicator.all_gather(tensor, dim)
