"""Plugin kind ``communicator``: collectives between the ranks that share every layer of a model.

Its factory takes a :class:`~hardpoint.interfaces.WorkerContext`: ``config.parallel`` says which rank of which group it
is and where the ranks meet, and the factory returns once all of them are there.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    import torch


class Communicator(Protocol):
    """Collectives over one tensor-parallel group; every rank calls them in the same order with equal shapes.

    A collective that cannot complete, because a rank is gone or late, raises ``RuntimeError`` and never hangs for good.
    Several communicators in one process know nothing of one another.
    """

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """Sum over ranks, same shape and the same bits on every rank; may work in place."""

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """Concatenation of the ranks' tensors along ``dim`` in rank order."""

    def close(self) -> None:
        """Leave the group without waiting for anybody; idempotent."""
