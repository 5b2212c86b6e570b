"""Collectives over one process group of the framework, which belongs to the communicator alone."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hardpoint_parallel.rendezvous import GroupPlace

__all__ = ["ProcessGroupCommunicator"]


class ProcessGroupCommunicator:
    """Implements ``Communicator`` over a backend of ``torch.distributed``.

    The framework's default process group is neither used nor made: a program that embeds an engine may have its own.
    ``advice`` ends the message of a failed collective.
    """

    def __init__(self, group: Any, place: GroupPlace, advice: str) -> None:
        self._group = group
        self._place = place
        self._advice = advice

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """In place for contiguous tensors. Raises ``RuntimeError`` when a rank is gone or too slow."""
        tensor = tensor.contiguous()
        self._run("all_reduce", lambda group: group.allreduce([tensor]))
        return tensor

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        """A new tensor. Raises ``RuntimeError`` when a rank is gone or too slow, ``IndexError`` for a wrong ``dim``."""
        if not -tensor.dim() <= dim < tensor.dim():
            raise IndexError(f"dim {dim} is outside a tensor of {tensor.dim()} dimensions")
        mine = tensor.contiguous()
        parts = [torch.empty_like(mine) for _ in range(self._place.size)]
        self._run("all_gather", lambda group: group.allgather([parts], [mine]))
        return torch.cat(parts, dim)

    def close(self) -> None:
        """Leave the group; collectives of the others fail from then on. Idempotent."""
        self._group = None

    def _run(self, name: str, start: Callable[[Any], Any]) -> None:
        if self._group is None:
            raise RuntimeError(f"{name} of {self._place.label} was called after close")
        try:
            start(self._group).wait()
        except RuntimeError as error:
            raise RuntimeError(
                f"{name} of {self._place.label} failed on rank {self._place.rank} of them: {error}; {self._advice}"
            ) from error
