"""Engines over the distribution of fakes."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import pytest

from hardpoint.engine.spec import EngineSpec
from hardpoint.interfaces import (
    ModelArtifact,
    ModelInfo,
    ModelLimits,
    ParallelSlice,
    SchedulerLimits,
    ThreadPlan,
    WorkerConfig,
)
from hardpoint.ipc import create_runtime_dir
from hardpoint.plugins.discovery import discover
from hardpoint.plugins.plan import PluginPlan
from hardpoint.plugins.resolve import build_plan
from hardpoint.plugins.runtime import PluginRuntime
from hardpoint.plugins.selection import PluginSelection
from hardpoint.roles import ProcessRole

FAKES = Path(__file__).parents[1] / "_fake_dist"
KINDS = ("platform", "executor", "worker", "scheduler", "kv_layout", "tokenizer", "chat_renderer", "weight_loader")
MAX_MODEL_LEN = 128
VOCAB_SIZE = 130


@pytest.fixture(autouse=True)
def _fakes_on_path(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(FAKES))
    yield
    sys.modules.pop("hardpoint_fakes", None)


@pytest.fixture(scope="session")
def fake_plan() -> PluginPlan:
    choices: dict[str, str | tuple[str, ...]] = {**dict.fromkeys(KINDS, "fake"), "hash": "sha256"}
    return build_plan(discover([str(FAKES)]), PluginSelection(choices=choices))


@pytest.fixture
def make_spec(fake_plan: PluginPlan) -> Callable[..., EngineSpec]:
    """``script`` configures the scripted worker, ``limits`` overrides scheduler limits, the rest fields of the spec."""

    def make(script: dict[str, Any] | None = None, limits: dict[str, Any] | None = None, **fields: Any) -> EngineSpec:
        info = ModelInfo(
            artifact=ModelArtifact(name="fake", root="/", files=(), source="fake"),
            architecture="Fake",
            config=script or {},
            max_position=MAX_MODEL_LEN,
            vocab_size=VOCAB_SIZE,
            dtype="float32",
            loader="fake",
            tasks=("generate", "embed"),
        )
        sizes: dict[str, Any] = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "max_model_len": MAX_MODEL_LEN}
        scheduler_limits = SchedulerLimits(**{**sizes, **(limits or {})})
        spec = EngineSpec(
            model_name="fake",
            plan=fake_plan.to_bytes(),
            model=info,
            worker_config=WorkerConfig(
                model=info,
                dtype="float32",
                kv_cache_dtype="int8",
                block_size=4,
                threads=ThreadPlan(compute_threads=1),
                parallel=ParallelSlice(),
                **sizes,
            ),
            limits=scheduler_limits,
            model_limits=ModelLimits(vocab_size=VOCAB_SIZE, max_model_len=MAX_MODEL_LEN),
            runtime_dir=create_runtime_dir(),
            log_level="WARNING",
        )
        return msgspec.structs.replace(spec, **fields)

    return make


@pytest.fixture
def make_runtime(fake_plan: PluginPlan) -> Callable[..., PluginRuntime]:
    def make(*roles: ProcessRole) -> PluginRuntime:
        wanted = roles or (ProcessRole.API, ProcessRole.ENGINE, ProcessRole.WORKER)
        return PluginRuntime(fake_plan, wanted)

    return make
