"""Every method keeps the rules of its kind."""

from __future__ import annotations

from typing import ClassVar

import pytest

from hardpoint_testing_torch import QuantizationSuite

pytestmark = pytest.mark.slow


class TestInt8(QuantizationSuite):
    plugin: ClassVar[str | None] = "int8"
    max_relative_error: ClassVar[float] = 0.015
    max_bytes_per_weight: ClassVar[float | None] = 1.05
