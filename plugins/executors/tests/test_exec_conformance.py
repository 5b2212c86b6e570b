"""Both executors keep the contract of their kind."""

from __future__ import annotations

from typing import ClassVar

from hardpoint.testing.executor_suite import ExecutorSuite


class TestUniproc(ExecutorSuite):
    plugin: ClassVar[str | None] = "uniproc"


class TestMultiproc(ExecutorSuite):
    plugin: ClassVar[str | None] = "multiproc"
    world_sizes: ClassVar[tuple[int, ...]] = (1, 2)
    interruptible: ClassVar[bool] = True
