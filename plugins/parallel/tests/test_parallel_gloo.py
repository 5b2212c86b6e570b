"""Where ranks meet, what stops them from meeting, and how it is said."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError

from hardpoint.errors import ConfigError
from hardpoint.interfaces import ParallelSlice, WorkerContext
from hardpoint_parallel.gloo import GlooOptions, create
from hardpoint_parallel.process_group import ProcessGroupCommunicator
from hardpoint_parallel.rendezvous import GroupPlace, meet
from hardpoint_testing_torch.communicator_suite import CommunicatorSuite
from hardpoint_testing_torch.rank_threads import RankThreads

PATIENCE_S = 60.0


def pair(rank: int, address: str | None, **fields: Any) -> ParallelSlice:
    settings = {"rank": rank, "local_rank": rank, "world_size": 2, "tensor_parallel_size": 2, "init_method": address}
    return ParallelSlice(**{**settings, **fields})


def context(place: ParallelSlice) -> WorkerContext:
    return CommunicatorSuite().worker_context(place)


@pytest.mark.parametrize(
    ("rank", "size", "expected", "label"),
    [
        (0, 1, GroupPlace(0, 0, 1), "ranks 0 to 0"),
        (1, 2, GroupPlace(0, 1, 2), "ranks 0 to 1"),
        (5, 2, GroupPlace(2, 1, 2), "ranks 4 to 5"),
        (7, 4, GroupPlace(1, 3, 4), "ranks 4 to 7"),
    ],
)
def test_neighbors_share_layers(rank: int, size: int, expected: GroupPlace, label: str) -> None:
    """R7.3: groups are runs of consecutive ranks."""
    place = GroupPlace.of(ParallelSlice(rank=rank, world_size=8, tensor_parallel_size=size))
    assert place == expected
    assert place.label == label


@pytest.mark.parametrize("address", [None, ""])
def test_a_missing_address_names_what_sets_one(address: str | None) -> None:
    with pytest.raises(
        ConfigError, match="rank 1 of 2 has no address.*choose --executor multiproc or external_launcher"
    ):
        meet(pair(1, address), 1.0)


@pytest.mark.parametrize("address", ["gopher://nowhere", "tcp://", "/just/a/path"])
def test_an_impossible_address_says_what_addresses_look_like(address: str) -> None:
    with pytest.raises(ConfigError, match=r"cannot meet the others at .*addresses are file:///path, tcp://host:port"):
        meet(pair(0, address), 1.0)


def test_an_environment_without_an_address_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MASTER_ADDR", raising=False)
    monkeypatch.delenv("MASTER_PORT", raising=False)
    with pytest.raises(ConfigError, match="MASTER_ADDR"):
        meet(pair(0, "env://"), 1.0)


def test_a_rank_that_never_comes_is_reported_in_time(tmp_path: Path) -> None:
    """R7.13: with the group and the own rank; the setting that bounds it is named."""
    options = GlooOptions(meeting_timeout_s=0.2)
    with pytest.raises(ConfigError) as caught:
        create(context(pair(1, f"file://{tmp_path}/meeting")), options)
    message = str(caught.value)
    assert "rank 1 of ranks 0 to 1 has not found the others within 0.2 s" in message
    assert "plugins.communicator.gloo.meeting_timeout_s" in message


def test_an_unknown_interface_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"interface 'nonesuch0'.*set plugins.communicator.gloo.interface"):
        create(context(pair(0, f"file://{tmp_path}/meeting")), GlooOptions(interface="nonesuch0"))


def test_a_context_without_configuration_is_refused(tmp_path: Path) -> None:
    whole = context(pair(0, f"file://{tmp_path}/meeting"))
    with pytest.raises(ConfigError, match="without a worker configuration"):
        create(replace(whole, config=None), GlooOptions())


def both(tmp_path: Path, use: Any, **options: Any) -> RankThreads[Any]:
    """``use(communicator, rank)`` on two ranks, to its end or error."""

    def work(rank: int) -> Any:
        return use(create(context(pair(rank, f"file://{tmp_path}/meeting")), GlooOptions(**options)), rank)

    with RankThreads[Any].running(2, work, patience_s=PATIENCE_S) as ranks:
        ranks.join(0, 1)
    return ranks


def test_a_failed_collective_says_which_and_whose(tmp_path: Path) -> None:
    """R7.13: operation, group, own rank and the setting that bounds it."""

    def use(communicator: ProcessGroupCommunicator, rank: int) -> None:
        if rank == 1:
            communicator.close()
        else:
            communicator.all_gather(torch.ones(1), 0)

    error = str(both(tmp_path, use, timeout_s=7.0).errors[0])
    assert error.startswith("all_gather of ranks 0 to 1 failed on rank 0 of them: ")
    assert error.endswith("plugins.communicator.gloo.timeout_s (7 s)")


def test_a_wrong_dimension_is_found_before_anything_is_sent(tmp_path: Path) -> None:
    def use(communicator: ProcessGroupCommunicator, rank: int) -> float:
        with pytest.raises(IndexError, match="dim 2 is outside a tensor of 1 dimensions"):
            communicator.all_gather(torch.ones(3), 2)
        # The ranks are still in step.
        return float(communicator.all_reduce(torch.ones(1)))

    assert both(tmp_path, use).results == {0: 2.0, 1: 2.0}


def test_sums_of_contiguous_tensors_are_made_in_place(tmp_path: Path) -> None:
    """Layers reduce large outputs that nobody needs afterwards: a copy of each would be waste."""

    def use(communicator: ProcessGroupCommunicator, rank: int) -> bool:
        tensor = torch.full((4,), float(rank))
        return communicator.all_reduce(tensor) is tensor and tensor.tolist() == [1.0] * 4

    assert both(tmp_path, use).results == {0: True, 1: True}


def test_no_default_group_is_left_in_the_process(tmp_path: Path) -> None:
    """Programs that embed an engine have groups of their own."""
    both(tmp_path, lambda communicator, rank: communicator.all_reduce(torch.ones(1)))
    assert not torch.distributed.is_initialized()


@pytest.mark.parametrize("option", ["timeout_s", "meeting_timeout_s"])
@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e18, 0.0])
def test_a_time_that_no_wait_can_take_is_refused_as_an_option(option: str, seconds: float) -> None:
    with pytest.raises(ValidationError, match=option):
        GlooOptions.model_validate({option: seconds})
