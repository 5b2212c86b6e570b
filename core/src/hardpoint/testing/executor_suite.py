"""Conformance of the plugin kind ``executor``: derive from :class:`ExecutorSuite` and say how to create yours."""

from __future__ import annotations

import importlib
import os
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import msgspec
import numpy as np
import pytest

from hardpoint.engine.pipeline import StepPipeline
from hardpoint.errors import ConfigError, EngineDeadError, WorkerError
from hardpoint.interfaces import (
    BlockUpdate,
    Deferred,
    EngineRequest,
    Executor,
    ExecutorContext,
    FinishReason,
    KVCacheConfig,
    KVCacheGroup,
    ModelArtifact,
    ModelInfo,
    ParallelSlice,
    RunnerOutput,
    SamplingParams,
    SchedulerLimits,
    SchedulerOutput,
    ThreadPlan,
    WorkerConfig,
)
from hardpoint.interfaces.plugin import PluginDeclaration
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PlannedPlugin, PluginPlan
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole
from hardpoint.testing.fake_executor import FakeExecutor
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint.testing.fake_worker import FakeWorker
from hardpoint.testing.faulty_worker import FAULTS, Fault
from hardpoint.testing.plugin_suite import PluginSuite

__all__ = ["ExecutorSuite", "empty_step", "executor_context", "install_fake_worker", "worker_config"]

BLOCK_SIZE = 4
NUM_BLOCKS = 64
WORKER = "faulty"


def install_fake_worker(folder: Path, *, version: str = "1.0", entry: str = "hardpoint.testing.faulty_worker") -> None:
    """Make ``folder`` a place of installed packages with one distribution: the worker plugin ``faulty``."""
    metadata = folder / "hardpoint_faulty_worker.dist-info"
    metadata.mkdir(parents=True, exist_ok=True)
    (metadata / "METADATA").write_text(f"Metadata-Version: 2.1\nName: hardpoint-faulty-worker\nVersion: {version}\n")
    (metadata / "entry_points.txt").write_text(f"[hardpoint.worker.v1]\n{WORKER} = {entry}:create\n")
    importlib.invalidate_caches()


def worker_config(world_size: int = 1, *faults: Fault, deferred: bool = False, pending: bool = False) -> WorkerConfig:
    """A configuration the fake worker understands; the model in it does not exist."""
    artifact = ModelArtifact(name="fake", root="/nonexistent", files=(), source="test")
    return WorkerConfig(
        model=ModelInfo(
            artifact=artifact,
            architecture="Fake",
            config={},
            max_position=64,
            vocab_size=97,
            dtype="float32",
            loader="fake",
        ),
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=BLOCK_SIZE,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        threads=ThreadPlan(compute_threads=1),
        parallel=ParallelSlice(world_size=world_size, tensor_parallel_size=world_size),
        extensions={FAULTS: msgspec.to_builtins(list(faults)), "deferred": deferred, "pending": pending},
    )


def executor_context(folder: Path, config: WorkerConfig) -> ExecutorContext:
    """The context of an engine process whose only plugin is the fake worker installed in ``folder``.

    ``folder`` must be on ``sys.path``, from where child processes take it.
    """
    install_fake_worker(folder)
    found = discover([str(folder)])
    plan: PluginPlan = build_plan(found, PluginSelection())
    runtime_dir = folder / "run"
    runtime_dir.mkdir(mode=0o700, exist_ok=True)
    roles = frozenset({ProcessRole.ENGINE, ProcessRole.WORKER})
    return ExecutorContext(
        name="under-test",
        api_version=1,
        roles=roles,
        plugins=PluginRuntime(plan, roles, installed=found),
        worker=WORKER,
        config=config,
        plan=plan.to_bytes(),
        runtime_dir=str(runtime_dir),
    )


