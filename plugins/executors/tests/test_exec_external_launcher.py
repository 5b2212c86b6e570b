"""A rank that somebody else started: its place comes from the environment, and what is missing is said at once."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hardpoint.errors import ConfigError, WorkerError
from hardpoint.interfaces import NoOptions, ParallelSlice
from hardpoint.interfaces.plugin import ProcessRole
from hardpoint.testing.executor_suite import executor_context, worker_config
from hardpoint.testing.faulty_worker import Fault
from hardpoint_executors.external_launcher import create, place_from_environment

PAIR = ParallelSlice(world_size=2, tensor_parallel_size=2)
SECOND = {"RANK": "1", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "10.0.0.1", "MASTER_PORT": "29500"}


def test_the_launcher_says_which_rank_a_process_is() -> None:
    """R4.5: ranks of two hosts count their devices by themselves."""
    place = place_from_environment(PAIR, SECOND)
    assert (place.rank, place.local_rank, place.world_size, place.tensor_parallel_size) == (1, 0, 2, 2)
    assert place.init_method == "env://"


def test_a_single_rank_meets_nobody() -> None:
    alone = place_from_environment(ParallelSlice(), {**SECOND, "RANK": "0", "WORLD_SIZE": "1"})
    assert alone == ParallelSlice()


@pytest.mark.parametrize("left_out", [["RANK"], ["MASTER_ADDR", "MASTER_PORT"], sorted(SECOND)], ids=len)
@pytest.mark.parametrize("empty", [False, True])
def test_everything_missing_is_named_at_once(left_out: list[str], empty: bool) -> None:
    environment = {name: value for name, value in SECOND.items() if name not in left_out}
    environment |= dict.fromkeys(left_out, "") if empty else {}
    with pytest.raises(ConfigError) as caught:
        place_from_environment(PAIR, environment)
    message = str(caught.value)
    assert {name for name in SECOND if name in message.partition(" in the environment")[0]} == set(left_out)
    assert "torchrun --nproc-per-node 2" in message


@pytest.mark.parametrize("text", ["one", "-1", "1.0", " ", "0x1"])
@pytest.mark.parametrize("name", ["RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_PORT"])
def test_a_number_must_be_one(name: str, text: str) -> None:
    with pytest.raises(ConfigError, match=f"whole numbers, not {name}={text!r}"):
        place_from_environment(PAIR, {**SECOND, name: text})


def test_another_number_of_ranks_is_refused() -> None:
    with pytest.raises(
        ConfigError, match=r"WORLD_SIZE is 4.*is 2; set --tensor-parallel-size 4, or launch 2 processes"
    ):
        place_from_environment(PAIR, {**SECOND, "WORLD_SIZE": "4"})
    with pytest.raises(ConfigError, match="RANK is 2; with WORLD_SIZE=2"):
        place_from_environment(PAIR, {**SECOND, "RANK": "2"})


@pytest.fixture
def second(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """This process is the second rank of two; the fake worker is installed in the folder."""
    monkeypatch.syspath_prepend(str(tmp_path))
    for name, value in SECOND.items():
        monkeypatch.setenv(name, value)
    return tmp_path


def test_the_worker_is_that_of_the_rank(second: Path) -> None:
    """R4.2, R4.12: calls reach the worker here, and errors carry its rank."""
    executor = create(executor_context(second, worker_config(2, Fault("warm_up", "raise"))), NoOptions())
    base = executor.collective_rpc("kv_cache_budget")
    assert base == [(1 << 20) + 1], "the fake worker adds its rank"
    with pytest.raises(WorkerError, match="worker rank 1 failed in warm_up") as caught:
        executor.collective_rpc("warm_up")
    assert caught.value.rank == 1
    executor.shutdown()


def test_a_server_is_refused(second: Path) -> None:
    """Its engine runs in a process that the launcher did not start; the worker could not be there."""
    ctx = executor_context(second, worker_config(2))
    with pytest.raises(ConfigError, match="use it with LLM or `hardpoint generate`"):
        create(replace(ctx, roles=frozenset({ProcessRole.ENGINE})), NoOptions())
