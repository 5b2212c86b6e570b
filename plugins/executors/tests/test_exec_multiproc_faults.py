"""Worker processes that die, hang, diverge or start wrongly: seen at once, named, and nothing left behind."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import msgspec
import numpy as np
import pytest
from pydantic import ValidationError

from hardpoint.errors import ConfigError, EngineDeadError, HardpointError, PluginMismatchError, WorkerError
from hardpoint.interfaces import NewRow, SamplingParams
from hardpoint.testing.executor_suite import empty_step, executor_context, install_fake_worker, worker_config
from hardpoint.testing.faulty_worker import Fault
from hardpoint_executors.multiproc import MultiprocExecutor, MultiprocOptions, create

Start = Callable[..., MultiprocExecutor]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    started: list[MultiprocExecutor] = []

    def build(world_size: int, *faults: Fault, start_timeout_s: float = 60.0) -> MultiprocExecutor:
        ctx = executor_context(folder, worker_config(world_size, *faults))
        started.append(create(ctx, MultiprocOptions(start_timeout_s=start_timeout_s)))
        return started[-1]

    yield build
    for executor in started:
        executor.shutdown(2.0)
        wait_until(lambda: not any(map(alive, executor.pids)))  # noqa: B023


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except (FileNotFoundError, ProcessLookupError):
        return False


def children() -> set[int]:
    found: set[int] = set()
    for task in Path("/proc/self/task").iterdir():
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):  # The thread has ended meanwhile.
            found.update(map(int, (task / "children").read_text().split()))
    return found


def named_shared_memory(pid: int) -> set[str]:
    """What the process has mapped that a kill could leave lying in the system."""
    lines = Path(f"/proc/{pid}/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[-1] for line in lines if "/dev/shm/" in line}


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.02)


@pytest.mark.parametrize("rank", [0, 1])
def test_a_killed_worker_ends_every_pending_call_at_once(start: Start, rank: int) -> None:
    """SIGKILL mid-step: the message names rank, process and signal, whichever rank it was."""
    executor = start(2, Fault("execute", "hang"))
    reasons: list[str] = []
    told = threading.Event()
    executor.on_failure(lambda reason: (reasons.append(reason), told.set())[1])  # type: ignore[func-returns-value]
    futures = [executor.execute(empty_step(i)) for i in range(3)]
    began = time.monotonic()
    os.kill(executor.pids[rank], signal.SIGKILL)
    for future in futures:
        with pytest.raises(EngineDeadError, match=rf"rank {rank} \(pid \d+\) ended with signal SIGKILL"):
            future.result(5)
    assert told.wait(5)
    assert time.monotonic() - began < 2.0
    with pytest.raises(EngineDeadError, match=f"rank {rank}"):
        executor.collective_rpc("check_health")
    with pytest.raises(EngineDeadError, match=f"rank {rank}"):
        executor.execute(empty_step(9)).result(1)
    executor.shutdown(5.0)
    assert len(reasons) == 1
    late: list[str] = []
    executor.on_failure(late.append)
    assert late == reasons


def test_a_worker_that_exits_by_itself_is_named_with_its_code(start: Start) -> None:
    executor = start(2, Fault("load_model", "exit", (1,)))
    with pytest.raises(EngineDeadError, match=r"rank 1 \(pid \d+\) ended with exit code 3"):
        executor.collective_rpc("load_model")


def test_an_idle_workers_death_is_seen_too(start: Start) -> None:
    executor = start(1)
    told = threading.Event()
    executor.on_failure(lambda reason: told.set())
    os.kill(executor.pids[0], signal.SIGKILL)
    assert told.wait(2.0)


def test_the_survivors_stop_in_good_order(start: Start) -> None:
    executor = start(2)
    os.kill(executor.pids[0], signal.SIGKILL)
    wait_until(lambda: not alive(executor.pids[0]))
    began = time.monotonic()
    executor.shutdown(10.0)
    assert time.monotonic() - began < 5.0
    assert not any(map(alive, executor.pids))


def test_ranks_that_diverge_fail_the_executor(start: Start) -> None:
    """R4.12: a failure that arrives after the step's result was handed out is not dropped."""
    executor = start(2, Fault("execute", "raise", (1,), after=1))
    told = threading.Event()
    reasons: list[str] = []
    executor.on_failure(lambda reason: (reasons.append(reason), told.set())[1])  # type: ignore[func-returns-value]
    assert executor.execute(empty_step(0)).result(20).step_id == 0
    error = executor.execute(empty_step(1)).exception(20)
    if error is None:
        assert told.wait(10)
        assert "rank 1 failed in execute: ValueError" in reasons[0]
    else:
        # Rank 1 was quicker than rank 0, so the step's own future carries its failure.
        assert isinstance(error, WorkerError)
        assert error.rank == 1


