"""The installed graph backend is held to the kit: on a device where there is one, and over a recorder of operators."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch

from gpu_doubles import ReplayingDevice
from hardpoint.interfaces.graph_backend import GraphBackend
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_gpu.graphs import DeviceGraphBackend
from hardpoint_testing_torch import GraphBackendSuite


class TestCudaGraphs(GraphBackendSuite):
    """As it is installed: without a device it is held to its refusal."""

    plugin: ClassVar[str | None] = "cuda_graphs"


class TestOverARecorder(GraphBackendSuite):
    """What surrounds captures and replays is the backend's own, the recording a double's that computes."""

    def create_backend(self, ctx: WorkerContext) -> GraphBackend:
        return DeviceGraphBackend(namespace=ReplayingDevice())


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no device that captures graphs")
class TestOnADevice(GraphBackendSuite):
    plugin: ClassVar[str | None] = "cuda_graphs"
    device: ClassVar[str] = "cuda"

    def create_pool(self) -> Any:
        return torch.cuda.graph_pool_handle()
