"""The torch worker passes the suite of its kind with its decoding steps captured and replayed."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import pytest

from hardpoint.interfaces.platform import Platform
from hardpoint.testing.fake_platform import FakeGraphPool
from hardpoint_testing_torch import FakeGraphBackend, FixedShapeBackend, TinyModel, WorkerSuite
from hardpoint_testing_torch.worker_base import PROMPTS, Start
from hardpoint_testing_torch.worker_world import ATTENTION, KitPlatform, WorkerWorld, check_greedy

pytestmark = pytest.mark.slow


class GraphPlatform(KitPlatform):
    @classmethod
    def create_graph_pool(cls) -> FakeGraphPool:
        return FakeGraphPool()


class CapturedSuite(WorkerSuite):
    """Sizes leave steps of three rows to be padded, and those of more than four to run as they are."""

    plugin: ClassVar[str | None] = "torch"
    uses_attention_backends: ClassVar[bool] = False
    """The suite would choose one of its own, which knows no graphs."""
    options: ClassVar[Mapping[str, Any]] = {"graph_backend": "fake", "graph_sizes": (1, 2, 4)}

    def create_platform(self) -> Platform:
        return GraphPlatform()

    def world(self, tiny: TinyModel, **config: Any) -> WorkerWorld:
        world = super().world(tiny, **config)
        world.plugins.own["attention_backend", ATTENTION] = lambda ctx: FixedShapeBackend()
        world.plugins.own["graph_backend", "fake"] = lambda ctx: FakeGraphBackend()
        return world


class TestCapturedWorker(CapturedSuite):
    """R4.53, R4.54, R4.55, P4.13: with the layers of a real model."""

    def test_its_decodes_are_replayed(self, tiny: TinyModel, start: Start) -> None:
        """All the other tests mean something: three rows are padded to four, from the first decode to the last."""
        world, backend = self.world(tiny), FakeGraphBackend()
        world.plugins.own["graph_backend", "fake"] = lambda ctx: backend
        driver = start(world)
        for name in ("one", "few", "long"):
            driver.add(name, PROMPTS[name])
        answers = driver.generate(7)
        assert [graph.num_replays for graph in backend.graphs] == [6]
        for name, tokens in answers.items():
            check_greedy(tiny, PROMPTS[name], tokens)


class TestCapturedWorkerWithWindows(CapturedSuite):
    """R4.55: two groups of blocks, and so two tables and mappings."""

    architecture: ClassVar[str] = "Qwen2ForCausalLM"
    checkpoint_config: ClassVar[Mapping[str, Any]] = {
        "use_sliding_window": True,
        "sliding_window": 6,
        "max_window_layers": 1,
    }


class TestCapturedWorkerThatPromises(CapturedSuite):
    """R4.55, R4.68: samples stay on the device, and a recording reads the ids that are made of them there."""

    options: ClassVar[Mapping[str, Any]] = {**CapturedSuite.options, "asynchronous_output": True}
