"""Executors that no distribution registers; found by the path of their class alone."""

from __future__ import annotations

from typing import Any, ClassVar

from hardpoint.interfaces import ExecutorContext
from hardpoint.testing import FakeExecutor
from hardpoint_fakes import create_executor  # type: ignore[import-not-found]

MADE: list[str] = []


class Direct(FakeExecutor):
    def __init__(self, ctx: ExecutorContext, options: Any) -> None:
        MADE.append(type(self).__name__)
        super().__init__(create_executor(ctx, options).worker)


class Staged(Direct):
    supports_pipeline_parallel: ClassVar[bool] = True


class Outer:
    class Inner(Direct):
        """Has a dot in its name."""


class NoExecutor:
    def __init__(self, ctx: ExecutorContext, options: Any) -> None:
        MADE.append("NoExecutor")


def function(ctx: ExecutorContext, options: Any) -> FakeExecutor:
    MADE.append("function")
    return create_executor(ctx, options)
