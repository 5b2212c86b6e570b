"""What holds between the engine and any executor: what is called, what it keeps, and that it makes no difference."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from dataclasses import fields
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from hardpoint.config import EngineConfig
from hardpoint.engine.core import EngineCore
from hardpoint.interfaces import (
    Deferred,
    EngineRequest,
    Executor,
    ExecutorContext,
    GrammarMask,
    NoOptions,
    RunnerOutput,
    SamplingParams,
    SchedulerContext,
    SchedulerLimits,
    SchedulerOutput,
)
from hardpoint.interfaces.plugin import declaration_of
from hardpoint.testing.executor_suite import (
    BLOCK_SIZE,
    NUM_BLOCKS,
    executor_context,
    prepare,
    run_workload,
    worker_config,
)
from hardpoint.testing.fake_executor import FakeExecutor
from hardpoint.testing.fake_scheduler import FakeScheduler
from hardpoint_executors import external_launcher, multiproc, uniproc
from hardpoint_executors.build import build_worker
from hardpoint_executors.context import require


class Scripted(FakeExecutor):
    """A stranger's executor: takes note of every call, in order."""

    def __init__(self, ctx: ExecutorContext, options: NoOptions) -> None:
        plugins, config = require(ctx)
        super().__init__(build_worker(plugins, ctx.worker, config, {}))
        self.calls: list[str] = []

    def collective_rpc(
        self, method: str, *args: Any, ranks: Sequence[int] | None = None, timeout_s: float | None = None
    ) -> list[Any]:
        self.calls.append(method)
        return super().collective_rpc(method, *args, ranks=ranks, timeout_s=timeout_s)

    def execute(self, step: SchedulerOutput) -> Future[RunnerOutput | Deferred]:
        self.calls.append("execute")
        return super().execute(step)

    def sample(self, step_id: int, grammar: GrammarMask | None) -> Future[RunnerOutput]:
        self.calls.append("sample")
        return super().sample(step_id, grammar)


KINDS: dict[str, Callable[[ExecutorContext], Executor]] = {
    "uniproc": lambda ctx: uniproc.create(ctx, NoOptions()),
    "multiproc": lambda ctx: multiproc.create(ctx, multiproc.MultiprocOptions()),
    "external_launcher": lambda ctx: external_launcher.create(ctx, NoOptions()),
    "scripted": lambda ctx: Scripted(ctx, NoOptions()),
}


@pytest.fixture
def start(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Executor]]:
    """``start(kind, world_size=1, **switches)``, where this process is the only rank that a launcher started."""
    monkeypatch.syspath_prepend(str(tmp_path))
    place = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "1"}
    for name, value in place.items():
        monkeypatch.setenv(name, value)
    started: list[Executor] = []

    def create(kind: str, world_size: int = 1, **switches: bool) -> Executor:
        started.append(KINDS[kind](executor_context(tmp_path, worker_config(world_size, **switches))))
        return started[-1]

    yield create
    for executor in started:
        executor.shutdown(5.0)


@pytest.mark.parametrize("deferred", [False, True])
def test_the_engine_asks_for_steps_and_nothing_else(start: Callable[..., Executor], deferred: bool) -> None:
    """R4.1: who computes, where, and by what transport shows nowhere in the engine's calls."""
    executor = start("scripted", deferred=deferred)
    assert isinstance(executor, Scripted)
    prepare(executor)
    executor.calls.clear()
    limits = SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64)
    core = EngineCore(FakeScheduler(limits, num_blocks=NUM_BLOCKS, block_size=BLOCK_SIZE), executor)
    for name in "abc":
        prompt = np.arange(3, 30, dtype=np.int32)
        sampling = SamplingParams(max_tokens=5, temperature=0.0)
        core.add(EngineRequest(request_id=name, prompt_token_ids=prompt, sampling=sampling))
    while core.has_work():
        core.step()
    steps = ["execute", "sample"] if deferred else ["execute"]
    assert executor.calls == steps * core.num_steps
    core.shutdown()


def test_a_scheduler_is_told_of_no_devices_and_no_processes() -> None:
    """R4.1: there is no field for it."""
    told = {field.name for field in fields(SchedulerContext)} | set(SchedulerLimits.__struct_fields__)
    told -= {"rank"}  # of every plugin's context, and None outside workers
    about = ("rank", "world", "device", "process", "executor", "parallel", "plan")
    assert [name for name in told if any(word in name for word in about)] == []


@pytest.mark.parametrize("kind", ["uniproc", "external_launcher", pytest.param("multiproc", marks=pytest.mark.slow)])
def test_a_new_executor_keeps_nothing_for_features_nobody_uses(start: Callable[..., Executor], kind: str) -> None:
    """R4.4: no tags of sleep, no aggregators of connectors' outputs, and no tasks before they are asked for."""
    executor = start(kind)
    held = {name: value for name, value in vars(executor).items() if not name.startswith("__")}
    assert [name for name in held if any(word in name for word in ("sleep", "aggregat", "connector"))] == []
    assert executor._supported_tasks is None


WORLDS = [
    ("uniproc", 1),
    ("external_launcher", 1),
    pytest.param("multiproc", 1, marks=pytest.mark.slow),
    pytest.param("multiproc", 2, marks=pytest.mark.slow),
]


@pytest.mark.parametrize("seed", [0, 3])
@pytest.mark.parametrize(("kind", "world_size"), WORLDS)
def test_executors_make_no_difference(start: Callable[..., Executor], kind: str, world_size: int, seed: int) -> None:
    """I4.7: one random workload, one result, whoever carries the steps; with and without steps that are deferred."""
    switches = {"deferred": bool(seed & 1), "pending": bool(seed & 2)}
    expected = run_workload(start("scripted", **switches), seed)
    assert run_workload(start(kind, world_size, **switches), seed) == expected
    assert sum(map(len, expected.values())) > 10, "the workload generates something"


@pytest.mark.parametrize(
    "made",
    [uniproc.UniprocExecutor, multiproc.MultiprocExecutor, external_launcher.ExternalLauncherExecutor],
    ids=lambda made: made.__name__,
)
def test_the_classes_are_their_own_factories(made: type[Executor]) -> None:
    """R4.3, R4.5: so each may be given as a class or by its path, and its flags are those of the class."""
    declaration = declaration_of(made)
    assert declaration is not None
    assert (declaration.kind, dict(declaration.capabilities)) == ("executor", {})
    assert not made.supports_pipeline_parallel
    given = f"{made.__module__}:{made.__qualname__}"
    assert EngineConfig.model_validate(EngineConfig.sections("x", executor=made)).execution.executor == given