@pytest.mark.slow
def test_a_failure_that_all_ranks_share_is_no_divergence(start: Start) -> None:
    executor = start(2)
    assert executor.execute(empty_step(5)).result(20).step_id == 5
    for _ in range(5):
        with pytest.raises(WorkerError, match="step ids must increase"):
            executor.execute(empty_step(5)).result(20)
    assert executor.collective_rpc("check_health") == [None, None]
    assert executor.execute(empty_step(6)).result(20).step_id == 6


@pytest.mark.slow
def test_a_stopped_worker_cannot_delay_the_end(start: Start) -> None:
    executor = start(2)
    os.kill(executor.pids[1], signal.SIGSTOP)
    began = time.monotonic()
    executor.shutdown(1.0)
    assert time.monotonic() - began < 5.0
    assert not any(map(alive, executor.pids))


def test_a_terminate_signal_to_the_group_leaves_workers_to_the_engine(start: Start) -> None:
    """SIGTERM: in-flight steps finish; the engine decides when workers stop."""
    executor = start(2)
    for pid in executor.pids:
        os.kill(pid, signal.SIGTERM)
        os.kill(pid, signal.SIGINT)
    time.sleep(0.2)
    assert executor.collective_rpc("check_health") == [None, None]


def test_a_worker_that_dies_while_starting_is_reported(start: Start) -> None:
    before = children()
    with pytest.raises(EngineDeadError, match="rank 1 .* ended with exit code 3 while it started"):
        start(2, Fault("create", "exit", (1,)))
    assert children() == before


@pytest.mark.slow
def test_starting_has_a_time_limit(start: Start) -> None:
    before = children()
    with pytest.raises(EngineDeadError, match=r"rank 1 .* not ready after 1\.5 s; raise plugins\.executor\.multiproc"):
        start(2, Fault("create", "hang", (1,)), start_timeout_s=1.5)
    assert children() == before


def test_more_ranks_than_the_host_should_bear_are_refused_before_any_starts(start: Start) -> None:
    before = children()
    with pytest.raises(ConfigError, match=r"1000 worker processes.*at most 16.*multiproc\.max_ranks"):
        start(1000)
    assert children() == before


def test_a_worker_with_other_plugins_than_the_plan_stops_the_start(folder: Path) -> None:
    """A process whose plugins differ from the plan: process, plugin and both versions are named."""
    before = children()
    ctx = executor_context(folder, worker_config(2))
    install_fake_worker(folder, version="9.9")
    with pytest.raises(PluginMismatchError, match=r"process \d+ \(worker, rank \d\).*worker:faulty.*1\.0.*9\.9"):
        create(ctx, MultiprocOptions())
    assert children() == before


def test_the_projects_own_errors_keep_their_class_through_the_start(folder: Path) -> None:
    ctx = executor_context(folder, worker_config(1))
    install_fake_worker(folder, entry="missing_module")
    with pytest.raises(HardpointError, match="missing_module") as caught:
        create(ctx, MultiprocOptions())
    assert not isinstance(caught.value, WorkerError)


def test_each_process_reports_what_it_loaded(start: Start) -> None:
    executor = start(2)
    reports = executor.load_reports()
    assert [report.rank for report in reports] == [0, 1]
    assert tuple(report.pid for report in reports) == executor.pids
    assert [[(s.name, s.state) for s in report.plugins] for report in reports] == [[("faulty", "created")]] * 2
    assert os.getpid() not in executor.pids


@pytest.mark.slow
def test_reports_tell_the_present_and_not_the_start(start: Start) -> None:
    """R12.16: each call asks the worker processes anew; a worker that does not answer is named."""
    executor = start(2, Fault("check_health", "hang", ranks=(1,)))
    assert executor.load_reports() == executor.load_reports()
    with pytest.raises(WorkerError):
        executor.collective_rpc("check_health", timeout_s=0.2)
    with pytest.raises(WorkerError, match=r"load_report took longer than .* ranks \[1\]"):
        executor.load_reports()


def test_a_lost_worker_has_no_report(start: Start) -> None:
    executor = start(2, Fault("check_health", "exit", ranks=(1,)))
    with pytest.raises(EngineDeadError):
        executor.collective_rpc("check_health")
    with pytest.raises(EngineDeadError):
        executor.load_reports()


def test_a_step_larger_than_any_buffer_arrives_whole(start: Start) -> None:
    """A prompt of a million tokens crosses in one message, and answers keep flowing while it is sent."""
    executor = start(2)
    tokens = np.arange(1_000_000, dtype=np.int32)
    row = NewRow(
        request_id="r",
        slot=0,
        generation=1,
        token_ids=tokens,
        num_prompt_tokens=len(tokens),
        block_ids=(np.zeros(0, np.int32),),
        sampling=SamplingParams(),
    )
    assert executor.execute(msgspec.structs.replace(empty_step(0), new_rows=(row,))).result(60).step_id == 0
    assert executor.collective_rpc("check_health", timeout_s=30) == [None, None]


