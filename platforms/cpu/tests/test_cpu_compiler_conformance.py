"""The installed compiler of the CPU platform is held to the kit, like anybody's."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.platform import Platform
from hardpoint_cpu.attention_backend import CpuPagedBackend
from hardpoint_cpu.platform import CpuOptions, CpuPlatform
from hardpoint_testing_torch import CompilerSuite


@cache
def platform() -> CpuPlatform:
    return CpuPlatform(CpuOptions(kernel_build="wait"))


class TestCpuNative(CompilerSuite):
    """Whole stacks of decoder layers are one call."""

    plugin: ClassVar[str | None] = "cpu_native"

    def create_platform(self) -> Platform:
        return platform()

    def create_backend(self, dtype: str) -> AttentionBackend:
        return CpuPagedBackend(platform().kernels) if dtype == "float32" else super().create_backend(dtype)


@pytest.mark.slow
class TestCpuNativeWithOthersAttention(CompilerSuite):
    """Two calls for each layer, and somebody else's attention in between."""

    plugin: ClassVar[str | None] = "cpu_native"

    def create_platform(self) -> Platform:
        return platform()
