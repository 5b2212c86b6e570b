"""The FlashInfer adaptor passes the conformance suite of its kind, on a double of the package."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from flashinfer_double import FlashInferDouble
from hardpoint.interfaces.attention import AttentionBackend, AttentionNeed
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_attention.flashinfer import FlashInferBackend, FlashInferOptions
from hardpoint_testing_torch import AttentionBackendSuite, AttentionShape

H100 = DeviceDescription(device_type="cuda", name="H100", capability=(9, 0))

pytestmark = pytest.mark.slow


class OnCpuTensors(FlashInferBackend):
    """Answers for a fabricated device when asked about a CPU, whose tensors the double computes with."""

    def refuse(self, need: AttentionNeed) -> str | None:
        return super().refuse(replace(need, device=H100) if need.device.device_type == "cpu" else need)


class TestFlashInfer(AttentionBackendSuite):
    plugin: ClassVar[str | None] = "flashinfer"
    head_sizes: ClassVar[tuple[int, ...]] = (64, 128)

    @pytest.fixture
    def backend(self) -> Iterator[AttentionBackend]:
        with FlashInferDouble().installed():
            yield OnCpuTensors(FlashInferOptions(workspace_bytes=1024, max_pages=256), dtype=torch.bfloat16)

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        return AttentionShape(dtype=torch.bfloat16, block_size=16, head_size=64)