class ExecutorSuite(PluginSuite):
    """The contract of :class:`~hardpoint.interfaces.Executor`, over real worker plugins that can fail on demand.

    ``world_sizes`` are those the executor supports; ``interruptible`` says whether a hanging worker can be timed out.
    """

    kind: ClassVar[str] = "executor"
    world_sizes: ClassVar[tuple[int, ...]] = (1,)
    interruptible: ClassVar[bool] = False

    def create_executor(self, ctx: ExecutorContext) -> Executor:
        """The executor under test, as its factory makes it."""
        made: Executor = self.create_plugin(ctx)
        return made

    @pytest.fixture
    def folder(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.syspath_prepend(str(tmp_path))
        return tmp_path

    @pytest.fixture
    def start(self, folder: Path) -> Iterator[Callable[..., Executor]]:
        """``start(world_size, *faults, deferred=False, pending=False)``; every executor is shut down afterwards."""
        started: list[Executor] = []

        def create(world_size: int, *faults: Fault, **switches: bool) -> Executor:
            ctx = executor_context(folder, worker_config(world_size, *faults, **switches))
            started.append(self.create_executor(ctx))
            return started[-1]

        yield create
        for executor in started:
            executor.shutdown(5.0)

    @pytest.mark.parametrize("seed", range(4))
    def test_a_workload_equals_the_in_process_oracle(self, start: Callable[..., Executor], seed: int) -> None:
        """I4.7: every executor gives the same results for one random workload; R4.10 where sampling is deferred."""
        wanted = run_workload(FakeExecutor(FakeWorker(block_size=BLOCK_SIZE)), seed)
        for world_size in self.world_sizes:
            executor = start(world_size, deferred=bool(seed & 1), pending=bool(seed & 2))
            assert run_workload(executor, seed) == wanted

    def test_collective_calls_answer_in_rank_order(self, start: Callable[..., Executor]) -> None:
        """R4.2: one result per worker, or per asked worker."""
        for world_size in self.world_sizes:
            executor = start(world_size)
            assert executor.world_size == world_size
            base = FakeWorker().kv_cache_budget()
            assert executor.collective_rpc("kv_cache_budget") == [base + rank for rank in range(world_size)]
            assert executor.collective_rpc("kv_cache_budget", ranks=[world_size - 1]) == [base + world_size - 1]
            assert executor.collective_rpc("kv_cache_budget", ranks=[]) == []
            assert executor.kv_cache_budget() == base
            assert [layer.layer_name for layer in executor.kv_cache_specs()] == ["layers.0", "layers.1"]

    def test_a_step_returns_one_result_whatever_the_number_of_ranks(self, start: Callable[..., Executor]) -> None:
        """R4.8, R4.9: the first rank's result; futures complete in the order of submission."""
        for world_size in self.world_sizes:
            executor = start(world_size)
            prepare(executor)
            finished: list[int] = []
            futures = [executor.execute(empty_step(step_id)) for step_id in range(20)]
            for step_id, future in enumerate(futures):
                future.add_done_callback(partial(note, finished, step_id))
            results = [future.result(30) for future in futures]
            assert [result.step_id for result in results] == list(range(20))
            assert all(isinstance(result, RunnerOutput) for result in results)
            # Waiters wake before callbacks run, so the last callback may still be on its way.
            wait_until(partial(finished.__eq__, list(range(20))))

    def test_a_step_can_be_submitted_while_the_device_works(self, start: Callable[..., Executor]) -> None:
        """R4.9: results that come later come in order, other calls are answered after them, failures stay apart.

        Only the output rank fails here: a failure of a rank that need not answer may be told early.
        """
        for world_size in self.world_sizes:
            executor = start(world_size, Fault("result", "raise", (0,), after=6), pending=True)
            prepare(executor)
            finished: list[int] = []
            futures = [executor.execute(empty_step(step_id)) for step_id in range(8)]
            for step_id, future in enumerate(futures):
                future.add_done_callback(partial(note, finished, step_id))
            assert [future.result(30).step_id for future in futures[:6]] == list(range(6))
            for future in futures[6:]:
                with pytest.raises(WorkerError, match="fails in result as told"):
                    future.result(30)
            wait_until(partial(finished.__eq__, list(range(8))))
            assert len(executor.collective_rpc("supported_tasks")) == world_size

    def test_execute_and_sample_alternate(self, start: Callable[..., Executor]) -> None:
        """R4.10, I4.6: a second forward while sampling is pending is an error, and so is sampling without one."""
        for world_size in self.world_sizes:
            executor = start(world_size, deferred=True)
            prepare(executor)
            assert executor.execute(empty_step(0)).result(30) == Deferred(0)
            with pytest.raises(WorkerError, match="step 0 still waits"):
                executor.execute(empty_step(1)).result(30)
            assert executor.sample(0, None).result(30).step_id == 0
            with pytest.raises(WorkerError, match="no deferred step 0"):
                executor.sample(0, None).result(30)

    def test_its_flags_are_known_before_it_exists(
        self, start: Callable[..., Executor], planned: PlannedPlugin, declaration: PluginDeclaration
    ) -> None:
        """R4.3: what the factory declares, or has as a class, is what the executor's class says; unsaid is no."""
        factory = self.runtime().load_factory(planned.kind, planned.name).factory
        made = type(start(self.world_sizes[0]))
        for flag in ("uses_actor_framework", "supports_pipeline_parallel"):
            known = declaration.capabilities.get(flag, getattr(factory, flag, False))
            assert known == getattr(made, flag), f"{flag}: known as {known} before, {getattr(made, flag)} on the class"

    def test_supported_tasks_are_asked_once(self, start: Callable[..., Executor]) -> None:
        """R4.11, P4.12: constant facts cost one call."""
        executor = start(self.world_sizes[-1])
        assert {executor.supported_tasks() for _ in range(50)} == {("generate", "call-1")}

    def test_a_failure_carries_rank_and_traceback_and_keeps_the_other_results(
        self, start: Callable[..., Executor]
    ) -> None:
        """R4.12: rank, original traceback text, and no result of another rank is lost."""
        for world_size in self.world_sizes:
            rank = world_size - 1
            executor = start(world_size, Fault("kv_cache_budget", "raise", (rank,)))
            with pytest.raises(WorkerError, match=f"rank {rank} fails in kv_cache_budget as told") as caught:
                executor.collective_rpc("kv_cache_budget")
            assert caught.value.rank == rank
            assert caught.value.kind == "ValueError"
            assert "Traceback" in caught.value.remote_traceback
            assert "in _raise" in caught.value.remote_traceback
            assert sorted(caught.value.results) == list(range(rank))
            assert executor.collective_rpc("supported_tasks", ranks=[rank])

    def test_a_failed_step_fails_its_future_only(self, start: Callable[..., Executor]) -> None:
        """R4.12: the exception arrives at the step's own future; the executor goes on."""
        for world_size in self.world_sizes:
            executor = start(world_size)
            prepare(executor)
            assert executor.execute(empty_step(5)).result(30).step_id == 5
            with pytest.raises(WorkerError, match="step ids must increase"):
                executor.execute(empty_step(5)).result(30)
            assert executor.execute(empty_step(6)).result(30).step_id == 6

    def test_only_registered_methods_can_be_called(self, start: Callable[..., Executor]) -> None:
        """Refused before anything is sent, with the list of what is allowed."""
        executor = start(self.world_sizes[-1])
        for method in ("__init__", "__class__", "_run", "calls", "no_such_method", ""):
            with pytest.raises(ConfigError, match="allowed: check_health"):
                executor.collective_rpc(method)
        with pytest.raises(ConfigError, match="takes 0 arguments, got 1"):
            executor.collective_rpc("warm_up", 1)
        with pytest.raises(ConfigError, match="do not exist"):
            executor.collective_rpc("warm_up", ranks=[self.world_sizes[-1]])

    def test_shutdown_is_idempotent_and_ends_everything(self, start: Callable[..., Executor]) -> None:
        executor = start(self.world_sizes[-1])
        executor.shutdown()
        executor.shutdown()
        with pytest.raises(EngineDeadError, match="shut down"):
            executor.collective_rpc("check_health")
        with pytest.raises(EngineDeadError, match="shut down"):
            executor.execute(empty_step(0)).result(5)

    def test_workers_tell_of_their_plugins(self, start: Callable[..., Executor]) -> None:
        """One report for each rank, in order; none where the workers live in the process that asks."""
        for world_size in self.world_sizes:
            reports = start(world_size).load_reports()
            if reports:
                assert [report.rank for report in reports] == list(range(world_size))
                assert os.getpid() not in {report.pid for report in reports}

    def test_a_death_is_told_once(self, start: Callable[..., Executor]) -> None:
        """Whoever waits for failures hears of a worker that dies, and nothing of an orderly end."""
        told: list[str] = []
        calm = start(self.world_sizes[-1])
        calm.on_failure(told.append)
        calm.shutdown()
        assert told == []
        if not self.interruptible:
            pytest.skip("workers of this executor cannot die alone")
        executor = start(self.world_sizes[-1], Fault("warm_up", "exit", (0,)))
        executor.on_failure(told.append)
        with pytest.raises(EngineDeadError):
            executor.collective_rpc("warm_up")
        wait_until(lambda: bool(told))
        executor.shutdown()
        assert len(told) == 1, f"told {len(told)} times: {told}"
        assert "rank 0" in told[0]

    def test_a_factory_that_fails_is_reported_as_such(self, start: Callable[..., Executor]) -> None:
        with pytest.raises(Exception, match="fails in create as told"):
            start(self.world_sizes[-1], Fault("create", "raise"))

    def test_a_hanging_worker_is_timed_out(self, start: Callable[..., Executor]) -> None:
        if not self.interruptible:
            pytest.skip("calls of this executor cannot be interrupted")
        rank = self.world_sizes[-1] - 1
        executor = start(self.world_sizes[-1], Fault("warm_up", "hang", (rank,)))
        with pytest.raises(WorkerError, match=rf"longer than 0.3 s on worker ranks \[{rank}\]") as caught:
            executor.collective_rpc("warm_up", timeout_s=0.3)
        assert caught.value.rank == rank
        with limit(8.0):
            executor.shutdown(1.0)


def prepare(executor: Executor) -> None:
    """Bring the workers to the point where steps may come."""
    layers = executor.kv_cache_specs()
    group = KVCacheGroup(tuple(layer.layer_name for layer in layers), layers[0].spec)
    executor.initialize_kv_cache(KVCacheConfig(num_blocks=NUM_BLOCKS, groups=(group,), tensors=()))


def run_workload(executor: Executor, seed: int) -> dict[str, list[int]]:
    """Tokens by request: random prompts and lengths, requests that join late, and some that are aborted midway."""
    rng = np.random.default_rng(seed)
    prepare(executor)
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    scheduler = FakeScheduler(limits, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE)
    pipeline = StepPipeline(scheduler, executor)
    tokens: dict[str, list[int]] = {}
    joining = [f"r{i}" for i in range(12)]
    while joining or pipeline.has_work():
        if joining and rng.random() < 0.5:
            prompt = rng.integers(3, 97, rng.integers(1, 40)).astype(np.int32)
            sampling = SamplingParams(max_tokens=int(rng.integers(1, 12)), temperature=0.0)
            scheduler.add(EngineRequest(request_id=joining.pop(), prompt_token_ids=prompt, sampling=sampling))
        if rng.random() < 0.05:
            scheduler.finish(sorted(scheduler.live_request_ids())[:1], FinishReason.ABORT)
        for output in pipeline.advance():
            tokens.setdefault(output.request_id, []).extend(output.new_token_ids)
    return tokens


def empty_step(step_id: int) -> SchedulerOutput:
    """A step without rows."""
    none: Any = np.zeros(0, dtype=np.int32)
    return SchedulerOutput(
        step_id=step_id,
        slots=none,
        generations=none,
        num_computed_tokens=none,
        num_scheduled_tokens=none,
        samples=np.zeros(0, dtype=np.bool_),
        new_rows=(),
        new_blocks=(BlockUpdate(none, none),),
        finished_slots=none,
        preempted_slots=none,
        blocks_to_zero=none,
        num_common_prefix_blocks=(),
        num_tokens=0,
    )


def note(numbers: list[int], number: int, done: Future[Any]) -> None:
    """Record that the future of step ``number`` is complete."""
    numbers.append(number)


def wait_until(condition: Callable[[], bool], timeout_s: float = 10.0) -> None:
    """Poll until ``condition()`` holds; raises ``AssertionError`` when it does not in time."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not true within {timeout_s} s"
        time.sleep(0.01)


@contextmanager
def limit(seconds: float) -> Iterator[None]:
    """Assert that the block takes less time than that."""
    start = time.monotonic()
    yield
    assert time.monotonic() - start < seconds
