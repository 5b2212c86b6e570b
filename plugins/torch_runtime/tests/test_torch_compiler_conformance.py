"""The compiler that leaves models alone is held to the kit: every bit must stay."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint_testing_torch import CompilerSuite


@pytest.mark.slow
class TestNone(CompilerSuite):
    plugin: ClassVar[str | None] = "none"
    lowers_nothing: ClassVar[bool] = True
