"""I12.7: configurations survive every way of copying, so whatever launches a process can pass them on."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from hardpoint.config import AppConfig
from hardpoint.interfaces import (
    EngineSettings,
    ModelArtifact,
    ModelInfo,
    ParallelSlice,
    SchedulerLimits,
    ThreadPlan,
    WorkerConfig,
)

INFO = ModelInfo(
    artifact=ModelArtifact(name="m", root="/m", files=("a.gguf",), source="test"),
    architecture="Fake",
    config={"hidden_size": 8, "nested": {"factor": 1.5}},
    max_position=64,
    vocab_size=97,
    dtype="float32",
    loader="fake",
)
VALUES: list[Any] = [
    AppConfig.model_validate(
        {
            "engines": {"m": {"model": {"name": "m"}, "cache": {"block_size": 8}}},
            "plugins": {"platform": {"fake": {"num_devices": 3}}},
        }
    ),
    EngineSettings(worker="w", model={"layers": 2}),
    SchedulerLimits(max_num_seqs=4, max_num_batched_tokens=16, max_model_len=64),
    INFO,
    WorkerConfig(
        model=INFO,
        dtype="float32",
        kv_cache_dtype="float32",
        block_size=16,
        max_model_len=64,
        max_num_seqs=4,
        max_num_batched_tokens=16,
        threads=ThreadPlan(compute_threads=2, cores=(0, 2)),
        parallel=ParallelSlice(world_size=2, tensor_parallel_size=2),
    ),
]


@pytest.mark.parametrize("copied", [lambda v: pickle.loads(pickle.dumps(v)), copy.deepcopy])  # noqa: S301 (own bytes)
@pytest.mark.parametrize("value", VALUES, ids=lambda value: type(value).__name__)
def test_a_copy_is_equal_and_apart(value: Any, copied: Callable[[Any], Any]) -> None:
    again = copied(value)
    assert again == value
    assert type(again) is type(value)


@pytest.mark.parametrize("value", VALUES[1:], ids=lambda value: type(value).__name__)
def test_records_travel_without_it(value: Any) -> None:
    """What really goes between our processes."""
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(value), type=type(value)) == value
