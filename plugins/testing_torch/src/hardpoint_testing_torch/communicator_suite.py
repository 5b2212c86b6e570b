"""Conformance of the plugin kind ``communicator``: derive from :class:`CommunicatorSuite` and name yours.

The ranks of a group are threads of this process: a communicator keeps all it has in itself, so that several of them
need not know of one another.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping
from itertools import count
from pathlib import Path
from typing import Any, ClassVar, TypeVar

import msgspec
import pytest
import torch

from hardpoint.errors import ConfigError
from hardpoint.interfaces.communicator import Communicator
from hardpoint.interfaces.worker import ParallelSlice, WorkerContext
from hardpoint.testing.plugin_suite import PluginSuite
from hardpoint_testing_torch.linear_bench import bench_info
from hardpoint_testing_torch.local_driver import worker_config
from hardpoint_testing_torch.rank_threads import RankThreads

__all__ = ["CommunicatorSuite", "Group"]

ResultT = TypeVar("ResultT")
SHAPES = ((1,), (0, 4), (3, 5), (2, 3, 4), (257, 33))
DTYPES = ("float32", "bfloat16", "float16", "int64")


class Group:
    """``size`` ranks that split tensors, of ``world_size`` ranks in all, at an address of their own."""

    def __init__(self, suite: CommunicatorSuite, address: str, world_size: int, size: int) -> None:
        self._suite = suite
        self._address = address
        self.world_size = world_size
        self.size = size

    def join(self, rank: int, **options: Any) -> Communicator:
        """The communicator of ``rank``; waits for the others of its group."""
        place = ParallelSlice(
            rank=rank,
            local_rank=rank,
            world_size=self.world_size,
            tensor_parallel_size=self.size,
            init_method=self._address,
        )
        return self._suite.create_communicator(self._suite.worker_context(place), options)

    def run(self, body: Callable[[Communicator, int], ResultT]) -> list[ResultT]:
        """``body(communicator, rank)`` on every rank, at the same time; results in rank order."""

        def joined(rank: int) -> ResultT:
            communicator = self.join(rank)
            try:
                return body(communicator, rank)
            finally:
                communicator.close()

        return RankThreads.run(self.world_size, joined, patience_s=self._suite.patience_s)


class CommunicatorSuite(PluginSuite):
    """``world_sizes`` are group sizes to test; ``timeout_option`` names the option that bounds a collective in seconds,
    ``patience_s`` is how long a test waits for a rank before it counts as hanging.
    """

    kind: ClassVar[str] = "communicator"
    device: ClassVar[str] = "cpu"
    world_sizes: ClassVar[tuple[int, ...]] = (2, 3)
    dtypes: ClassVar[tuple[str, ...]] = DTYPES
    timeout_option: ClassVar[str | None] = None
    patience_s: ClassVar[float] = 60.0

    def create_communicator(self, ctx: WorkerContext, options: Mapping[str, Any]) -> Communicator:
        """The communicator under test, as its factory makes it, with ``options`` added to those of the class."""
        record = self.runtime().load_factory(self.kind, self._name())
        made: Communicator = record.factory(ctx, record.declaration.options(**{**self.options, **options}))
        return made

    def worker_context(self, place: ParallelSlice) -> WorkerContext:
        """What a worker at ``place`` hands its communicator."""
        config = msgspec.structs.replace(worker_config(bench_info()), parallel=place)
        return self.context(WorkerContext, rank=place.rank, config=config, device=torch.device(self.device))

    @pytest.fixture
    def group(self, tmp_path: Path) -> Callable[..., Group]:
        """``group(size, world_size=size)``: ranks at a new address."""
        numbers = count()

        def create(size: int, world_size: int | None = None) -> Group:
            return Group(self, f"file://{tmp_path}/meeting-{next(numbers)}", world_size or size, size)

        return create

    def test_sums_are_sums_over_all_ranks(self, group: Callable[..., Group]) -> None:
        """Any shape, no token included; small whole numbers, so that every order gives the same."""
        for size in self.world_sizes:

            def reduce(communicator: Communicator, rank: int) -> list[torch.Tensor]:
                return [communicator.all_reduce(self._tensor(shape, dtype, rank)) for shape, dtype in self._cases()]

            for results in group(size).run(reduce):
                for result, (shape, dtype) in zip(results, self._cases(), strict=True):
                    expected = torch.stack([self._tensor(shape, dtype, rank) for rank in range(size)]).sum(0)
                    assert result.dtype == getattr(torch, dtype), f"{dtype} became {result.dtype}"
                    assert result.shape == torch.Size(shape), f"{shape} became {tuple(result.shape)}"
                    assert torch.equal(result, expected.to(result.dtype)), f"{size} ranks, {shape}, {dtype}"

    def test_every_rank_has_the_same_bits(self, group: Callable[..., Group]) -> None:
        """Ranks that differ in the last bit sample different tokens one day, and again when asked again."""
        for size in self.world_sizes:

            def reduce(communicator: Communicator, rank: int) -> list[torch.Tensor]:
                values = torch.randn(64, 33, generator=torch.Generator().manual_seed(rank), device="cpu")
                scaled = (values * 10.0**rank).to(self.device)
                return [communicator.all_reduce(scaled.clone()).clone() for _ in range(2)]

            first, *others = group(size).run(reduce)
            assert torch.equal(first[0], first[1]), "a second sum of the same tensors has other bits"
            for rank, other in enumerate(others, 1):
                assert torch.equal(first[0], other[0]), f"ranks 0 and {rank} of {size} hold different sums"

    def test_gathered_parts_lie_in_rank_order(self, group: Callable[..., Group]) -> None:
        """Along every dimension, counted from either end; what was given stays as it was."""
        for size in self.world_sizes:

            def gather(communicator: Communicator, rank: int) -> list[torch.Tensor]:
                gathered = []
                for shape, dtype in self._cases():
                    mine = self._tensor(shape, dtype, rank)
                    gathered += [communicator.all_gather(mine, dim) for dim in range(-len(shape), len(shape))]
                    assert torch.equal(mine, self._tensor(shape, dtype, rank)), "it wrote into what it was given"
                return gathered

            for results in group(size).run(gather):
                found = iter(results)
                for shape, dtype in self._cases():
                    parts = [self._tensor(shape, dtype, rank) for rank in range(size)]
                    for dim in range(-len(shape), len(shape)):
                        result = next(found)
                        assert result.dtype == getattr(torch, dtype), f"{dtype} became {result.dtype}"
                        assert torch.equal(result, torch.cat(parts, dim)), f"{size} ranks, {shape}, dim {dim}"

    def test_tensors_may_be_laid_out_in_any_way(self, group: Callable[..., Group]) -> None:
        """Columns of a larger tensor and transposed ones are what layers have at hand."""
        size = self.world_sizes[-1]

        def both(communicator: Communicator, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
            wide = self._tensor((4, 6), "float32", rank)
            return communicator.all_reduce(wide[:, 1:3]), communicator.all_gather(wide.t(), 1)

        whole = [self._tensor((4, 6), "float32", rank) for rank in range(size)]
        for reduced, gathered in group(size).run(both):
            assert torch.equal(reduced, torch.stack(whole).sum(0)[:, 1:3])
            assert torch.equal(gathered, torch.cat([part.t() for part in whole], 1))

    def test_groups_of_one_instance_do_not_mix(self, group: Callable[..., Group]) -> None:
        """R7.3: four ranks that split tensors in pairs; neighbors belong together."""

        def reduce(communicator: Communicator, rank: int) -> float:
            return float(communicator.all_reduce(torch.full((1,), 10.0**rank, device=self.device)))

        assert group(2, world_size=4).run(reduce) == [11.0, 11.0, 1100.0, 1100.0]

    def test_several_of_one_process_are_strangers(self, group: Callable[..., Group]) -> None:
        """One after the other at the same address, and two at a time, of which one ends first."""
        first, second = group(2), group(2)

        def alternate(one: Communicator, rank: int) -> list[float]:
            other = second.join(rank)
            sums = []
            for number, communicator in enumerate((one, other, one, other, one)):
                if number == 4:
                    other.close()
                sums.append(float(communicator.all_reduce(torch.full((1,), number + rank, device=self.device))))
            return sums

        for _ in range(2):
            assert first.run(alternate) == [[1.0, 3.0, 5.0, 7.0, 9.0]] * 2

    def test_a_closed_one_refuses(self, group: Callable[..., Group]) -> None:
        """Closing waits for nobody, may be done twice, and ends every use."""
        met = threading.Barrier(2, timeout=120)

        def leave(communicator: Communicator, rank: int) -> None:
            met.wait()  # whoever leaves while the other still connects fails its meeting
            communicator.close()
            communicator.close()
            one = torch.ones(1, device=self.device)
            for use in (lambda: communicator.all_reduce(one), lambda: communicator.all_gather(one, 0)):
                with pytest.raises(RuntimeError):
                    use()

        group(2).run(leave)

    def test_a_rank_that_leaves_fails_those_who_wait(self, group: Callable[..., Group]) -> None:
        """Whoever is inside a collective must come out when a peer is gone, or its process never ends."""
        ranks, left = group(2), threading.Event()

        def work(rank: int) -> None:
            communicator = ranks.join(rank)
            communicator.all_reduce(torch.ones(1, device=self.device))
            if rank == 1:
                communicator.close()
                left.set()
                return
            left.wait(self.patience_s)
            communicator.all_reduce(torch.ones(1, device=self.device))

        with RankThreads.running(2, work, patience_s=self.patience_s) as running:
            running.join(0, 1)
        assert isinstance(running.errors.get(0), RuntimeError), f"it went on alone: {running.errors}"
        assert 1 not in running.errors, str(running.errors.get(1))

    def test_a_rank_that_stays_away_is_not_waited_for_forever(self, group: Callable[..., Group]) -> None:
        """A peer that hangs is no end of a connection: only a limit in time helps."""
        if self.timeout_option is None:
            pytest.skip("the suite does not say which option limits a collective; set timeout_option")
        ranks, is_over, option = group(2), threading.Event(), {self.timeout_option: 0.2}

        def work(rank: int) -> None:
            communicator = ranks.join(rank, **option)
            try:
                if rank == 0:
                    communicator.all_reduce(torch.ones(1, device=self.device))
                else:
                    is_over.wait(self.patience_s)
            finally:
                communicator.close()

        with RankThreads.running(2, work, patience_s=self.patience_s) as running:
            try:
                running.join(0)
            finally:
                is_over.set()
        assert isinstance(running.errors.get(0), RuntimeError), f"no error: {running.errors}"

    def test_ranks_without_an_address_are_told(self) -> None:
        """A start that cannot work says so at once, instead of waiting for ranks that are elsewhere."""
        place = ParallelSlice(world_size=2, tensor_parallel_size=2)
        with pytest.raises(ConfigError):
            self.create_communicator(self.worker_context(place), {})

    def _cases(self) -> list[tuple[tuple[int, ...], str]]:
        return [(shape, dtype) for dtype in self.dtypes for shape in SHAPES]

    def _tensor(self, shape: tuple[int, ...], dtype: str, rank: int) -> torch.Tensor:
        """Whole numbers that a narrow dtype holds, sums of a few ranks included; different on every rank."""
        flat = torch.arange(torch.Size(shape).numel(), device=self.device) * (rank + 1) % 11 + rank
        return flat.reshape(shape).to(getattr(torch, dtype))