def test_nothing_is_left_behind(start: Start, folder: Path) -> None:
    """No process, socket, file, shared memory, thread or descriptor after an orderly end."""

    def things() -> set[str]:
        descriptors = Path("/proc/self/fd").iterdir()
        open_files = {f"{fd.name} {os.readlink(fd)}" for fd in descriptors if fd.is_symlink()}
        names = {f"thread {thread.name}" for thread in threading.enumerate()}
        files = {str(path) for path in (folder / "run").glob("*")}
        return {*open_files, *names, *files, *(f"child {pid}" for pid in children())}

    before, mapped_by_others = things(), named_shared_memory(os.getpid())
    executor = start(2)
    assert named_shared_memory(os.getpid()) == mapped_by_others
    assert not any(map(named_shared_memory, executor.pids))
    executor.collective_rpc("check_health")
    executor.shutdown(5.0)
    wait_until(lambda: not {thing for thing in things() - before if "/proc/" not in thing})


PARENT = """
import os, sys, time
from pathlib import Path
folder = Path(sys.argv[1])
sys.path.insert(0, str(folder))
from hardpoint.testing.executor_suite import empty_step, executor_context, worker_config
from hardpoint.testing.faulty_worker import Fault
from hardpoint_executors.multiproc import MultiprocOptions, create
faults = [Fault("execute", "hang")] if sys.argv[2] == "busy" else []
executor = create(executor_context(folder, worker_config(2, *faults)), MultiprocOptions())
executor.execute(empty_step(0))
print(*executor.pids, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
@pytest.mark.parametrize("state", ["idle", "busy"])
def test_workers_end_with_the_engine(tmp_path: Path, how: signal.Signals, state: str) -> None:
    """kill -9 of the engine, also during load: workers are gone within seconds, and so is every file."""
    engine = subprocess.Popen([sys.executable, "-c", PARENT, str(tmp_path), state], stdout=subprocess.PIPE, text=True)
    assert engine.stdout is not None
    pids = [int(pid) for pid in engine.stdout.readline().split()]
    assert len(pids) == 2
    assert all(map(alive, pids))
    assert not any(map(named_shared_memory, pids))
    engine.send_signal(how)
    wait_until(lambda: not any(map(alive, pids)), 5.0)
    engine.communicate(timeout=10)
    assert list((tmp_path / "run").iterdir()) == []


def test_the_output_rank_answers_for_the_step(folder: Path) -> None:
    """R4.8: with a pipeline it is the first rank of the last stage, and only its result is awaited."""
    config = worker_config(2, Fault("execute", "hang", (0,)))
    parallel = msgspec.structs.replace(config.parallel, tensor_parallel_size=1, pipeline_parallel_size=2)
    assert parallel.output_rank == 1
    ctx = executor_context(folder, msgspec.structs.replace(config, parallel=parallel))
    executor = create(ctx, MultiprocOptions())
    assert executor.execute(empty_step(0)).result(20).step_id == 0
    executor.shutdown(0.5)


def test_a_shutdown_from_the_failure_callback_is_allowed(start: Start) -> None:
    executor = start(2)
    done = threading.Event()
    executor.on_failure(lambda reason: (executor.shutdown(1.0), done.set())[1])  # type: ignore[func-returns-value]
    os.kill(executor.pids[0], signal.SIGKILL)
    assert done.wait(10)
    wait_until(partial(lambda pids: not any(map(alive, pids)), executor.pids))


def test_a_step_whose_device_never_answers_holds_nothing_else_up(folder: Path) -> None:
    """R4.9: submitting does not wait for results, neither for the next step nor for the end."""
    executor = create(
        executor_context(folder, worker_config(1, Fault("result", "hang"), pending=True)), MultiprocOptions()
    )
    futures = [executor.execute(empty_step(step_id)) for step_id in range(3)]
    assert not any(future.done() for future in futures)
    began = time.monotonic()
    executor.shutdown(0.5)
    assert time.monotonic() - began < 5.0
    for future in futures:
        with pytest.raises(EngineDeadError, match="shut down"):
            future.result(1)


@pytest.mark.parametrize("seconds", [float("inf"), float("nan"), 1e18, 0.0])
def test_a_start_without_an_end_is_refused_as_an_option(seconds: float) -> None:
    with pytest.raises(ValidationError, match="start_timeout_s"):
        MultiprocOptions(start_timeout_s=seconds)
