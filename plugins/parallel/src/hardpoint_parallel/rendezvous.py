"""Where the ranks of one group find each other."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]
from torch.distributed.rendezvous import rendezvous

from hardpoint.errors import ConfigError
from hardpoint.interfaces.worker import ParallelSlice

__all__ = ["GroupPlace", "meet"]


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """A rank's place among ``size`` ranks that split tensors; ``number`` tells the groups of an instance apart."""

    number: int
    rank: int
    size: int

    @classmethod
    def of(cls, parallel: ParallelSlice) -> GroupPlace:
        """Tensor-parallel ranks are neighbors: the inner axis of the grid of ranks."""
        number, rank = divmod(parallel.rank, parallel.tensor_parallel_size)
        return cls(number, rank, parallel.tensor_parallel_size)

    @property
    def label(self) -> str:
        """How messages name the group."""
        first = self.number * self.size
        return f"ranks {first} to {first + self.size - 1}"


def meet(parallel: ParallelSlice, timeout_s: float) -> Store:
    """A store that the ranks of ``parallel``'s group share with nobody else.

    Ranks must meet equally often under one address. Raises ``ConfigError`` for a missing or unusable address and for
    one where too few ranks appear within ``timeout_s`` seconds.
    """
    address = parallel.init_method
    if not address:
        raise ConfigError(
            f"rank {parallel.rank} of {parallel.world_size} has no address to meet the others at: the executor left "
            "ParallelSlice.init_method unset; choose --executor multiproc or external_launcher"
        )
    try:
        found = rendezvous(address, parallel.rank, parallel.world_size, timeout=timedelta(seconds=timeout_s))
        store, _, _ = next(found)
        # An address may be used again while the store behind it lives: every meeting needs keys of its own.
        meeting = store.add(f"hardpoint/visits/{parallel.rank}", 1)
    except (RuntimeError, ValueError, OSError) as error:
        raise ConfigError(
            f"rank {parallel.rank} of {parallel.world_size} cannot meet the others at {address!r}: {error}; addresses "
            "are file:///path, tcp://host:port or env:// with MASTER_ADDR and MASTER_PORT set"
        ) from error
    group = parallel.rank // parallel.tensor_parallel_size
    return PrefixStore(f"hardpoint/tp{group}/{meeting}", store)
