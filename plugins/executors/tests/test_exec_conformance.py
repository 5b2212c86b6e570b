"""Both executors keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.interfaces import Executor, ExecutorContext, NoOptions
from hardpoint.testing.executor_suite import ExecutorSuite
from hardpoint_executors.multiproc import MultiprocOptions
from hardpoint_executors.multiproc import create as create_multiproc
from hardpoint_executors.uniproc import create as create_uniproc


class TestUniproc(ExecutorSuite):
    def create_executor(self, ctx: ExecutorContext) -> Executor:
        return create_uniproc(ctx, NoOptions())


class TestMultiproc(ExecutorSuite):
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    interruptible: ClassVar[bool] = True

    def create_executor(self, ctx: ExecutorContext) -> Executor:
        return create_multiproc(ctx, MultiprocOptions())
