"""The suite for communicators passes a plain one between threads, and every mutant of it fails."""

from __future__ import annotations

import threading
from collections.abc import Mapping
from itertools import count
from typing import Any, ClassVar

import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.worker import ParallelSlice, WorkerContext
from hardpoint.testing.suite_runner import run_suite
from hardpoint_testing_torch.communicator_suite import CommunicatorSuite


class Table:
    """Where the threads of one group put down what the others are to take."""

    def __init__(self, size: int, timeout_s: float) -> None:
        self._size = size
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._rounds: dict[int, dict[int, torch.Tensor]] = {}
        self._gone = False

    def exchange(self, number: int, rank: int, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor of round ``number``. Raises ``RuntimeError`` when somebody is gone or late."""
        with self._changed:
            parts = self._rounds.setdefault(number, {})
            parts[rank] = tensor.clone()
            self._changed.notify_all()
            self._changed.wait_for(lambda: len(parts) == self._size or self._gone, self._timeout_s)
            if len(parts) < self._size:
                raise RuntimeError("a rank is gone or late")
            return [parts[rank] for rank in range(self._size)]

    def leave(self) -> None:
        with self._changed:
            self._gone = True
            self._changed.notify_all()


class Room:
    """All tables, by address, group and how often a rank came to it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tables: dict[tuple[str, int, int], Table] = {}
        self._visits: dict[tuple[str, int], int] = {}

    def table(self, place: ParallelSlice, group: int, timeout_s: float) -> Table:
        assert place.init_method is not None
        with self._lock:
            visit = self._visits[place.init_method, place.rank] = (
                self._visits.get((place.init_method, place.rank), 0) + 1
            )
            size = place.tensor_parallel_size
            return self._tables.setdefault((place.init_method, group, visit), Table(size, timeout_s))


class Plain:
    """Sums and gathers in rank order, through a table."""

    def __init__(self, place: ParallelSlice, room: Room, timeout_s: float) -> None:
        self.group, self.rank = self.place_of(place)
        self.size = place.tensor_parallel_size
        self.table: Table | None = room.table(place, self.group, timeout_s)
        self.numbers = count()
        self.exchange(torch.zeros(0))

    def place_of(self, place: ParallelSlice) -> tuple[int, int]:
        return divmod(place.rank, place.tensor_parallel_size)

    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Everybody's tensor in rank order. Raises ``RuntimeError`` when somebody is gone or late."""
        if self.table is None:
            raise RuntimeError("closed")
        return self.table.exchange(next(self.numbers), self.rank, tensor)

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return torch.stack(self.exchange(tensor)).sum(0, dtype=tensor.dtype)

    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchange(tensor), dim)

    def close(self) -> None:
        if self.table is not None:
            self.table.leave()
            self.table = None


class PlainSuite(CommunicatorSuite):
    made: ClassVar[type[Plain]] = Plain
    timeout_option: ClassVar[str | None] = "timeout_s"
    patience_s: ClassVar[float] = 20.0
    room: ClassVar[Room] = Room()

    def create_communicator(self, ctx: WorkerContext, options: Mapping[str, Any]) -> Communicator:
        assert ctx.config is not None
        place = ctx.config.parallel
        if place.init_method is None:
            raise ConfigError("no address")
        return self.made(place, self.room, options.get("timeout_s", 20.0))


class TestPlain(PlainSuite):
    pass


# Mutants.


class Averages(Plain):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return (super().all_reduce(tensor).double() / self.size).to(tensor.dtype)


class SumsItselfTwice(Plain):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor) + tensor


class SumsFromItsOwnPlaceOn(Plain):
    """Right but for the order, and so for the last bits."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        parts = self.exchange(tensor)
        total = parts[self.rank].clone()
        for step in range(1, self.size):
            total += parts[(self.rank + step) % self.size]
        return total


class Widens(Plain):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor).float()


class Flattens(Plain):
    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        return super().all_reduce(tensor).flatten()


class GathersItselfFirst(Plain):
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        parts = self.exchange(tensor)
        return torch.cat([parts[self.rank], *(part for rank, part in enumerate(parts) if rank != self.rank)], dim)


class GathersRows(Plain):
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        return torch.cat(self.exchange(tensor), 0)


class GathersInPlace(Plain):
    def all_gather(self, tensor: torch.Tensor, dim: int) -> torch.Tensor:
        gathered = super().all_gather(tensor, dim)
        tensor.zero_()
        return gathered


class TakesMemoryAsItLies(Plain):
    """Looks at the values in the order of memory, whatever the strides say."""

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        flat = torch.as_strided(tensor, tensor.shape, torch.empty(tensor.shape).stride(), tensor.storage_offset())
        return super().all_reduce(flat)


class MixesGroups(Plain):
    def place_of(self, place: ParallelSlice) -> tuple[int, int]:
        rank, group = divmod(place.rank, max(1, place.world_size // place.tensor_parallel_size))
        return group, rank


class SharesOneGroup(Plain):
    """Has one group per process, as long as that is open."""

    tables: ClassVar[dict[int, Table]] = {}
    lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, place: ParallelSlice, room: Room, timeout_s: float) -> None:
        super().__init__(place, room, timeout_s)
        with self.lock:
            self.table = self.tables.setdefault(self.group, self.table or Table(self.size, timeout_s))

    def close(self) -> None:
        super().close()
        with self.lock:
            self.tables.pop(self.group, None)


class ClosesOnce(Plain):
    def close(self) -> None:
        if self.table is None:
            raise RuntimeError("closed already")
        super().close()


class WorksOnAlone(Plain):
    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        return [tensor] * self.size if self.table is None else super().exchange(tensor)


class IgnoresWhoLeft(Plain):
    def exchange(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        try:
            return super().exchange(tensor)
        except RuntimeError:
            if self.table is None:
                raise
            return [tensor] * self.size


class WaitsForGood(Plain):
    """Until the test is over, that is."""

    def __init__(self, place: ParallelSlice, room: Room, timeout_s: float) -> None:
        super().__init__(place, room, 20.0)


MUTANTS = [
    Averages, SumsItselfTwice, SumsFromItsOwnPlaceOn, Widens, Flattens, GathersItselfFirst, GathersRows, GathersInPlace,
    TakesMemoryAsItLies, MixesGroups, SharesOneGroup, ClosesOnce, WorksOnAlone, IgnoresWhoLeft, WaitsForGood,
]  # fmt: skip


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.__name__)
def test_a_mutant_fails(mutant: type[Plain]) -> None:
    class Suite(PlainSuite):
        made: ClassVar[type[Plain]] = mutant
        patience_s: ClassVar[float] = 2.0

    assert run_suite(Suite).failed, f"{mutant.__name__} passes"


def test_a_mutant_that_goes_on_without_an_address_fails() -> None:
    class Suite(PlainSuite):
        def create_communicator(self, ctx: WorkerContext, options: Mapping[str, Any]) -> Communicator:
            assert ctx.config is not None
            given = ctx.config.parallel.init_method
            return super().create_communicator(ctx, options) if given else Plain.__new__(Plain)

    assert set(run_suite(Suite).failed) == {"test_ranks_without_an_address_are_told"}
