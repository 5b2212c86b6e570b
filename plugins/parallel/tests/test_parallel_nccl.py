"""The communicator for graphics processors: over a stand-in that takes its arguments and computes on processors, and,
where there are two devices, over the library itself."""

from __future__ import annotations

from dataclasses import replace
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from torch.distributed import ProcessGroupGloo

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ParallelSlice, WorkerContext
from hardpoint_parallel.nccl import NcclCommunicator, NcclOptions, create, join
from hardpoint_testing_torch.communicator_suite import CommunicatorSuite
from hardpoint_testing_torch.rank_threads import RankThreads

PATIENCE_S = 60.0


class Settings:
    _timeout = timedelta()


class StandIn:
    """The process group of the library by its signature; ``aborted`` counts all of them."""

    Options = Settings
    aborted = 0
    timeouts: ClassVar[list[timedelta]] = []

    def __init__(self, store: Any, rank: int, size: int, settings: Settings) -> None:
        options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
        options._timeout = settings._timeout
        options._devices = [ProcessGroupGloo.create_device(hostname="127.0.0.1")]
        options._threads = 1
        type(self).timeouts.append(settings._timeout)
        self._group: Any = ProcessGroupGloo(store, rank, size, options)

    def allreduce(self, tensors: Any) -> Any:
        return self._group.allreduce(tensors)

    def allgather(self, parts: Any, mine: Any) -> Any:
        return self._group.allgather(parts, mine)

    def abort(self) -> None:
        type(self).aborted += 1


def context(rank: int, address: str | None) -> WorkerContext:
    place = ParallelSlice(rank=rank, local_rank=rank, world_size=2, tensor_parallel_size=2, init_method=address)
    return CommunicatorSuite().worker_context(place)


def test_ranks_meet_compute_and_leave(tmp_path: Path) -> None:
    """R7.3, R7.13: with the timeouts asked for, and without waiting for anybody at the end."""
    environment: dict[str, str] = {}

    def work(rank: int) -> list[float]:
        address, options = f"file://{tmp_path}/meeting", NcclOptions(timeout_s=9, blocking=True)
        communicator = join(context(rank, address), options, StandIn, environment)
        total = communicator.all_reduce(torch.tensor([1.0 + rank]))
        both = communicator.all_gather(torch.tensor([float(rank)]), 0)
        communicator.close()
        communicator.close()
        return [*total.tolist(), *both.tolist()]

    StandIn.aborted = 0
    StandIn.timeouts.clear()
    assert RankThreads[Any].run(2, work, patience_s=PATIENCE_S) == [[3.0, 0.0, 1.0]] * 2
    assert StandIn.aborted == 2
    assert StandIn.timeouts == [timedelta(seconds=9)] * 2
    assert environment == {"TORCH_NCCL_BLOCKING_WAIT": "1"}


def test_a_library_that_does_not_connect_is_told_with_what_to_try(tmp_path: Path) -> None:
    class Failing(StandIn):
        def allreduce(self, tensors: Any) -> Any:
            raise RuntimeError("unhandled system error")

    def work(rank: int) -> NcclCommunicator:
        return join(context(rank, f"file://{tmp_path}/meeting"), NcclOptions(), Failing, {})

    with RankThreads[Any].running(2, work, patience_s=PATIENCE_S) as ranks:
        ranks.join(0, 1)
    for rank in (0, 1):
        message = str(ranks.errors[rank])
        assert isinstance(ranks.errors[rank], ConfigError)
        assert message.startswith(f"rank {rank} of ranks 0 to 1 cannot reach the others on cpu")
        assert "NCCL_DEBUG=INFO" in message


def test_a_context_without_a_device_is_refused(tmp_path: Path) -> None:
    whole = context(0, f"file://{tmp_path}/meeting")
    with pytest.raises(ConfigError, match="without a worker configuration or device"):
        join(replace(whole, device=None), NcclOptions(), StandIn, {})


@pytest.mark.skipif(hasattr(torch.distributed, "ProcessGroupNCCL"), reason="this framework has the library")
def test_a_framework_without_the_library_says_what_to_install(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is built without NCCL; install a build for your devices"):
        create(context(0, f"file://{tmp_path}/meeting"), NcclOptions())


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two devices")
class TestNccl(CommunicatorSuite):
    plugin: ClassVar[str | None] = "nccl"
    device: ClassVar[str] = "cuda"
    world_sizes: ClassVar[tuple[int, ...]] = (2,)
    timeout_option: ClassVar[str | None] = "timeout_s"
    options: ClassVar[dict[str, Any]] = {"blocking": True}

    def worker_context(self, place: ParallelSlice) -> WorkerContext:
        # Called on the rank's own thread, whose tensors then lie on its own device.
        torch.cuda.set_device(place.local_rank)
        return replace(super().worker_context(place), device=torch.device("cuda", place.local_rank))
