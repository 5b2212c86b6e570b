"""The FlashAttention adaptor passes the conformance suite of its kind, on doubles of the three generations."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import ClassVar

import pytest
import torch

from flash_cases import flash_backend
from flash_double import FlashDouble
from hardpoint.interfaces.attention import AttentionBackend
from hardpoint_attention.flash.capabilities import FP8_DTYPES
from hardpoint_testing_torch import AttentionBackendSuite, AttentionShape

pytestmark = pytest.mark.slow


class FlashSuite(AttentionBackendSuite):
    generation: ClassVar[int]
    block_size: ClassVar[int] = 16
    stored_tolerance: ClassVar[Mapping[str, float]] = dict.fromkeys(FP8_DTYPES, 0.15)
    """Kernels that read an 8-bit cache want 8-bit queries, whose rounding the dense answer does not have."""

    @pytest.fixture
    def backend(self) -> Iterator[AttentionBackend]:
        with FlashDouble(with_out=self.generation == 3).installed():
            yield flash_backend(self.generation)

    @pytest.fixture
    def base(self, backend: AttentionBackend) -> AttentionShape:
        return AttentionShape(dtype=torch.bfloat16, block_size=self.block_size)


class TestFlashAttention3(FlashSuite, AttentionBackendSuite):
    """The installed plugin's declarations are compared with what this one answers."""

    plugin: ClassVar[str | None] = "flash_attn"
    generation = 3
    block_size = 64


class TestFlashAttention2(FlashSuite):
    generation = 2
    block_size = 256


class TestFlashAttention4(FlashSuite):
    generation = 4
