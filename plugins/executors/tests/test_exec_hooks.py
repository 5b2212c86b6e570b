"""Hooks in the processes of workers: each rank tells of its model, once, between its start and its end."""

from __future__ import annotations

import dataclasses
import importlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.errors import WorkerError
from hardpoint.interfaces import Executor, ExecutorContext, NoOptions
from hardpoint.plugins.plan import PluginPlan
from hardpoint.testing.executor_suite import executor_context, worker_config
from hardpoint.testing.hooks_reset import forget_hooks
from hardpoint_executors import multiproc, uniproc

SOURCE = """
import json, os
from pathlib import Path
from hardpoint.interfaces.hooks import hookimpl
from hardpoint.interfaces.plugin import plugin

def note(hook, **facts):
    with open(Path(__file__).with_name("trace.jsonl"), "a") as file:
        file.write(json.dumps({"hook": hook, "pid": os.getpid(), **facts}) + chr(10))

class Observer:
    @hookimpl
    def process_booting(self, rank): note("booting", rank=rank)
    @hookimpl
    def process_started(self, rank): note("started", rank=rank)
    @hookimpl
    def process_stopping(self): note("stopping")
    @hookimpl
    def model_loaded(self, model_name, rank, load_seconds):
        note("loaded", rank=rank, model=model_name, seconds=load_seconds)
        if Path(__file__).with_name("refuse").exists():
            raise OSError("no room for the record")

@plugin("hooks")
def create(ctx, options): return Observer()
"""

Prepare = Callable[[int], ExecutorContext]


@pytest.fixture
def prepare(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """``prepare(world_size)``: an engine's context with the fake worker and the observer installed."""
    monkeypatch.syspath_prepend(str(tmp_path))
    metadata = tmp_path / "exec_observer.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: exec-observer\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[hardpoint.hooks.v1]\nobserver = exec_observer:create\n")
    (tmp_path / "exec_observer.py").write_text(SOURCE)
    importlib.invalidate_caches()
    yield lambda world_size: executor_context(tmp_path, worker_config(world_size))
    forget_hooks()


def trace(folder: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (folder / "trace.jsonl").read_text().splitlines()]


def load(executor: Executor) -> None:
    try:
        executor.collective_rpc("init_device")
        executor.collective_rpc("load_model")
    finally:
        executor.shutdown()


def test_every_rank_tells_of_its_model_once(prepare: Prepare, tmp_path: Path) -> None:
    load(multiproc.create(prepare(2), multiproc.MultiprocOptions()))
    events = trace(tmp_path)
    assert len({event["pid"] for event in events}) == 2
    for rank in (0, 1):
        (pid,) = {event["pid"] for event in events if event.get("rank") == rank}
        mine = [event for event in events if event["pid"] == pid]
        assert [event["hook"] for event in mine] == ["booting", "started", "loaded", "stopping"]
        assert mine[2]["model"] == "fake"
        assert 0 <= mine[2]["seconds"] < 60


def test_a_worker_in_this_process_tells_as_well(prepare: Prepare, tmp_path: Path) -> None:
    load(uniproc.create(prepare(1), NoOptions()))
    assert [(event["hook"], event["rank"]) for event in trace(tmp_path)] == [("booting", None), ("loaded", 0)]


@pytest.mark.parametrize("strict", [False, True])
def test_a_failing_hook_fails_the_load_only_where_it_is_strict(prepare: Prepare, tmp_path: Path, strict: bool) -> None:
    (tmp_path / "refuse").touch()
    context = prepare(2)
    if strict:
        plan = msgspec.structs.replace(PluginPlan.from_bytes(context.plan), strict=True)
        context = dataclasses.replace(context, plan=plan.to_bytes())
        with pytest.raises(WorkerError, match="hook model_loaded of 'observer' raised OSError: no room"):
            load(multiproc.create(context, multiproc.MultiprocOptions()))
    else:
        load(multiproc.create(context, multiproc.MultiprocOptions()))
    assert [event["hook"] for event in trace(tmp_path)].count("loaded") == 2
