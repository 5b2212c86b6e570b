"""``cpu_paged`` passes the conformance suite of its kind: on the best level, and before it is compiled."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import ClassVar

import pytest

from hardpoint.interfaces.attention import AttentionBackend
from hardpoint.interfaces.platform import ThreadPlan
from hardpoint.interfaces.worker import WorkerContext
from hardpoint_cpu.attention_backend import CpuPagedBackend
from hardpoint_cpu.kernels import KernelReport, KernelState
from hardpoint_cpu.native.library import NativeLibrary
from hardpoint_cpu.platform import CpuOptions, CpuPlatform
from hardpoint_testing_torch import AttentionBackendSuite


@cache
def platform(level: str) -> CpuPlatform:
    """One per level: asking for the compiler's version takes longer than most tests."""
    made = CpuPlatform(CpuOptions(kernel_level=level, kernel_build="wait"))
    made.kernels.bind(ThreadPlan(compute_threads=2))
    return made


@pytest.mark.slow
class TestCpuPaged(AttentionBackendSuite):
    plugin: ClassVar[str | None] = "cpu_paged"
    level: ClassVar[str] = "auto"

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        return super().create_backend(replace(ctx, platform=platform(self.level)))


@pytest.mark.slow
class TestPromptsOnMatrixUnits(TestCpuPaged):
    """As it is made for a run that asks for no invariance."""

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        return CpuPagedBackend(platform(self.level).kernels, parts=3)

    def test_it_declares_what_it_can_do(self) -> None:  # type: ignore[override]
        pytest.skip("what is declared holds for runs that ask for invariance as well")


class NotYet:
    """Kernels that are being compiled for as long as anybody asks."""

    def library(self) -> NativeLibrary | None:
        return None

    wait = library

    def report(self) -> KernelReport:
        return KernelReport("generic", KernelState.COMPILING)


@pytest.mark.slow
class TestBeforeKernels(AttentionBackendSuite):
    """Plain torch meanwhile."""

    def create_backend(self, ctx: WorkerContext) -> AttentionBackend:
        del ctx
        return CpuPagedBackend(NotYet())

    def test_batch_invariance_is_kept_where_it_is_accepted(self) -> None:  # type: ignore[override]
        pytest.skip("the need is accepted only once kernels are there")
