"""The FlashAttention adaptor passes the conformance suite of its kind, on doubles of the three generations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import ClassVar

import pytest
import torch

from flash_double import FlashDouble
from hardpoint.interfaces.attention import AttentionBackend, AttentionNeed, BlockSizeRule
from hardpoint.interfaces.platform import DeviceDescription
from hardpoint_attention.flash import FlashBackend, FlashOptions, FlashSurroundings, InstalledKernels
from hardpoint_attention.flash.capabilities import FP8_DTYPES
from hardpoint_testing_torch import AttentionBackendSuite, AttentionShape

DEVICES = {
    2: DeviceDescription(device_type="cuda", name="A100", capability=(8, 0)),
    3: DeviceDescription(device_type="cuda", name="H100", capability=(9, 0)),
    4: DeviceDescription(device_type="cuda", name="B200", capability=(10, 0)),
}


class OnCpuTensors(FlashBackend):
    """Answers for the fabricated device when asked about a CPU, whose tensors the doubles compute with."""

    def refuse(self, need: AttentionNeed) -> str | None:
        return super().refuse(self._moved(need))

    def block_sizes(self, need: AttentionNeed) -> BlockSizeRule:
        return super().block_sizes(self._moved(need))

    def _moved(self, need: AttentionNeed) -> AttentionNeed:
        return replace(need, device=self.surroundings.device) if need.device.device_type == "cpu" else need


class FlashSuite(AttentionBackendSuite):
    generation: ClassVar[int]
    block_size: ClassVar[int] = 16
    stored_tolerance: ClassVar[Mapping[str, float]] = dict.fromkeys(FP8_DTYPES, 0.15)
    """Kernels that read an 8-bit cache want 8-bit queries, whose rounding the dense answer does not have."""

    @pytest.fixture
    def backend(self) -> Iterator[AttentionBackend]:
        installed = InstalledKernels({self.generation: "test"}, {2: 256})
        surroundings = FlashSurroundings(DEVICES[self.generation], installed)
        with FlashDouble(with_out=self.generation == 3).installed():
            yield OnCpuTensors(surroundings, FlashOptions())

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        return AttentionShape(dtype=torch.bfloat16, block_size=self.block_size)


class TestFlashAttention3(FlashSuite):
    generation = 3
    block_size = 64


class TestFlashAttention2(FlashSuite):
    generation = 2
    block_size = 256


class TestFlashAttention4(FlashSuite):
    generation = 4
