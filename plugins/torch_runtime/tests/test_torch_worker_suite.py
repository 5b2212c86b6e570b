"""The torch worker, as it is installed, passes the conformance suite of its kind, over several models."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint_testing_torch import WorkerSuite


class TestTorchWorker(WorkerSuite):
    plugin: ClassVar[str | None] = "torch"


class TestTorchWorkerWithWindows(WorkerSuite):
    """Layers of two kinds, hence two groups of KV blocks."""

    plugin: ClassVar[str | None] = "torch"
    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    }


@pytest.mark.slow
class TestTorchWorkerThatPromises(WorkerSuite):
    """Results stay on the device until they are asked for."""

    plugin: ClassVar[str | None] = "torch"
    options: ClassVar[Mapping[str, Any]] = {"asynchronous_output": True}
