"""The installed compiler of the CPU platform is held to the kit, like anybody's."""

from __future__ import annotations

from functools import cache
from typing import ClassVar

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.platform import Platform
from hardpoint_cpu.attention_backend import CpuPagedBackend
from hardpoint_cpu.platform import CpuOptions, CpuPlatform
from hardpoint_testing_torch import CompilerSuite


@cache
def platform() -> CpuPlatform:
    return CpuPlatform(CpuOptions(kernel_build="wait"))


class TestCpuNative(CompilerSuite):
    """Between calls over layers attention is somebody else's."""

    plugin: ClassVar[str | None] = "cpu_native"

    def create_platform(self) -> Platform:
        return platform()


class TestCpuNativeWithItsAttention(TestCpuNative):
    """Whole stacks of decoder layers are one call."""

    plugin: ClassVar[str | None] = "cpu_native"

    def create_backend(self, dtype: str) -> AttentionBackend:
        return CpuPagedBackend(platform().kernels) if dtype == "float32" else super().create_backend(dtype)
